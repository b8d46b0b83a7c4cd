"""A GPT that predicts each next byte, and how it is trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from data import Example
from model import Transformer
from torch.nn.functional import cross_entropy

from trainer import TrainModule

VOCABULARY = 256
"""A token is a byte."""


class GPT(TrainModule):
    """A decoder-only transformer.

    Args:
        context: how many bytes it sees at most; the data's `context`.
        layers, heads, width, dropout: the transformer's size and dropout.
        lr: the highest learning rate, reached after the warm-up.
        warmup_steps: steps in which the learning rate rises to `lr`; from there it falls to a tenth along a cosine.
        weight_decay: of AdamW, for matrices only.
    """

    def __init__(
        self,
        context: int = 64,
        layers: int = 3,
        heads: int = 4,
        width: int = 96,
        dropout: float = 0.0,
        lr: float = 4e-3,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self) -> None:
        """The trainer decides where the layers come to be: a large model never has to exist whole on one device."""
        hp = self.hparams
        self.net = Transformer(VOCABULARY, hp.context, hp.layers, hp.heads, hp.width, hp.dropout)

    def loss(self, batch: Example) -> torch.Tensor:
        """The mean cross-entropy of the batch's bytes, in nats."""
        inputs, targets = batch
        return cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Example, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Example, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        hp = self.hparams
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": hp.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=hp.lr, betas=(0.9, 0.95))
        total = self.trainer.estimated_stepping_batches

        def share_of_lr(step: int) -> float:
            if step < hp.warmup_steps:
                return (step + 1) / hp.warmup_steps
            progress = min(1.0, (step - hp.warmup_steps) / max(1, total - hp.warmup_steps))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
