from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from tests.messages import raises_recorded
from trainer.data.samplers import random_access, sizes_of
from trainer.errors import ConfigError

BILLION = range(1_000_000_000)


def draw(sampler: Any, seed: int = 1, epoch: int = 0, start: int = 0, stop: int | None = None) -> list[Any]:
    plan = random_access(sampler, sizes_of(sampler))
    assert plan is not None
    assert plan.length == len(sampler)
    stop = plan.length if stop is None else stop
    return plan.order(seed, epoch, plan.shuffled)(np.arange(start, stop))


SAMPLERS = {
    "plain": RandomSampler(range(5000)),
    "fewer": RandomSampler(range(5000), num_samples=37),
    "more": RandomSampler(range(50), num_samples=130),
    "replacement": RandomSampler(range(5000), replacement=True, num_samples=3000),
    "subset": SubsetRandomSampler(list(range(0, 600, 3))),
    "weighted": WeightedRandomSampler([0.0, 1.0, 2.0, 0.0, 5.0, 0.0], 400),
    "weighted once": WeightedRandomSampler([0.0, 1.0, 2.0, 0.0, 5.0, 4.0], 3, replacement=False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_range_is_a_range_of_the_full_order(name: str) -> None:
    sampler = SAMPLERS[name]
    full = draw(sampler)
    assert full == draw(sampler)
    for start, stop in [(0, 1), (1, len(full)), (len(full) // 3, len(full) // 2)]:
        assert draw(sampler, start=start, stop=stop) == full[start:stop]
    others = [draw(sampler, seed, epoch) for seed, epoch in [(1, 1), (2, 0), (1, 2), (7, 9)]]
    assert any(other != full for other in others)


def test_without_replacement_every_index_comes_once_a_round() -> None:
    full = draw(SAMPLERS["more"])
    num_global_batches = [full[:50], full[50:100]]
    assert [sorted(one) for one in num_global_batches] == [list(range(50))] * 2
    assert num_global_batches[0] != num_global_batches[1]
    assert len(set(full[100:])) == 30
    assert full[:50] == draw(RandomSampler(range(50)))
    assert sorted(draw(SAMPLERS["subset"])) == list(range(0, 600, 3))
    assert sorted(draw(SubsetRandomSampler(torch.tensor([4, 8, 15])))) == [4, 8, 15]


def test_with_replacement_all_are_equally_likely() -> None:
    counts = np.bincount(draw(RandomSampler(range(10), replacement=True, num_samples=100_000)), minlength=10)
    # Ten times the standard deviation, which is 95.
    assert abs(counts - 10_000).max() < 950


def test_weights_are_kept() -> None:
    weights = np.array([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
    counts = np.bincount(draw(WeightedRandomSampler(weights.tolist(), 80_000)), minlength=6)
    assert abs(counts - 10_000 * weights).max() < 1500
    assert (counts[weights == 0] == 0).all()


def test_weights_without_replacement() -> None:
    firsts = Counter()
    for epoch in range(4000):
        three = draw(SAMPLERS["weighted once"], epoch=epoch)
        assert len(set(three)) == 3
        assert not {0, 3} & set(three)
        firsts[three[0]] += 1
    for index, weight in {1: 1.0, 2: 2.0, 4: 5.0, 5: 4.0}.items():
        assert firsts[index] == pytest.approx(4000 * weight / 12, rel=0.25)


def test_weights_that_change_between_epochs_count() -> None:
    sampler = WeightedRandomSampler([1.0, 1.0, 1.0], 20)
    plan = random_access(sampler, sizes_of(sampler))
    assert plan is not None
    plan.order(1, 0, True)
    sampler.weights = torch.tensor([0.0, 0.0, 1.0], dtype=torch.double)
    assert plan.order(1, 1, True)(np.arange(20)) == [2] * 20


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_mean_nothing(weights: list[float]) -> None:
    with raises_recorded(ConfigError):
        draw(WeightedRandomSampler(weights, 4))


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(BILLION),
        RandomSampler(BILLION, replacement=True),
        RandomSampler(range(1000), replacement=True, num_samples=len(BILLION)),
        RandomSampler(BILLION, num_samples=len(BILLION) // 2),
        SubsetRandomSampler(BILLION),
        WeightedRandomSampler([1.0, 2.0, 3.0], len(BILLION)),
    ],
    ids=["shuffle", "replacement", "few with replacement", "half", "subset", "weighted"],
)
def test_a_billion_take_no_memory(sampler: Any) -> None:
    tracemalloc.start()
    indices = draw(sampler, start=10_000_000, stop=10_004_096)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(indices) == 4096
    # A list of a billion numbers would take 8 GB.
    assert most < 3e6


def test_others_are_not_planned() -> None:
    class Mine(RandomSampler):
        pass

    for sampler in (Mine(range(3)), [1, 2], BatchSampler(SequentialSampler(range(3)), 2, False)):
        assert random_access(sampler, sizes_of(sampler)) is None
