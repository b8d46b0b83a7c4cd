"""A text classifier with transformers: fine-tuned, or trained from scratch."""

from __future__ import annotations

from typing import Any

import torch
from data import LABELS
from transformers import AutoModelForSequenceClassification, BertConfig

from trainer import TrainModule


class TextClassifier(TrainModule):
    """Classifies a text.

    Args:
        folder: a folder or name for `from_pretrained` to start from; None: a small BERT with random weights.
        vocabulary, width, layers, heads: sizes of the small BERT.
        lr: learning rate.
        save_to: folder for `from_pretrained` to write at the end of training; None: do not write one.
    """

    def __init__(
        self,
        folder: str | None = None,
        vocabulary: int = 4096,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        lr: float = 1e-3,
        save_to: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        options = self.hparams
        labels = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
        if options.folder is None:
            sizes = {"vocab_size": options.vocabulary, "hidden_size": options.width, "pad_token_id": 0}
            sizes |= {"num_hidden_layers": options.layers, "num_attention_heads": options.heads}
            sizes |= {"intermediate_size": 4 * options.width}
            self.net = AutoModelForSequenceClassification.from_config(BertConfig(**sizes, **labels))
        else:
            # The new head has random weights; the model is in eval mode.
            self.net = AutoModelForSequenceClassification.from_pretrained(options.folder, **labels).train()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(**batch)
        # Means over all texts, on any number of processes.
        self.log("val_loss", output.loss)
        self.log("val_acc", (output.logits.argmax(dim=1) == batch["labels"]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def on_fit_end(self) -> None:
        if self.hparams.save_to is not None:
            self.net.save_pretrained(self.hparams.save_to)  # on all processes, under every strategy
            if self.trainer.is_global_zero:
                self.trainer.datamodule.tokenizer.save_pretrained(self.hparams.save_to)
