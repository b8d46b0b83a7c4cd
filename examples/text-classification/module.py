"""A small classifier of texts: its steps, metrics and optimizer."""

from __future__ import annotations

import torch
from data import PACKAGES, VOCABULARY, Batch
from torch import nn
from torch.nn.functional import cross_entropy

from trainer import TrainModule


class TextClassifier(TrainModule):
    """Classifies a text by the mean of its words' vectors.

    Args:
        classes: number of labels.
        width: features of a word.
        dropout: share of features dropped in training.
        lr: learning rate.
    """

    def __init__(self, classes: int = len(PACKAGES), width: int = 64, dropout: float = 0.3, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        # For longer texts, put a transformer here and a tokenizer into data.py.
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.head = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes)
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """`words`: (batch, words) int64, 0 for padding. Returns logits (batch, classes)."""
        count = (words > 0).sum(dim=1, keepdim=True).clamp(min=1)
        logits: torch.Tensor = self.head(self.words(words).sum(dim=1) / count)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        words, labels = batch
        loss = cross_entropy(self(words), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        words, labels = batch
        logits = self(words)
        # Means over all texts, on any number of processes.
        self.log("val_loss", cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(dim=1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
