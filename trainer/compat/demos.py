"""Lightning's demonstration modules and datasets, which tests and examples use: the same layers, losses and samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

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


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of `count` rows of `size` random numbers."""

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class BoringModel(TrainModule):
    """One linear layer, with data, which learns to return ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        output: Tensor = self.layer(x)
        return output

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

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return 64 rows, as for the other stages."""
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class ManualOptimBoringModel(BoringModel):
    """The same with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Update the layer, and return the loss."""
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(TrainModule):
    """One linear layer of a chosen size and learning rate."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified output of the layer."""
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Tensor:
        """Return the sum of the output."""
        output: Tensor = self(batch)
        return output.sum()

    def configure_optimizers(self) -> Any:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class BoringDataModule(DataModule):
    """A quarter of 256 rows for each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def setup(self, stage: str) -> None:
        """Split the rows."""
        parts = [Subset(self.random_full, range(64 * part, 64 * (part + 1))) for part in range(4)]
        self.random_train, self.random_val, self.random_test, self.random_predict = parts

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the first rows."""
        return DataLoader(self.random_train)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Return the second rows."""
        return DataLoader(self.random_val)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Return the third rows."""
        return DataLoader(self.random_test)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """Return the last rows."""
        return DataLoader(self.random_predict)


def cli_lightning_logo() -> None:
    """Print the name of the package, as Lightning's examples begin."""
    print("\nTrainer\n")
