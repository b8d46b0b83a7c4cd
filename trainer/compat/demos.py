"""Lightning's demonstration modules and their data, which tests and examples use: the same layers, losses and rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from trainer.data.datamodule import DataModule
from trainer.module import TrainModule


class RandomDataset(Dataset[Tensor]):
    """`length` rows of `size` random numbers."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class BoringModel(TrainModule):
    """A linear layer that learns to return ones, with loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Any:
        """Return the layer's output."""
        return self.layer(x)

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared distance to the labels, by default ones."""
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        """Return SGD, with a learning rate that falls each epoch."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        """Return 64 rows, as for the other stages."""
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class DemoModel(TrainModule):
    """A linear layer of a chosen size and learning rate."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified output of the layer."""
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        """Return the sum of the output."""
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class BoringDataModule(DataModule):
    """A quarter of 256 rows for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def train_dataloader(self) -> Any:
        """Return the first rows."""
        return DataLoader(Subset(self.random_full, range(64)))

    def val_dataloader(self) -> Any:
        """Return the second rows."""
        return DataLoader(Subset(self.random_full, range(64, 128)))

    def test_dataloader(self) -> Any:
        """Return the third rows."""
        return DataLoader(Subset(self.random_full, range(128, 192)))

    def predict_dataloader(self) -> Any:
        """Return the last rows."""
        return DataLoader(Subset(self.random_full, range(192, 256)))


def cli_lightning_logo() -> None:
    """Print the package's name, with which Lightning's examples begin."""
    print("\nTrainer\n")


def mnist(*args: Any, **options: Any) -> Any:
    """Return torchvision's dataset."""
    from torchvision.datasets import MNIST

    return MNIST(*args, **options)


def get_torchvision_model(name: str, **options: Any) -> Any:
    """Return a model of torchvision."""
    from torchvision.models import get_model

    return get_model(name, **options)
