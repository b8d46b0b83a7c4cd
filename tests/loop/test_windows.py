"""The weights of a window's micro-batches on two processes, whose loaders are iterated here one beside the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.toy import Toy
from trainer.data.adapters import make_batch_loader
from trainer.loop.step import even_window, loss_divisors


class Ready(Dataset[Any]):
    """Gives batches: the numbers from 1, so many in each."""

    def __init__(self, sizes: list[int], beside: bool) -> None:
        numbers = torch.arange(1.0, sum(sizes) + 1).split(sizes)
        self.batches = [(one, torch.ones(4)) if beside else one for one in numbers]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Two:
    """A strategy's view of two processes, of which this one is the second that reports."""

    world_size = readers = 2

    def __init__(self, of_each: list[list[Any]]) -> None:
        self.of_each = of_each

    def gather_reports(self, own: list[Any]) -> list[list[Any]]:
        assert own in self.of_each
        return self.of_each


class Strategy:
    def __init__(self, windows: list[list[Any]]) -> None:
        self.processes = Two([[batch.samples for batch in window] for window in windows])


def means(sizes: list[int], window: int, beside: bool = False) -> list[float]:
    """Return the mean of the numbers of each window, as both processes weight their micro-batches' means."""
    loader = DataLoader(Ready(sizes, beside), batch_size=None)
    loaders = [make_batch_loader(loader, rank=rank, world_size=2, seed=1, training=True) for rank in range(2)]
    batches = [list(one.iterate(0)) for one in loaders]
    found = []
    for first in range(0, len(batches[0]), window):
        windows = [one[first : first + window] for one in batches]
        strategy: Any = Strategy(windows)
        value = 0.0
        for one in windows:
            if not loaders[0].counts_everywhere:
                one = even_window(one, strategy)
            divisors = loss_divisors(one, Toy(), strategy, False)
            for batch, divisor in zip(one, divisors, strict=True):
                numbers = batch.data[0] if beside else batch.data
                value += float(numbers.mean()) / (1 if divisor is None else float(divisor)) / 2
        found.append(value)
    return found


@pytest.mark.parametrize(
    ("sizes", "window", "expected"),
    [
        ([4, 4, 4, 2], 1, [4.5, 11.5]),
        ([4, 4, 4], 1, [4.5, 10.5]),  # the last one has padding on one process
        ([4, 4, 4, 4, 2], 3, [9.5]),
    ],
)
def test_ready_batches_count_by_their_samples(sizes: list[int], window: int, expected: list[float]) -> None:
    assert means(sizes, window) == pytest.approx(expected)


@pytest.mark.parametrize(("window", "expected"), [(1, [5.25, 12.0]), (2, [7.5])])
def test_ready_batches_of_unknown_size_count_alike_and_padding_does_not(window: int, expected: list[float]) -> None:
    # Means of 2.5, 8 and 12. The size of the second is unknown: beside its 7 numbers there is a tensor of 4.
    assert means([4, 7, 1], window, beside=True) == pytest.approx(expected)
