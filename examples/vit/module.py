"""An image classifier with transformers: fine-tuned, or trained from scratch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageClassification, ViTConfig

from trainer import TrainModule


class ImageClassifier(TrainModule):
    """Classifies an image.

    Args:
        folder: a folder or name for `from_pretrained` to start from; None: a small ViT with random weights.
        classes: number of labels.
        width, layers, heads: sizes of the small ViT, for images of 16 x 16 pixels.
        lr: learning rate.
        save_to: folder for `from_pretrained` to write at the end of training; None: do not write one.
    """

    def __init__(
        self,
        folder: str | None = None,
        classes: int = 10,
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
        if options.folder is None:
            sizes = {"image_size": 16, "patch_size": 4, "hidden_size": options.width}
            sizes |= {"num_hidden_layers": options.layers, "num_attention_heads": options.heads}
            sizes |= {"intermediate_size": 2 * options.width, "num_labels": options.classes}
            self.net = AutoModelForImageClassification.from_config(ViTConfig(**sizes))
        else:
            # A head for other labels has random weights; the model is in eval mode.
            options = {"num_labels": options.classes, "ignore_mismatched_sizes": True}
            self.net = AutoModelForImageClassification.from_pretrained(self.hparams.folder, **options).train()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(**batch)
        # Means over all images, on any number of processes.
        self.log("val_loss", output.loss)
        self.log("val_acc", (output.logits.argmax(dim=1) == batch["labels"]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def on_fit_end(self) -> None:
        if self.hparams.save_to is not None:
            self.net.save_pretrained(self.hparams.save_to)  # on all processes, under every strategy
            if self.trainer.is_global_zero:
                self.trainer.datamodule.processor.save_pretrained(self.hparams.save_to)
