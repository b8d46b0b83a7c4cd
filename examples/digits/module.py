"""A small convolutional net for the digits: its steps, metrics and optimizer.

Run it with: trainer fit --config config.yaml
"""

from __future__ import annotations

from typing import Any

import torch
from data import Batch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer import TrainModule


class Digits(TrainModule):
    """Classifies an image of 8 x 8 pixels as one of ten digits.

    Args:
        lr: learning rate of the first epoch.
        lr_decay: factor of the learning rate after each epoch.
        width: channels of the first convolution; the second has twice as many.
        dropout: share of features dropped in training.
        weight_decay: AdamW's weight decay.
    """

    def __init__(
        self,
        lr: float = 3e-3,
        lr_decay: float = 0.85,
        width: int = 32,
        dropout: float = 0.2,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__()
        from torchmetrics.classification import MulticlassAccuracy

        # Keeps the arguments in every checkpoint, so that Digits.load_from_checkpoint(path) needs no others.
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4 * 4, 10),
        )
        # A metric that is an attribute moves to the device with the module and adds up over batches and processes.
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`images`: (batch, 1, 8, 8). Returns logits (batch, 10)."""
        logits: torch.Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        images, digits = batch
        loss = cross_entropy(self(images), digits)
        # Recorded, not read: the value stays on the device until the log is written.
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, digits = batch
        logits = self(images)
        self.val_acc.update(logits, digits)
        self.log("val_loss", cross_entropy(logits, digits))
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, digits = batch
        logits = self(images)
        self.test_acc.update(logits, digits)
        self.log("test_loss", cross_entropy(logits, digits))
        self.log("test_acc", self.test_acc)

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the most likely digit of each image: (batch,) int64."""
        images, _ = batch
        predicted: torch.Tensor = self(images).argmax(dim=1)
        return predicted

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        # A scheduler steps once per epoch unless it asks for {"scheduler": ..., "interval": "step"}.
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=self.hparams.lr_decay)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
