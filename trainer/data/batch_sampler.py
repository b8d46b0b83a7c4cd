"""DistributedBatchSampler: which samples a process loads, in which order, from any position on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from trainer.data.rng import PrivateRandomness, SeededIndices, mix
from trainer.data.samplers import random_access

_CHUNK = 4096

Counts = deque[tuple[int, int | None]]
Placed = Iterator[tuple[Any, int]]
"""Batches of indices, each with the position of its first sample in the epoch (a batch sampler's: the batch's number
in it)."""


class DistributedBatchSampler:
    """The batches of indices of one process, for a re-made torch DataLoader (its `batch_sampler`, or its `sampler` when
    it has no automatic batching: `batching` tells).

    The order of samples is a function of (seed, epoch) alone. With B samples per micro-batch and W processes, global
    micro-batch k is the order's positions [k*B*W, (k+1)*B*W), and rank r takes its r-th contiguous part; so W=2, B=4
    and W=1, B=8 form the same global batches. The last, shorter one of m samples is split evenly: rank r gets positions
    [r*m//W, (r+1)*m//W) of it. A rank whose part is empty gets in training a filler (the first sample, reported with 0
    samples), so that all ranks take the same number of steps; in evaluation it has one batch less.

    `drop_last` drops the short one in training. In evaluation it drops what does not fill a micro-batch of B, so that
    the same samples count on any number of processes; the remaining whole micro-batches go to the first ranks.

    A user's own batch sampler keeps its batches whole: in round k rank r takes batch k*W+r. The order of torch's own
    samplers is computed at any position. Another sampler is iterated itself, on every rank alike, with random numbers
    of (seed, epoch) only; one that says that it shards (`num_replicas` > 1 and `rank`, like a subclass of
    DistributedSampler) is left to it.

    Args:
        loader: a DataLoader over a map-style dataset, read through its public attributes.
        training: how `drop_last` and fillers are meant.
        fill: fillers in evaluation too.
        shuffle: None: as the loader does. False: the same order in every epoch, sequential for plain loaders.
            True: shuffle where the loader is sequential.
        seeded: yield `SeededIndices`. "batch": with one seed of (seed, epoch, global micro-batch, rank). "sample": with
            one for each sample, of (seed, epoch, position in the global order).
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        world_size: int,
        seed: int,
        training: bool,
        shuffle: bool | None = None,
        seeded: Literal["batch", "sample"] | None = None,
        fill: bool = False,
    ) -> None:
        self.batch_size, self.drop_last, self.source, self.whole = _public(loader)
        self.batching = loader.batch_sampler is not None
        self.shards_itself = _shards_itself(self.source) and world_size > 1
        self.rank, self.world_size = (0, 1) if self.shards_itself else (rank, world_size)
        self.seed = seed
        self.training = training
        self.fills = training or fill
        self.random_access = None if self.whole else random_access(self.source)
        self.shuffled = (self.random_access is None or self.random_access.shuffled) if shuffle is None else shuffle
        self.reshuffles = shuffle is not False
        self.samples: int | None = None if self.whole else _length(self.source)
        """Samples (of all processes) before `drop_last`; None if unknown."""
        self.num_global_batches: int | None = self._count_rounds()
        """Global micro-batches per epoch; None if unknown."""
        self.limit: int | None = None
        """Stop after this many global micro-batches."""
        self.counts: Counts = deque()
        """For every batch handed out and not yet taken from here: own samples, samples over all processes."""
        self._seeded, self._seed_rank = seeded, rank
        self._epoch = 0
        self._start = 0

    def seek(self, epoch: int, start: int) -> None:
        """The next `iter()` begins at micro-batch `start` of `epoch`."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[Any]:
        # DataLoader calls iter() twice with fresh workers: every call gets counts of its own, the last one's are used.
        self.counts = deque()
        epoch, start = (self._epoch if self.reshuffles else 0), self._start
        if self.whole:
            placed = self._whole_batches(epoch, start, self.counts)
        elif self.random_access is not None:
            placed = self._planned_batches(epoch, start, self.counts)
        else:
            placed = self._drawn_batches(epoch, start, self.counts)
        if self.limit is not None:
            placed = islice(placed, max(0, self.limit - start))
        if not self.batching:
            placed = ((batch[0], place) for batch, place in placed)
        if self._seeded is None:
            return (batch for batch, _ in placed)
        if self._seeded == "batch":
            base = mix(self.seed, self._epoch, self._seed_rank)
            return (SeededIndices(batch, mix(base, k)) for k, (batch, _) in enumerate(placed, start))
        base = mix(self.seed, self._epoch)
        if self.whole:
            return (SeededIndices(batch, mix(base, number), 0) for batch, number in placed)
        return (SeededIndices(batch, base, place) for batch, place in placed)

    def num_local_batches(self) -> int | None:
        """Batches per epoch on this rank, in evaluation without fillers; None if unknown."""
        if self.num_global_batches is None or self.num_global_batches == 0 or self.training:
            return self.num_global_batches
        if self.whole:
            length = _length(self.source)
            assert length is not None
            return length // self.world_size + (self.rank < length % self.world_size)
        assert self.samples is not None
        short = self.samples % (self.batch_size * self.world_size)
        low, high, total = self._share(short)
        return self.num_global_batches - (total > 0 and low == high)

    def samples_in(self, num_global_batches: int) -> int | None:
        """Samples of the first `num_global_batches` global micro-batches over all processes; None if unknown."""
        if self.samples is None or self.shards_itself:
            return None
        size = self.batch_size * self.world_size
        full = self.samples // size
        return min(num_global_batches, full) * size + (
            self._share(self.samples % size)[2] if num_global_batches > full else 0
        )

    def _count_rounds(self) -> int | None:
        if self.whole:
            length = _length(self.source)
            return None if length is None else -(-length // self.world_size)
        if self.samples is None:
            return None
        full, short = divmod(self.samples, self.batch_size * self.world_size)
        return full + (self._share(short)[2] > 0)

    def _share(self, short: int) -> tuple[int, int, int]:
        """This rank's part [low, high) of a last global micro-batch of `short` samples, and how many of them count."""
        rank, world, size = self.rank, self.world_size, self.batch_size
        if not self.drop_last:
            return rank * short // world, (rank + 1) * short // world, short
        batches = 0 if self.training else short // size
        low = min(rank, batches) * size
        return low, low + (size if rank < batches else 0), batches * size

    def _total(self, total: int) -> int | None:
        return None if self.shards_itself else total

    def _planned_batches(self, epoch: int, start: int, counts: Counts) -> Placed:
        """From an order that can be computed at any position."""
        assert self.random_access is not None
        assert self.samples is not None
        order = self.random_access.order(self.seed, epoch, self.shuffled)
        size, globally = self.batch_size, self.batch_size * self.world_size
        full, short = divmod(self.samples, globally)
        mine = np.arange(size) + self.rank * size
        count = (size, self._total(globally))
        many = max(1, _CHUNK // size)
        for first in range(start, full, many):
            num_global_batches = np.arange(first, min(first + many, full))
            indices = order((num_global_batches[:, None] * globally + mine).ravel())
            place = first * globally + self.rank * size
            for position in range(0, len(indices), size):
                counts.append(count)
                yield indices[position : position + size], place
                place += globally
        if start <= full and short:
            last = order(np.arange(self.samples - short, self.samples))
            yield from self._short_batch(last, self.samples - short, counts)

    def _drawn_batches(self, epoch: int, start: int, counts: Counts) -> Placed:
        """From a sampler that has to be iterated from the beginning: indices are skipped, never samples."""
        size, globally = self.batch_size, self.batch_size * self.world_size
        low, high = self.rank * size, (self.rank + 1) * size
        count = (size, self._total(globally))
        place = start * globally
        for indices in self._draw(epoch, place, globally):
            for position in range(0, len(indices), globally):
                part = indices[position : position + globally]
                if len(part) < globally:
                    yield from self._short_batch(part, place, counts)
                else:
                    counts.append(count)
                    yield part[low:high], place + low
                place += globally

    def _short_batch(self, samples: list[Any], place: int, counts: Counts) -> Placed:
        low, high, total = self._share(len(samples))
        if low < high:
            counts.append((high - low, self._total(total)))
            yield samples[low:high], place + low
        elif total and self.fills:
            counts.append((0, self._total(total)))
            yield samples[:1], place

    def _whole_batches(self, epoch: int, start: int, counts: Counts) -> Placed:
        """The batches of a user's own batch sampler."""
        world = self.world_size
        number = start * world
        for batches in self._draw(epoch, number, world):
            for position in range(0, len(batches), world):
                part = [b if hasattr(b, "__len__") else list(b) for b in batches[position : position + world]]
                total = self._total(sum(map(len, part)))
                if self.rank < len(part):
                    counts.append((len(part[self.rank]), total))
                    yield part[self.rank], number + self.rank
                elif self.fills:
                    counts.append((0, total))
                    yield part[0], number
                number += world

    def _draw(self, epoch: int, skip: int, unit: int) -> Iterator[list[Any]]:
        """What the sampler yields from item `skip` on, in lists of a multiple of `unit` items (the last may be short).

        In chunks, so that the global generators are exchanged rarely and an endless sampler works too.
        """
        private = PrivateRandomness(mix(self.seed, epoch), _generators(self.source))
        chunk = unit * max(1, (_CHUNK if not self.whole else _CHUNK // 16) // unit)
        with private:
            _set_epoch(self.source, epoch)
            items = iter(self.source)
            for _ in islice(items, skip):
                pass
        while True:
            with private:
                drawn = list(islice(items, chunk))
            if not drawn:
                return
            yield drawn


def _public(loader: DataLoader[Any]) -> tuple[int, bool, Any, bool]:
    """Micro-batch size, drop_last, the sampler, and whether that is a batch sampler of the user's own."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return 1, False, loader.sampler, False
    if type(batches) is BatchSampler:
        return batches.batch_size, batches.drop_last, batches.sampler, False
    return 1, False, batches, True


def _length(sampler: Any) -> int | None:
    if type(sampler) is DistributedSampler:
        dataset: Any = sampler.dataset
        return len(dataset)
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _shards_itself(sampler: Any) -> bool:
    """Samplers that follow DistributedSampler's convention. Torch's own is not one: `shuffle` tells its order."""
    if type(sampler) is DistributedSampler:
        return False
    return any(hasattr(one, "rank") and getattr(one, "num_replicas", 1) > 1 for one in _nested(sampler))


def _nested(sampler: Any) -> list[Any]:
    """The sampler, and the one inside it when it is a batch sampler around another."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def _generators(sampler: Any) -> list[torch.Generator]:
    found = [getattr(one, "generator", None) for one in _nested(sampler)]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _set_epoch(sampler: Iterable[Any], epoch: int) -> None:
    for one in _nested(sampler):
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)
