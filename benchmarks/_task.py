"""The work of the benchmarks: one model, data and optimizer for all contenders, and a hand-written loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._turns import Clock

BATCH = 32
FEATURES, WIDTH = 32, 64
LR = 0.01

OFF: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}
"""Arguments of our Trainer, and of Lightning's, that turn everything off."""


class Net(nn.Module):
    """32-64-1, or with more outputs; every forward pass ticks the clock."""

    def __init__(self, clock: Clock, outputs: int = 1, width: int = WIDTH, layers: int = 1) -> None:
        super().__init__()
        self.clock = clock
        self.first = nn.Linear(FEATURES, width)
        self.middle = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers - 1)]) if layers > 1 else None
        self.last = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.tick()
        x = F.relu(self.first(x))
        if self.middle is not None:
            x = F.relu(self.middle(x))
        return self.last(x)


class Batches:
    """Batches in memory: any iterable with a length."""

    batch_size = BATCH

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass
class Task:
    """One epoch of `steps` micro-batches: in memory, or rows of a TensorDataset through a shuffling DataLoader."""

    steps: int
    accumulate: int = 1
    loader: bool = False
    classes: int = 0
    """Number of classes; 0: regression."""

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.steps, BATCH, FEATURES, generator=generator)
        if self.classes:
            targets = torch.randint(0, self.classes, (self.steps, BATCH), generator=generator)
        else:
            targets = torch.randn(self.steps, BATCH, 1, generator=generator)
        self._batches = list(zip(inputs.unbind(), targets.unbind(), strict=True))
        self._rows = TensorDataset(inputs.flatten(0, 1), targets.flatten(0, 1))

    def data(self) -> Any:
        """Return the batches of one epoch."""
        if self.loader:
            return DataLoader(self._rows, batch_size=BATCH, shuffle=True)
        return Batches(self._batches)

    def batches(self) -> list[Any]:
        return self._batches

    def rows(self) -> TensorDataset:
        return self._rows


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LR)


def hand_written(task: Task, clock: Clock, folder: Path) -> None:
    """Train with the loop of the PyTorch tutorial."""
    net = Net(clock)
    optimizer = optimizer_of(net)
    data = task.data()
    net.train()
    if task.accumulate == 1:
        for x, y in data:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
        return
    for number, (x, y) in enumerate(data, 1):
        loss = F.mse_loss(net(x), y) / task.accumulate
        loss.backward()
        if number % task.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def hand_written_validation(task: Task, clock: Clock, folder: Path) -> None:
    """Compute loss and accuracy over all batches, with torchmetrics."""
    from torchmetrics.classification import MulticlassAccuracy

    net, accuracy = Net(clock, task.classes), MulticlassAccuracy(task.classes, average="micro")
    net.eval()
    total, count = torch.zeros(()), 0
    with torch.inference_mode():
        for x, y in task.data():
            logits = net(x)
            total += F.cross_entropy(logits, y) * len(x)
            count += len(x)
            accuracy.update(logits, y)
        result = {"val_loss": float(total) / count, "val_acc": float(accuracy.compute())}
    assert 0 <= result["val_acc"] <= 1


def train_with(engine: Any, task: Task, model: Any, optimizer: Any, data: Any) -> None:
    """Train with the loop from the docs of Lightning's Fabric; our Engine has the same names."""
    model.train()
    for number, (x, y) in enumerate(data, 1):
        last = number % task.accumulate == 0
        if task.accumulate == 1:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            engine.backward(loss)
            optimizer.step()
            continue
        with engine.no_backward_sync(model, enabled=not last):
            loss = F.mse_loss(model(x), y) / task.accumulate
            engine.backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()
