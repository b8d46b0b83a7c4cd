"""RandomAccessSampler: the order of torch's own samplers, computed at any position instead of iterated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainer.data.permutation import Permutation, uniform, uniform_floats
from trainer.errors import ConfigError
from trainer.seed import mix_seed

Order = Callable[[NDArray[np.int64]], list[Any]]
"""A function from positions in an epoch to the indices of the samples there."""


class RandomAccessSampler:
    """The indices that a sampler of torch yields, as a function of (seed, epoch, position).

    torch makes a list or a tensor as long as an epoch for most of them. Here nothing is, except the cumulated weights
    of a WeightedRandomSampler (8 bytes each), which are sorted to draw without replacement.

    Args:
        length: samples of an epoch.
        shuffled: the order is random.
        sequential: without shuffling it goes through the dataset from the first to the last.
        size: indices to choose from.
        draw: makes the shuffled order of (seed, epoch).
    """

    def __init__(
        self, length: int, shuffled: bool, sequential: bool, size: int, draw: Callable[[int, int], Order] | None = None
    ) -> None:
        self.length = length
        self.shuffled = shuffled
        self.sequential = sequential
        self.size = size
        self._draw = draw

    def order(self, seed: int, epoch: int, shuffled: bool) -> Order:
        """Return the order of one epoch.

        Raises:
            ConfigError: the weights of a WeightedRandomSampler are negative, not finite, or all 0.
        """
        if not self.length:
            return lambda positions: []
        if not shuffled and self.sequential:
            return lambda positions: _listed(positions % self.size)
        return (self._draw or _permuted(self.size))(seed, epoch)


def sizes_of(sampler: Any) -> tuple[int, int] | None:
    """Return the samples of an epoch and the indices to choose from; None for a sampler that is not torch's own."""
    kind = type(sampler)
    if kind is SequentialSampler or kind is RandomSampler:
        size = len(sampler.data_source)
        return (size if kind is SequentialSampler else sampler.num_samples), size
    if kind is DistributedSampler:
        return len(sampler.dataset), len(sampler.dataset)
    if kind is SubsetRandomSampler:
        return len(sampler.indices), len(sampler.indices)
    return (sampler.num_samples, len(sampler.weights)) if kind is WeightedRandomSampler else None


def random_access(sampler: Any, sizes: tuple[int, int] | None) -> RandomAccessSampler | None:
    """Return random access to a sampler of torch's own; None for any other (a subclass, too), to be iterated.

    Args:
        sizes: as `sizes_of` returned them when the epoch began.
    """
    if sizes is None:
        return None
    kind, (length, size) = type(sampler), sizes
    if kind is SequentialSampler or kind is DistributedSampler:
        return RandomAccessSampler(length, kind is DistributedSampler and sampler.shuffle, True, size)
    if kind is RandomSampler and not sampler.replacement:
        return RandomAccessSampler(length, True, True, size)
    draws = {RandomSampler: _with_replacement(size), SubsetRandomSampler: _subset(sampler, size)}
    return RandomAccessSampler(length, True, False, size, draws.get(kind) or _weighted(sampler, length, size))


def _permuted(size: int) -> Callable[[int, int], Order]:
    """Draw every index once, in random order; then, if more are needed, again in another order."""

    def draw(seed: int, epoch: int) -> Order:
        first = Permutation(size, seed, epoch)

        def at(positions: NDArray[np.int64]) -> list[Any]:
            repeats = positions // size
            if not repeats.any():
                return _listed(first.at(positions))
            indices = np.empty_like(positions, dtype=np.uint64)
            for number in np.unique(repeats).tolist():
                there = repeats == number
                permutation = first if number == 0 else Permutation(size, seed, mix_seed(epoch, number))
                indices[there] = permutation.at(positions[there] % size)
            return _listed(indices)

        return at

    return draw


def _with_replacement(size: int) -> Callable[[int, int], Order]:
    def draw(seed: int, epoch: int) -> Order:
        return lambda positions: _listed(uniform(positions, seed, epoch) % np.uint64(size))

    return draw


def _subset(sampler: Any, size: int) -> Callable[[int, int], Order]:
    def draw(seed: int, epoch: int) -> Order:
        permutation, indices = Permutation(size, seed, epoch), sampler.indices
        return lambda positions: [indices[position] for position in permutation.at(positions).tolist()]

    return draw


def _weighted(sampler: WeightedRandomSampler, length: int, size: int) -> Callable[[int, int], Order]:
    """Draw by the weights, which are read in every epoch: they may have changed."""

    def draw(seed: int, epoch: int) -> Order:
        weights = np.asarray(sampler.weights, dtype=np.float64)[:size]
        if not np.isfinite(weights).all() or (weights < 0).any() or not (weights > 0).any():
            raise ConfigError(
                "the weights of the WeightedRandomSampler must be finite, not negative, and not all 0: "
                f"they go from {weights.min()} to {weights.max()}."
            )
        if not sampler.replacement:
            return _weighted_without_replacement(weights, length, seed, epoch)
        sums = np.cumsum(weights)
        last = np.flatnonzero(weights)[-1]

        def at(positions: NDArray[np.int64]) -> list[Any]:
            points = uniform_floats(positions, seed, epoch) * sums[-1]
            return _listed(np.minimum(np.searchsorted(sums, points, side="right"), last))

        return at

    return draw


def _weighted_without_replacement(weights: NDArray[np.float64], length: int, seed: int, epoch: int) -> Order:
    """Draw the indices with the least exponential times, at a rate of their weight (Efraimidis and Spirakis,
    "Weighted random sampling with a reservoir", IPL 2006; torch.multinomial does the same)."""
    possible = np.flatnonzero(weights)
    times = -np.log1p(-uniform_floats(possible, seed, epoch)) / weights[possible]
    indices = possible[np.argsort(times, kind="stable")[:length]]
    return lambda positions: _listed(indices[positions])


def _listed(indices: NDArray[Any]) -> list[Any]:
    numbers: list[Any] = indices.tolist()
    return numbers
