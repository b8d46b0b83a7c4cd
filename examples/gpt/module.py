"""A small GPT on bytes: decay groups, warm-up and cosine, a loss that is exact per byte.

Run it with: trainer fit --config config.yaml
Then `python sample.py` continues "def ".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from data import IGNORED, Example
from model import Transformer
from torch.nn.functional import cross_entropy

from trainer import Callback, TrainModule
from trainer.callbacks import ThroughputMonitor

VOCABULARY = 256
"""A token is a byte."""


class GPT(TrainModule):
    """Predicts each next byte of a text.

    Args:
        context: maximum number of bytes in its input; the data's `context`.
        layers, heads, width, dropout: the transformer's size and dropout.
        lr: the highest learning rate, reached after the warm-up.
        warmup_steps: steps until the learning rate reaches `lr`; then it falls to a tenth along a cosine.
        weight_decay: AdamW's weight decay, for matrices only.
    """

    def __init__(
        self,
        context: int = 64,
        layers: int = 3,
        heads: int = 4,
        width: int = 96,
        dropout: float = 0.0,
        lr: float = 3e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Transformer | None = None

    def configure_model(self) -> None:
        """Build the layers on the device and in the dtype that the strategy chooses, so that a large model never has to
        exist in full on one device. For a small one `__init__` works as well."""
        if self.net is None:
            hp = self.hparams
            self.net = Transformer(VOCABULARY, hp.context, hp.layers, hp.heads, hp.width, hp.dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: (batch, length) int64. Returns the logits of each next byte, (batch, length, 256)."""
        assert self.net is not None
        logits: torch.Tensor = self.net(tokens)
        return logits

    # -- the loss is a mean over bytes -----------------------------------------------------------------------------

    def num_items(self, batch: Example) -> torch.Tensor:
        """Return the number of bytes with a target: a piece at the end of a file is shorter than the others. With this
        number every byte of a step counts the same, for any process and micro-batch."""
        _, targets = batch
        count: torch.Tensor = (targets != IGNORED).sum()
        return count

    def loss(self, batch: Example) -> torch.Tensor:
        """Return the mean cross-entropy of this batch's bytes, in nats."""
        inputs, targets = batch
        loss: torch.Tensor = cross_entropy(self(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return loss

    def training_step(self, batch: Example, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Example, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_bits_per_byte", loss / math.log(2))

    # -- optimizer and schedule ------------------------------------------------------------------------------------

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an AdamW that decays matrices but not biases and norms, with a schedule that steps every step."""
        hp = self.hparams
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": hp.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=hp.lr, betas=(0.9, 0.95))

        # The number of steps of this fit. Infinite if nothing ends it; then the cosine stays at its top.
        total_steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_then_cosine(step, hp.warmup_steps, total_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_callbacks(self) -> list[Callback]:
        """Return the callback that needs this module's units; the others are in the config."""
        return [
            ThroughputMonitor(
                items_per_batch=lambda batch: batch[0].numel(),
                items_name="bytes",
                # Forward and backward together: 6 operations per parameter and byte (Kaplan et al., 2020).
                flops_per_sample=lambda gpt: 6.0 * sum(p.numel() for p in gpt.parameters()) * self.hparams.context,
            )
        ]


def warmup_then_cosine(step: int, warmup_steps: int, total_steps: float, floor: float = 0.1) -> float:
    """Return the learning rate of `step` (from 0) as a share of the highest one."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
