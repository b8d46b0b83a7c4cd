"""Means of `self.log` over batches whose losses count by the module's `num_items`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from trainer import Callback, Trainer, TrainModule

TOKENS = torch.randint(16, (16, 10), generator=torch.Generator().manual_seed(0))
TARGETS = TOKENS.roll(-1, 1).clone()
for row in range(16):
    TARGETS[row, 1 + (row * 5) % 9 :] = -100


def loss_of(net: nn.Module, rows: slice = slice(None)) -> float:
    loss = cross_entropy(net(TOKENS[rows]).flatten(0, 1), TARGETS[rows].flatten(), ignore_index=-100)
    return float(loss.detach())


class Masked(TrainModule):
    """A loss that is a mean over tokens, of which batches have different numbers."""

    def __init__(self, counts: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.counts = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)), counts

    def num_items(self, batch: Any) -> Any:
        number = (batch[1] != -100).sum()
        found = {"tensor": number, "int": int(number), "weights": 0.07 * float(number), "none": None}
        return found[self.counts]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.mean(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("by samples", loss, on_epoch=True, batch_size=len(batch[0]))
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.mean(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"test_loss": self.mean(batch)})

    def mean(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Steps(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.losses.append(trainer.read_metrics()["loss_step"])


def logged(counts: str, processes: int = 1) -> tuple[dict[str, float], list[float]]:
    def loader() -> DataLoader[Any]:
        return DataLoader(TensorDataset(TOKENS, TARGETS), batch_size=4 // processes)

    module, steps = Masked(counts), Steps()
    place = {"accelerator": "cpu", "devices": processes, "callbacks": steps}
    trainer = Trainer(max_epochs=1, accumulate_grad_batches=2, **place, **QUIET)
    trainer.fit(module, loader(), loader())
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found |= trainer.test(module, loader(), verbose=False)[0]
    return found, steps.losses


def check(found: dict[str, float], losses: list[float], net: nn.Module) -> None:
    """Compare with the means over all tokens of a step's and of all samples."""
    for name in ("loss_epoch", "val_loss", "test_loss"):
        assert found[name] == pytest.approx(loss_of(net), rel=1e-6), name
    assert losses == pytest.approx([loss_of(net, slice(0, 8)), loss_of(net, slice(8, 16))], rel=1e-6)


@pytest.mark.parametrize("counts", ["tensor", "int", "weights"])
def test_a_mean_is_over_the_items_of_the_loss(counts: str) -> None:
    net = Masked().net
    found, losses = logged(counts)
    check(found, losses, net)
    parts = [loss_of(net, slice(first, first + 4)) for first in range(0, 16, 4)]
    assert found["by samples_epoch"] == pytest.approx(sum(parts) / 4, rel=1e-6)
    assert found["largest"] == pytest.approx(max(parts), rel=1e-6)


def test_without_a_number_it_is_over_samples() -> None:
    found, _ = logged("none")
    assert found["loss_epoch"] == found["by samples_epoch"]


def test_it_is_the_same_on_two_processes() -> None:
    for found, losses in run_distributed(logged, 2, "tensor", 2):
        check(found, losses, Masked().net)


class Trains(Masked):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize("counts", ["tensor", "int", "weights"])
def test_gradients_are_of_the_mean_over_the_items_of_a_step(counts: str) -> None:
    """Also of items that are weights, below 1."""
    module, by_hand = Trains(counts), Trains().net
    trainer = Trainer(max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(TOKENS, TARGETS), batch_size=4))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    for rows in (slice(0, 8), slice(8, 16)):
        optimizer.zero_grad()
        cross_entropy(by_hand(TOKENS[rows]).flatten(0, 1), TARGETS[rows].flatten(), ignore_index=-100).backward()
        optimizer.step()
    for found, expected in zip(module.net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
