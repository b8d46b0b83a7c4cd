"""A small convolutional net, and how it is trained."""

from __future__ import annotations

import torch
from data import Batch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer import TrainModule


class Digits(TrainModule):
    """Tells which of ten digits an image of 8 x 8 pixels shows.

    Args:
        lr: learning rate.
        width: channels of the first convolution; the second has twice as many.
        dropout: share of features left out in training.
    """

    def __init__(self, lr: float = 3e-3, width: int = 32, dropout: float = 0.2) -> None:
        super().__init__()
        # Keeps the arguments in every checkpoint: Digits.load_from_checkpoint(path) needs no others.
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`images`: (batch, 1, 8, 8). Returns logits (batch, 10)."""
        logits: torch.Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        images, digits = batch
        loss = cross_entropy(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: Batch, name: str) -> None:
        images, digits = batch
        logits = self(images)
        # Means over all images, on any number of processes.
        self.log(f"{name}_loss", cross_entropy(logits, digits))
        self.log(f"{name}_acc", (logits.argmax(dim=1) == digits).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
