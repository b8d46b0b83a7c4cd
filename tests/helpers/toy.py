"""A minimal module, data and trainer for tests of callbacks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import DEVICE
from trainer import Trainer, TrainModule


class Toy(TrainModule):
    """A linear model that logs `train_loss` of steps and `val_loss` of validations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])


def loader(batches: int = 8, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader of batches of (features, target)."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(batches * batch_size, 4, generator=generator)
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=batch_size, **options)


def quiet(**settings: Any) -> Trainer:
    """Return a trainer with only the given callbacks."""
    off: dict[str, Any] = {
        "accelerator": DEVICE,
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "seed": 3,
    }
    return Trainer(**{**off, **settings})
