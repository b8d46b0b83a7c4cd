"""DistributedBatchSampler: choose the samples of a process and their order, from any position on."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainer.arguments import with_python_numbers
from trainer.checkpoint.schema import Integer, require
from trainer.data.fingerprints import functions_of, globals_fingerprints, length_of, sampler_fingerprints
from trainer.data.loader import Reading, has_state, round_of
from trainer.data.sampler_state import (
    changed_attributes,
    own_generators,
    plain_attributes,
    seed_with,
    set_attributes,
    set_epoch,
)
from trainer.data.samplers import random_access, sizes_of
from trainer.data.seeded_dataset import SeededIndices
from trainer.errors import ConfigError
from trainer.seed import isolated_rng, mix_seed, rng_state, set_rng_state

_CHUNK = 4096

Batches = Iterator[tuple[list[Any], int, int, int | None]]
"""The indices of each batch; the position of its first sample in the epoch (of a user's batch sampler: the number of
the batch); the samples of the epoch that it holds here (0: padding), and over all processes (None: unknown)."""


class _KeptSampler:
    """A sampler whose changed plain attributes, and the state that it saves itself, are in checkpoints."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.first = sampler, plain_attributes(sampler)
        self.start: dict[str, Any] = {}
        """The attributes that had changed at the start of the epoch."""
        self.own_start: Any = None
        """The result of the sampler's own `state_dict` then; None without one."""

    def changed(self) -> dict[str, Any]:
        """Return the attributes that have changed since the run began."""
        return changed_attributes(self.first, self.sampler)

    def own(self) -> Any:
        """Return the result of the sampler's own `state_dict`; None without one."""
        return copy.deepcopy(self.sampler.state_dict()) if has_state(self.sampler) else None

    def mark_start(self) -> None:
        """Note the state at the start of an epoch."""
        self.start, self.own_start = self.changed(), self.own()

    def restore(self, changed: Mapping[str, Any], own: Any, in_place: bool = False) -> None:
        """Restore the results of `changed` and `own`, and the first values of all other attributes."""
        set_attributes(self.sampler, {**self.first, **changed}, in_place)
        if own is not None and has_state(self.sampler):
            self.sampler.load_state_dict(own)


class DistributedBatchSampler:
    """The batches of indices of one process, as `SeededIndices`: the `batch_sampler` of a `ShardedDataLoader`, or its
    `sampler` without automatic batching.

    The order of samples is a function of (seed, epoch) alone. With B samples per micro-batch and W processes, global
    micro-batch k is the order's positions [k*B*W, (k+1)*B*W), and rank r takes its r-th contiguous part; so W=2, B=4
    and W=1, B=8 form the same global batches. The last, shorter one of m samples is split evenly: rank r gets positions
    [r*m//W, (r+1)*m//W) of it. A rank whose part is empty gets a padding batch in training (the first sample, counted
    as 0 samples), so that all ranks take the same number of steps; in evaluation it has one batch less.

    `drop_last` drops the short one in training. In evaluation it drops what does not fill a micro-batch of B, so that
    the same samples count on any number of processes; the remaining full micro-batches go to the first ranks.

    The batches of a user's own batch sampler are not split: in round k rank r takes batch k*W+r. The order of torch's
    own samplers is computed at any position. Another sampler is iterated itself, on every rank alike, with random
    numbers of (seed, epoch) only; one that does its own sharding (`num_replicas` > 1 and `rank`, like a subclass of
    DistributedSampler) is used unchanged.

    With `seed_per_sample` each sample gets a seed of (seed, epoch, position in the global order). Otherwise each batch
    gets one, of (seed, epoch, global micro-batch, rank).

    Args:
        loader: a DataLoader over a map-style dataset, read through its public attributes.
    """

    def __init__(self, loader: DataLoader[Any], reading: Reading) -> None:
        self._loader, self.reading = loader, reading
        self._first_batch_size, _, self.sampler, self.has_batch_sampler = _public(loader)
        self.automatic_batching = loader.batch_sampler is not None
        self.shards_itself = (not reading.split or _shards_itself(self.sampler)) and reading.world_size > 1
        if self.shards_itself and reading.split:
            _check_shards(self.sampler, reading.rank, reading.world_size)
        self.rank, self.world_size = (0, 1) if self.shards_itself else (reading.rank, reading.world_size)
        self.seed = reading.seed
        self.pads = reading.training or reading.pad
        self._keeps_part = self.shards_itself and type(self.sampler) is DistributedSampler
        self.comes_in_order = type(self.sampler) is SequentialSampler and reading.shuffle is None
        self._sizes: dict[str, Any] = {}
        """The sizes at the beginning of the epoch in progress, from a checkpoint; {}: the current sizes."""
        self._epoch, self._start, self._again = 0, 0, 0
        self._limit: int | None = None
        self._restored: dict[str, Any] = {}
        """The state of a checkpoint, until the samplers have it."""
        self._told: int | None = None
        """The epoch that `set_epoch` has received for the next iteration."""
        self._take(self.sampler)
        self._now: list[dict[str, Any]] = []
        """The attributes to set in torch's samplers once the order of a resumed epoch is drawn."""
        self._latest: deque[tuple[int, int, Any]] | None = None
        """Epoch, number and indices of the latest batches, which workers may be loading; None: they are not kept."""

    def _take(self, sampler: Any) -> None:
        self.sampler = sampler
        self._read_sizes()
        self._kept = [_KeptSampler(one) for one in self._kept_samplers()]

    def measure(self, epoch: int | None = None, start: int = 0) -> None:
        """Read batch size, length and indices again; see `BatchLoader.measure`."""
        if start == 0:
            self._sizes = {}
        sampler = _public(self._loader)[2]
        if sampler is not self.sampler:  # loader.batch_sampler.sampler can be replaced
            self._take(sampler)
        if self.random_access is None or self._restored or start == 0:
            self._restore_attributes(within_epoch=start > 0)
            if epoch is not None and self.random_access is None:
                generators, self._told = own_generators(self.sampler), self.reading.order_of(epoch)
                with isolated_rng(generators=generators):
                    seed_with(mix_seed(self.seed, self._told), generators)
                    set_epoch(_nested(self.sampler), self._told)
        self._read_sizes()

    def forget_sizes(self) -> None:
        """Continue an epoch with the current sizes."""
        self._sizes = {}

    def _read_sizes(self) -> None:
        restored = self._sizes
        self.batch_size, self.drop_last, _, _ = _public(self._loader)
        if restored.get("first_batch_size") == self._first_batch_size:
            self.batch_size = restored.get("batch_size", self.batch_size)
        sizes = None if self._keeps_part else sizes_of(self.sampler)
        if sizes is not None and restored.keys() >= {"samples", "size"}:
            there, sizes = sizes[1], (restored["samples"], restored["size"])
            if sizes[1] > there:
                raise ConfigError(
                    f"the epoch in progress began with {sizes[1]} samples to choose from, and this run has {there}. "
                    "Restore them in the data module's load_state_dict, or resume from the end of an epoch."
                )
        self.random_access = random_access(self.sampler, sizes)
        own_order = self.random_access is None or self.random_access.shuffled
        self.shuffled = own_order if self.reading.shuffle is None else self.reading.shuffle
        self.samples: int | None = None if self.has_batch_sampler else _length(self.sampler)
        """Samples (of all processes) before `drop_last`; None if unknown."""
        if self.random_access is not None:
            self.samples = self.random_access.length
        self.num_global_batches: int | None = self._count_global_batches()
        """Global micro-batches per epoch; None if unknown."""

    def seek(self, epoch: int, start: int, limit: int | None = None, again: int = 0) -> None:
        """Have the next `iter()` go from micro-batch `start` of `epoch` to micro-batch `limit` (None: to the end)."""
        self._epoch, self._start, self._limit, self._again = epoch, start, limit, again

    def __iter__(self) -> Iterator[SeededIndices]:
        epoch, start = self.reading.order_of(self._epoch), self._start
        if self.has_batch_sampler:
            batches = self._users_batches(epoch, start)
        elif self.random_access is not None:
            if self._restored:
                self._restore_attributes(within_epoch=start > 0)
            batches = self._random_access_batches(round_of(epoch, self._again), start)
        else:
            batches = self._iterated_batches(epoch, start)
        if self._limit is not None:
            if self._limit <= start > 0:
                next(batches, None)  # the epoch has begun before the break, though nothing of it is left
            batches = islice(batches, max(0, self._limit - start))
        return self._seeded(batches, round_of(self._epoch, self._again), start)

    def _seeded(self, batches: Batches, epoch: int, start: int) -> Iterator[SeededIndices]:
        per_sample = self.reading.seed_per_sample
        base = mix_seed(self.seed, epoch) if per_sample else mix_seed(self.seed, epoch, self.reading.rank)
        for number, (indices, position, samples, total) in enumerate(batches, start):
            request: Any = indices if self.automatic_batching else indices[0]
            if self._latest is not None:
                self._latest.append((epoch, number, request))
            if not per_sample:
                yield SeededIndices(request, mix_seed(base, number), None, samples, total)
            elif self.has_batch_sampler:
                yield SeededIndices(request, mix_seed(base, position), 0, samples, total)
            else:
                yield SeededIndices(request, base, position, samples, total)

    def keep_indices(self) -> None:
        """Remember from now on the indices of the latest batches."""
        ahead = self._loader.num_workers * (self._loader.prefetch_factor or 0)
        self._latest = deque(maxlen=ahead + _CHUNK // 16)

    def indices(self, epoch: int, number: int) -> list[Any] | None:
        """Return the indices of micro-batch `number`; None if they are not kept any more."""
        for one_epoch, one_number, request in reversed(self._latest or ()):
            if (one_epoch, one_number) == (epoch, number):
                many = request if self.automatic_batching else [request]
                return [*map(with_python_numbers, many)]
        return None

    def describe(self, dataset_length: int | None) -> str:
        """Return a description of the sampler and its length, without anything that depends on the world size."""
        kind, size = type(self.sampler).__name__, _length(self.sampler)
        if self.random_access is not None and self.random_access.sequential and size == dataset_length:
            return "each sample once"  # whether in order or shuffled
        if self.shards_itself:
            return f"{kind}, with its own part on each process"
        unit = "batches" if self.has_batch_sampler else "samples"
        return kind if size is None else f"{kind}, {size} {unit}"

    def numbers(self) -> dict[str, str]:
        """Return the numbers that decide the order, by the names of the samplers' attributes.

        Without numbers that a checkpoint restores. Empty for a sampler that does its own sharding, or is replaced.
        """
        if self.shards_itself or type(self.sampler) is DistributedSampler:
            return {}
        samplers = _nested(self.sampler)
        changed = self._restored.get("start", [])
        return {
            name if len(samplers) == 1 else f"{type(sampler).__name__}.{name}": value
            for sampler, restored in zip(samplers, chain(changed, repeat({})), strict=False)
            for name, value in sampler_fingerprints(sampler).items()
            if name not in restored
        }

    def globals(self) -> dict[str, str]:
        """Return the plain globals that the methods of the user's samplers read."""
        if self.random_access is not None:
            return {}
        return globals_fingerprints(chain.from_iterable(map(functions_of, _nested(self.sampler))))

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes at the beginning of the epoch, the attributes that the user's samplers have changed
        since the run began, and their own states.

        "start", "own_start": the values at the start of the epoch; "now", "own_now": the current ones.
        """
        if self._restored:
            return self._restored
        state: dict[str, Any] = {"batch_size": self.batch_size, "first_batch_size": self._first_batch_size}
        if self.random_access is not None:
            state |= {"samples": self.random_access.length, "size": self.random_access.size}
        start, now = [one.start for one in self._kept], [one.changed() for one in self._kept]
        if any(start + now):
            state |= {"start": start, "now": now}
        if any(has_state(one.sampler) for one in self._kept):
            state["own_start"] = [one.own_start for one in self._kept]
            state["own_now"] = [one.own() for one in self._kept]
        return state

    def _kept_samplers(self) -> list[Any]:
        """Return the samplers whose attributes decide the order: the user's, and torch's with indices or weights."""
        drawn = self.random_access is not None and not isinstance(
            self.sampler, (SubsetRandomSampler, WeightedRandomSampler)
        )
        return [] if drawn else _nested(self.sampler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, when the next epoch begins."""
        sizes = ("samples", "size", "batch_size", "first_batch_size")
        require(state, {f"{name}?": Integer() for name in sizes}, "the state of a sampler")
        self._restored = self._sizes = state

    def _restore_attributes(self, within_epoch: bool) -> None:
        saved, self._restored = self._restored, {}
        when = "start" if within_epoch else "now"
        if saved:
            changes = chain(saved.get(when, []), repeat({}))
            states = chain(saved.get(f"own_{when}", []), repeat(None))
            for kept, changed, own in zip(self._kept, changes, states, strict=False):
                kept.restore(changed, own, in_place=self.random_access is not None)
            self._now = saved.get("now", []) if within_epoch else []
        for kept in self._kept:
            kept.mark_start()

    @contextmanager
    def kept_place(self) -> Iterator[None]:
        """Iterate in the block; afterwards the user's samplers and their generators are as before."""
        samplers = [] if self.random_access is not None else _nested(self.sampler)
        before = [(kept, kept.own()) for kept in map(_KeptSampler, samplers)]
        marks = self._restored, self._told, self.sampler, [*map(copy.copy, self._kept)]
        with isolated_rng(generators=own_generators(*samplers)):
            try:
                yield
            finally:
                for kept, own in before:
                    kept.restore({}, own)
                self._restored, self._told, self.sampler, self._kept = marks

    def num_local_batches(self) -> int | None:
        """Return the batches per epoch on this rank, in evaluation without padding; None if unknown."""
        if self.num_global_batches is None or self.reading.training:
            return self.num_global_batches
        if self.has_batch_sampler:
            return self._rounds(self.rank)
        assert self.samples is not None
        low, high, total = self._share(self.samples % (self.batch_size * self.world_size))
        return self.num_global_batches - (total > 0 and low == high)

    def _rounds(self, rank: int) -> int | None:
        """Return the rounds in which a rank gets a batch of the user's batch sampler; None if unknown."""
        length = _length(self.sampler)
        return None if length is None else -(-(length - rank) // self.world_size)

    def samples_in(self, num_global_batches: int) -> int | None:
        """Return the samples of the first `num_global_batches` over all processes; None if unknown."""
        if self.samples is None or self.shards_itself:
            return None
        size = self.batch_size * self.world_size
        full, short = divmod(self.samples, size)
        if num_global_batches <= full:
            return num_global_batches * size
        return full * size + self._share(short)[2]

    def _count_global_batches(self) -> int | None:
        if self.has_batch_sampler:
            return self._rounds(0)
        if self.samples is None:
            return None
        full, short = divmod(self.samples, self.batch_size * self.world_size)
        return full + (self._share(short)[2] > 0)

    def _share(self, short: int) -> tuple[int, int, int]:
        """Return this rank's part [low, high) of a last global micro-batch of `short` samples, and how many count."""
        rank, world, size = self.rank, self.world_size, self.batch_size
        if not self.drop_last:
            return rank * short // world, (rank + 1) * short // world, short
        batches = 0 if self.reading.training else short // size
        low = min(rank, batches) * size
        return low, low + (size if rank < batches else 0), batches * size

    def _total(self, total: int) -> int | None:
        return None if self.shards_itself else total

    def _random_access_batches(self, epoch: int, start: int) -> Batches:
        """Yield batches from an order that can be computed at any position."""
        assert self.random_access is not None
        assert self.samples is not None
        order = self.random_access.order(self.seed, epoch, self.shuffled)
        for sampler, values in zip(self._kept_samplers(), self._now, strict=False):
            set_attributes(sampler, values, in_place=True)
        self._now = []
        size, globally = self.batch_size, self.batch_size * self.world_size
        total = self._total(globally)
        full, short = divmod(self.samples, globally)
        mine = np.arange(size) + self.rank * size
        many = max(1, _CHUNK // size)
        for first in range(start, full, many):
            numbers = np.arange(first, min(first + many, full))
            indices = order((numbers[:, None] * globally + mine).ravel())
            position = first * globally + self.rank * size
            for low in range(0, len(indices), size):
                yield indices[low : low + size], position, size, total
                position += globally
        if start <= full and short:
            last = order(np.arange(self.samples - short, self.samples))
            yield from self._short_batch(last, self.samples - short)

    def _iterated_batches(self, epoch: int, start: int) -> Batches:
        """Yield batches from a sampler that is iterated from the beginning: indices are skipped, never samples."""
        size, globally = self.batch_size, self.batch_size * self.world_size
        low, high = self.rank * size, (self.rank + 1) * size
        position = start * globally
        for indices in self.iterate_sampler(epoch, position, globally):
            for first in range(0, len(indices), globally):
                part = indices[first : first + globally]
                if len(part) < globally:
                    yield from self._short_batch(part, position)
                else:
                    yield part[low:high], position + low, *self._counted(part, low, high)
                position += globally

    def _short_batch(self, indices: list[Any], position: int) -> Batches:
        low, high, total = self._share(len(indices))
        own, everywhere = self._counted(indices[:total], low, high)
        if low < high:
            yield indices[low:high], position + low, own, everywhere
        elif total and self.pads:
            yield indices[:1], position, 0, everywhere

    def _counted(self, indices: list[Any], low: int, high: int) -> tuple[int, int | None]:
        """Return the samples of a part of the indices, and of all of them."""
        if self.automatic_batching:
            return high - low, self._total(len(indices))
        # An index may stand for several samples.
        samples = [len(one) if hasattr(one, "__len__") else 1 for one in indices]
        return sum(samples[low:high]), self._total(sum(samples))

    def _users_batches(self, epoch: int, start: int) -> Batches:
        """Yield the batches of a user's own batch sampler."""
        world = self.world_size
        number = start * world
        for batches in self.iterate_sampler(epoch, number, world):
            for first in range(0, len(batches), world):
                part = [b if hasattr(b, "__len__") else list(b) for b in batches[first : first + world]]
                total = self._total(sum(map(len, part)))
                if self.rank < len(part):
                    yield part[self.rank], number + self.rank, len(part[self.rank]), total
                elif self.pads:
                    yield part[0], number, 0, total
                number += world

    def iterate_sampler(self, epoch: int, skip: int, unit: int) -> Iterator[list[Any]]:
        """Yield the sampler's items from number `skip` on, in lists of a multiple of `unit` items (the last may be
        short), with separate random numbers.

        In chunks, so that the global generators are exchanged rarely and an endless sampler works too.
        """
        seed, generators = mix_seed(self.seed, round_of(epoch, self._again)), own_generators(self.sampler)
        chunk = unit * max(1, (_CHUNK if not self.has_batch_sampler else _CHUNK // 16) // unit)
        told, self._told = self._told == epoch and self._again == 0, None
        if not told:
            self._restore_attributes(within_epoch=skip > 0)
        with isolated_rng(generators=generators):
            seed_with(seed, generators)
            if not told:
                set_epoch(_nested(self.sampler), epoch)
            items = islice(iter(self.sampler), skip, None)
            state, states = rng_state(), [generator.get_state() for generator in generators]
        while True:
            with isolated_rng(generators=generators):
                set_rng_state(state)
                for generator, before in zip(generators, states, strict=True):
                    generator.set_state(before)
                drawn = list(islice(items, chunk))
                state, states = rng_state(), [generator.get_state() for generator in generators]
            if not drawn:
                return
            yield drawn


def _public(loader: DataLoader[Any]) -> tuple[int, bool, Any, bool]:
    """Return micro-batch size, drop_last, the sampler, and whether that is the user's batch sampler."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return 1, False, loader.sampler, False
    if type(batches) is BatchSampler:
        return batches.batch_size, batches.drop_last, batches.sampler, False
    return 1, False, batches, True


def _length(sampler: Any) -> int | None:
    return length_of(sampler.dataset if type(sampler) is DistributedSampler else sampler)


def _shards_itself(sampler: Any) -> bool:
    """Return True for samplers with DistributedSampler's attributes; not for torch's own, whose order is known."""
    if type(sampler) is DistributedSampler:
        return False
    return any(hasattr(one, "rank") and getattr(one, "num_replicas", 1) > 1 for one in _nested(sampler))


def _check_shards(sampler: Any, rank: int, world_size: int) -> None:
    """Raise ConfigError if a sampler shards for another number of readers, such as all processes of one model."""
    for one in _nested(sampler):
        given = getattr(one, "rank", rank), getattr(one, "num_replicas", world_size)
        if given != (rank, world_size):
            raise ConfigError(
                f"{type(one).__name__} gives part {given[0]} of {given[1]} of the data, and this process is reader "
                f"{rank} of {world_size}: pass rank=trainer.reader and num_replicas=trainer.readers, or neither."
            )


def _nested(sampler: Any) -> list[Any]:
    """Return the sampler, and the one inside it if it is a batch sampler around another."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]
