"""Random orders of any length that are never built: each position's value is computed directly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trainer.seed import mix_seed

_ROUNDS = 8
_CHUNK = 4096
_HALF = np.uint64(32)


class Permutation:
    """A pseudo-random permutation of `range(n)`, a function of `(seed, epoch)` alone, with O(1) memory.

    The value at any position is computed directly, so starting at position 10_000_000 of 1_000_000_000 costs nothing.
    It is a generalised Feistel network on Z_a x Z_b with a*b just above n, and cycle walking for the few values that
    fall outside (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). On tiny domains such
    networks prefer even permutations, so up to `table_size` it sorts random keys instead: all n! are equally likely.
    Only integer arithmetic: the same order on every machine and with every version of torch and numpy.

    Args:
        n: its length; 0 < n < 2**62.
        seed: any integer.
        epoch: any integer; each gives an unrelated order.
    """

    table_size: ClassVar[int] = 4096

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        assert 0 < n < 2**62
        self.n = n
        self._table = _sorted_keys(n, mix_seed(seed, epoch)) if n <= self.table_size else None
        left = math.isqrt(n - 1) + 1
        self._left = np.uint64(left)
        self._right = np.uint64(-(-n // left))
        self._keys = [np.uint64(mix_seed(seed, epoch, number)) for number in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the values at `positions` (any shape of one dimension, each in `range(n)`)."""
        if self._table is not None:
            return self._table[positions]
        values = self._permute(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.n)
        while outside.size:
            walked = self._permute(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.n]
        return values

    def indices(self, start: int = 0) -> Iterator[int]:
        """Yield the values from position `start` to the end."""
        for position in range(start, self.n, _CHUNK):
            yield from self.at(np.arange(position, min(position + _CHUNK, self.n))).tolist()

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply the network on range(a*b): each round adds a keyed hash of one half to the other, modulo its size."""
        left, right = np.divmod(values, self._right)
        hashed = np.empty_like(values)
        for number, key in enumerate(self._keys):
            source, target, size = (right, left, self._left) if number % 2 == 0 else (left, right, self._right)
            np.add(source, key, out=hashed)
            hashed *= np.uint64(0xFF51AFD7ED558CCD)
            hashed ^= hashed >> _HALF
            hashed *= np.uint64(0xC4CEB9FE1A85EC53)
            hashed >>= _HALF
            # 32 random bits, scaled to range(size) by a multiplication instead of a division (Lemire 2019).
            hashed *= size
            hashed >>= _HALF
            target += hashed
            # target modulo size: below size the subtraction wraps around to something huge.
            np.subtract(target, size, out=hashed)
            np.minimum(target, hashed, out=target)
        left *= self._right
        left += right
        return left


def uniform(positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return 64 random bits for each position: outputs of a SplitMix64 generator started at `mix_seed(seed, epoch)`."""
    return _splitmix(positions.astype(np.uint64), mix_seed(seed, epoch))


def uniform_floats(positions: NDArray[np.int64], seed: int, epoch: int) -> NDArray[np.float64]:
    """Return a random number in [0, 1) for each position."""
    return (uniform(positions, seed, epoch) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix(numbers: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return the outputs of SplitMix64 with these numbers; different numbers give different outputs."""
    keys = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = keys ^ (keys >> np.uint64(31))
    return mixed


def _sorted_keys(n: int, seed: int) -> NDArray[np.uint64]:
    """Return a uniformly random permutation: the order of n outputs of SplitMix64, which are all different."""
    return np.argsort(_splitmix(np.arange(n, dtype=np.uint64), seed), kind="stable").astype(np.uint64)
