from __future__ import annotations

import numpy as np
import pytest

from trainer.data.permutation import Permutation
from trainer.seed import mix_seed

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 65535, 65537]


class Network(Permutation):
    """A permutation that does not use the table for small n."""

    table_size = 0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", [Permutation, Network])
def test_is_a_bijection(kind: type[Permutation], n: int) -> None:
    for seed, epoch in [(0, 0), (1, 5), (-3, 2**70)]:
        assert sorted(kind(n, seed, epoch).indices()) == list(range(n))


@pytest.mark.parametrize("n", [3, 1000, 5000, 10_000])
def test_any_start_gives_the_tail(n: int) -> None:
    order = Permutation(n, seed=7, epoch=3)
    full = list(order.indices())
    assert type(full[0]) is int
    assert len(order) == n
    for start in {0, 1, n // 2, n - 1, n, n + 5}:
        assert list(order.indices(start)) == full[start:]
    picked = np.array([n - 1, 0, n // 3])
    assert order.at(picked).tolist() == [full[n - 1], full[0], full[n // 3]]


def test_depends_on_seed_and_epoch_only() -> None:
    orders = {tuple(Permutation(50, seed, epoch).indices()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    assert list(Permutation(50, 1, 2).indices()) == list(Permutation(50, 1, 2).indices())


def test_is_the_same_on_every_machine() -> None:
    """These values must never change, since a resumed run may use another version of torch or numpy."""
    assert list(Permutation(10, 42, 0).indices()) == FIXED_10
    assert Permutation(10**9, 42, 0).at(np.arange(4)).tolist() == FIXED_BILLION
    assert mix_seed(42, 0) == FIXED_MIX


def test_billions_cost_nothing() -> None:
    order = Permutation(1_000_000_000, 0, 0)
    tail = order.indices(999_999_990)
    values = list(tail)
    assert len(set(values)) == 10
    assert all(0 <= value < 1_000_000_000 for value in values)
    assert all(0 <= value < 2**61 for value in Permutation(2**61, 0, 0).at(np.arange(100)).tolist())


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Return chi-square as its distance from the mean in standard deviations, approximately."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("n", [2, 3, 6, 10])
def test_every_value_at_every_position_equally_often(n: int) -> None:
    seeds = 3000
    orders = np.array([Permutation(n, seed, 0).at(np.arange(n)) for seed in range(seeds)]).astype(int)
    for position in range(n):
        assert chi_square(np.bincount(orders[:, position], minlength=n), seeds / n) < 5


@pytest.mark.parametrize("n", [4, 5, 6])
def test_all_orders_of_a_few_are_equally_likely(n: int) -> None:
    seeds = 6000
    orders = np.array([Permutation(n, seed, 1).at(np.arange(n)) for seed in range(seeds)]).astype(int)
    _, counts = np.unique(orders @ 10 ** np.arange(n), return_counts=True)
    assert counts.size == np.prod(np.arange(1, n + 1))
    assert chi_square(counts, seeds / counts.size) < 5


@pytest.mark.parametrize("n", [100, 1000, 10_000])
@pytest.mark.parametrize("kind", [Permutation, Network])
def test_neighbours_are_unrelated(kind: type[Permutation], n: int) -> None:
    """Over many seeds, the joint distribution of two neighbours is uniform in tenths of the range."""
    seeds, cells = 4000, 10
    positions = np.array([0, 1, n // 2])
    orders = np.array([kind(n, seed, 0).at(positions) for seed in range(seeds)]).astype(int) * cells // n
    tenth = n // cells
    chance = np.full((cells, cells), tenth * tenth / (n * (n - 1)))
    np.fill_diagonal(chance, tenth * (tenth - 1) / (n * (n - 1)))
    for other in (1, 2):
        counts = np.bincount(orders[:, 0] * cells + orders[:, other], minlength=cells * cells)
        assert chi_square(counts, seeds * chance.ravel()) < 5


def test_no_structure_within_one_order() -> None:
    n = 100_000
    order = Permutation(n, 3, 0).at(np.arange(n)).astype(float)
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.02
    # The number of ascents of a random permutation has mean (n-1)/2 and variance (n+1)/12.
    ascents = int((np.diff(order) > 0).sum())
    assert abs(ascents - (n - 1) / 2) < 5 * np.sqrt((n + 1) / 12)
    # A fixed point is as likely as in a random order: about one.
    assert (order == np.arange(n)).sum() < 8


FIXED_10 = [7, 3, 6, 8, 1, 5, 4, 0, 9, 2]
FIXED_BILLION = [189116021, 824399593, 901950958, 547112409]
FIXED_MIX = 6332618229526065668
