"""The suggested learning rate trains: it lies among those that a hand-written loop does well with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.toy import quiet
from trainer import TrainModule, Tuner
from trainer.tuner.lr_finder import Losses, LRFinder, Rates

SAMPLES, STEPS, SEEDS = 512, 200, range(5)
GRID = torch.logspace(-6, 1, 25).tolist()
SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW

Data = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Task(NamedTuple):
    build: Callable[[], nn.Module]
    loss: Loss
    data: Callable[[torch.Generator], Data]
    optimizer: Callable[..., torch.optim.Optimizer]
    batch: int


def regression(noise: float, scales: list[float]) -> Callable[[torch.Generator], Data]:
    def make(generator: torch.Generator) -> Data:
        x = torch.randn(SAMPLES, len(scales), generator=generator) * torch.tensor(scales)
        y = x @ torch.randn(len(scales), 1, generator=generator)
        return x, y + noise * torch.randn(SAMPLES, 1, generator=generator)

    return make


def classes(wrong: float, shape: tuple[int, ...] = (8,), number: int = 3) -> Callable[[torch.Generator], Data]:
    """Clouds around a centre of each class; a part of the labels is drawn at random."""

    def make(generator: torch.Generator) -> Data:
        centres = torch.randn(number, *shape, generator=generator)
        y = torch.randint(0, number, (SAMPLES,), generator=generator)
        x = centres[y] + torch.randn(SAMPLES, *shape, generator=generator)
        drawn = torch.randint(0, number, (SAMPLES,), generator=generator)
        return x, torch.where(torch.rand(SAMPLES, generator=generator) < wrong, drawn, y)

    return make


def words(generator: torch.Generator) -> Data:
    """Bags of six words, whose frequencies depend on the class."""
    y = torch.randint(0, 3, (SAMPLES,), generator=generator)
    frequencies = torch.rand(3, 50, generator=generator) ** 4
    return torch.multinomial(frequencies[y], 6, True, generator=generator), y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 3))


def bag() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(50, 8), nn.Linear(8, 3))


TASKS = {
    "linear SGD, 8, noise": Task(lambda: nn.Linear(4, 1), mse_loss, regression(1.0, [1.0] * 4), SGD, 8),
    "linear SGD, 2, noise": Task(lambda: nn.Linear(2, 1), mse_loss, regression(0.5, [1.0] * 2), SGD, 2),
    "logistic SGD, 4, noise": Task(lambda: nn.Linear(8, 3), cross_entropy, classes(0.3), SGD, 4),
    "MLP Adam, 8, noise": Task(mlp, cross_entropy, classes(0.2), ADAM, 8),
    "MLP AdamW, 8, noise": Task(mlp, cross_entropy, classes(0.3), ADAMW, 8),
    "MLP SGD, 64": Task(mlp, cross_entropy, classes(0.0), SGD, 64),
    "linear SGD, badly scaled": Task(
        lambda: nn.Linear(4, 1), mse_loss, regression(0.1, [0.1, 1.0, 10.0, 100.0]), SGD, 16
    ),
    "logistic momentum, 32": Task(
        lambda: nn.Linear(8, 3), cross_entropy, classes(0.0), lambda p, lr: SGD(p, lr, momentum=0.9), 32
    ),
    "CNN Adam, 16": Task(cnn, cross_entropy, classes(0.0, (1, 8, 8)), ADAM, 16),
    "embeddings Adam, 32": Task(bag, cross_entropy, words, ADAM, 32),
}
WITHOUT: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "constant": lambda net, x: net(x).sum() * 0 + 3.0,
    "random": lambda net, x: net(x).sum() * 0 + torch.rand(()),
    "of other numbers in each step": lambda net, x: (net(x) * torch.randn(len(x), 1)).mean(),
}


class Net(TrainModule):
    def __init__(self, task: Task, net: nn.Module) -> None:
        super().__init__()
        self.task, self.net, self.lr = task, net, 1e-3

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.task.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.task.optimizer(self.parameters(), lr=self.lr)


def order(batch: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(SAMPLES, generator=generator).split(batch)


def good_range(task: Task, net: nn.Module, data: Data, seed: int) -> tuple[float, float]:
    """Return the rates whose loss after 200 steps is within 10 % of the way from the best to the start."""

    def loss_of_all() -> float:
        with torch.no_grad():
            loss = float(task.loss(net(data[0]), data[1]))
        return loss if math.isfinite(loss) else math.inf

    before = {name: value.clone() for name, value in net.state_dict().items()}
    start, ends = loss_of_all(), {}
    for rate in GRID:
        optimizer, batches = task.optimizer(net.parameters(), lr=rate), order(task.batch, seed + 100)
        for _ in range(STEPS):
            rows = next(batches)
            optimizer.zero_grad()
            loss = task.loss(net(data[0][rows]), data[1][rows])
            loss.backward()
            optimizer.step()
        ends[rate] = loss_of_all()
        net.load_state_dict(before)
    best = min(ends.values())
    good = [rate for rate, end in ends.items() if end <= best + 0.1 * (start - best)]
    return min(good), max(good)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TASKS)
def test_the_suggestion_trains(name: str, seed: int) -> None:
    task, generator = TASKS[name], torch.Generator().manual_seed(1000 + seed)
    data = task.data(generator)
    torch.manual_seed(seed)
    module = Net(task, task.build())
    loader = DataLoader(TensorDataset(*data), task.batch, shuffle=True)
    finder = Tuner(quiet(seed=seed if seed % 2 else None)).lr_find(module, loader)
    low, high = good_range(task, module.net, data, seed)
    suggested = finder.suggestion()
    assert suggested is not None, finder.stopped
    assert low <= suggested <= high, finder.falls
    assert module.lr == suggested


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WITHOUT)
def test_where_nothing_descends_no_number_is_suggested(name: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    class Without(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return WITHOUT[name](self.net, batch[0])

    torch.manual_seed(seed)
    module = Without(TASKS["linear SGD, 8, noise"], nn.Linear(4, 1))
    data = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(data, data), 8, shuffle=True)
    finder = Tuner(quiet(seed=seed if seed % 2 else None)).lr_find(module, loader)
    assert finder.suggestion() is None
    assert finder.stopped.startswith("no descent seen: ")
    assert "lr_find: no descent seen: " in caplog.text
    assert module.lr == 1e-3


def searched(level: float, max_lr: float = 1.0) -> LRFinder:
    """Search for the rate of gradient descent on a parabola, which diverges from a rate of 1 on."""

    def attempt(rates: Rates) -> Losses:
        weight = 1.0
        for rate in rates.rates:
            rates.losses.append(weight**2 + level)
            weight -= rate * 2 * weight
            if rates._ends is not None and rates._ends(rates.losses):
                break
        return rates.losses

    finder = LRFinder("exponential", 1e-8, max_lr, 100)
    finder.search(attempt, 4.0)
    return finder


@pytest.mark.parametrize("level", [-1000.0, -5.0, -1.0, -0.5, 3.0])
def test_the_level_of_the_loss_does_not_matter(level: float) -> None:
    """As that of a likelihood or of a similarity, which may be negative from the start."""
    assert searched(level, 10.0).suggestion() == pytest.approx(searched(0.0, 10.0).suggestion())


def test_a_rate_at_the_end_of_the_range_is_told() -> None:
    assert searched(0.0, 10.0).stopped == ""
    low = searched(0.0, 1e-3)
    assert low.suggestion() is not None
    assert low.stopped.endswith("where the range ends: try a higher max_lr")
