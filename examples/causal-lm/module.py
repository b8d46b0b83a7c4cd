"""A causal language model with transformers: trained from scratch, or with adapters on an existing model."""

from __future__ import annotations

from typing import Any

import torch
from data import Batch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer import TrainModule


class CausalLM(TrainModule):
    """Predicts the next token.

    Args:
        folder: a folder of `save_pretrained` to start from; None: a small Llama with random weights.
        rank: rank of the adapters (LoRA) that train instead of the model's weights; 0: train the weights.
        width, layers, heads: sizes of the small Llama.
        lr: learning rate.
        save_to: folder for `from_pretrained` to write at the end of training; None: do not write one.
    """

    def __init__(
        self,
        folder: str | None = None,
        rank: int = 0,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        lr: float = 3e-3,
        save_to: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        options = self.hparams
        if options.folder is None:
            sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width}
            sizes |= {"num_hidden_layers": options.layers, "num_attention_heads": options.heads, "vocab_size": 256}
            self.net = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
        else:
            self.net = AutoModelForCausalLM.from_pretrained(options.folder).train()  # it is in eval mode
        if options.rank:
            adapters = LoraConfig(r=options.rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            self.net = get_peft_model(self.net, adapters)

    def num_items(self, batch: Batch) -> int:
        """Return the number of predictions: the first token of a piece is given."""
        return batch["labels"][:, 1:].numel()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.net(**batch).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.hparams.lr)

    def on_fit_end(self) -> None:
        if self.hparams.save_to is not None:
            self.net.save_pretrained(self.hparams.save_to)  # on all processes, under every strategy
