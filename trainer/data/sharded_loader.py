"""ShardedDataLoader: a plain torch DataLoader over a map-style dataset, re-made around our index stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from trainer.data.batch import Batch
from trainer.data.batch_sampler import DistributedBatchSampler
from trainer.data.rng import InProcessDataset, SeededDataset, WorkerInit, clear_cached_gaussian, identity_collate, mix
from trainer.errors import ConfigError

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def is_plain(loader: Any) -> bool:
    """Whether it is exactly torch's DataLoader (no subclass) over a dataset with indices."""
    return type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)


class ShardedDataLoader:
    """Yields what the user's loader would, in the order of a `DistributedBatchSampler`; leaves the global generators
    alone.

    Everything random in loading a batch (torch, numpy, random) depends on (seed, epoch, position, rank), not on who
    loads it, so that a resumed run and any `num_workers` (0, too) load the same. With `seed_per_sample` it does not
    depend on the rank either.
    """

    exact = True
    one_shot = False

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        label: str,
        rank: int,
        world_size: int,
        seed: int,
        training: bool,
        shuffle: bool | None,
        seed_per_sample: bool,
        fill: bool = False,
    ) -> None:
        workers = loader.num_workers > 0
        self.stream = DistributedBatchSampler(
            loader,
            rank=rank,
            world_size=world_size,
            seed=seed,
            training=training,
            shuffle=shuffle,
            seeded="sample" if seed_per_sample else "batch",
            fill=fill,
        )
        self.note = _note(loader, self.stream, label, shuffle)
        self._label = label
        self._users = loader
        self._seed = mix(seed, rank)
        self._generator = torch.Generator()
        options = {name: getattr(loader, name) for name in _KEPT}
        if getattr(loader, "pin_memory_device", ""):  # deprecated in torch 2.13
            options["pin_memory_device"] = loader.pin_memory_device
        options["worker_init_fn"] = WorkerInit(loader.worker_init_fn) if workers else loader.worker_init_fn
        options["batch_sampler" if self.stream.batching else "sampler"] = self.stream
        if not self.stream.batching:
            options["batch_size"] = None
        self._here = None if workers else InProcessDataset(loader.dataset, loader.collate_fn)
        if self._here is not None:
            options["collate_fn"] = identity_collate
        dataset = SeededDataset(loader.dataset) if self._here is None else self._here
        self._loader: DataLoader[Any] = DataLoader(dataset, generator=self._generator, **options)

    @property
    def length(self) -> int | None:
        return self.stream.num_local_batches()

    @property
    def max_length(self) -> int | None:
        return self.stream.num_global_batches

    @property
    def batch_size(self) -> int | None:
        if self.stream.whole:
            size = getattr(self.stream.source, "batch_size", None)
            return size if isinstance(size, int) else None
        return self.stream.batch_size if self.stream.batching else None

    def samples_in(self, batches: int | None) -> int | None:
        return None if batches is None else self.stream.samples_in(batches)

    def check_not_empty(self) -> None:
        """Raise `ConfigError` if it is known to have no batch, naming what is empty."""
        if self.stream.num_global_batches != 0:
            return
        samples, size, world = self.stream.samples, self.stream.batch_size, self.stream.world_size
        if samples:
            needed = size * world if self.stream.training else size
            processes = f" x {world} processes" if world > 1 and self.stream.training else ""
            raise ConfigError(
                f"{self._label} has no batch: drop_last=True drops all {samples} samples, fewer than one batch of "
                f"{needed} (batch_size {size}{processes}). Use a smaller batch_size or drop_last=False."
            )
        dataset: Any = self._users.dataset
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            empty = f"its dataset {type(dataset).__name__} has length 0. Check the path, split or filter it comes from."
        else:
            empty = f"its sampler {type(self.stream.source).__name__} has length 0. Check what it selects."
        raise ConfigError(f"{self._label} has no batch: {empty}")

    def iterate(self, epoch: int, start: int, limit: int | None) -> Iterator[Batch]:
        """Batches `start` to `limit` of `epoch`."""
        stream = self.stream
        stream.limit = limit
        stream.seek(epoch, start)
        # Persistent workers start once: with the same numbers, whichever epoch a resumed run begins with.
        self._generator.manual_seed(mix(self._seed, 0 if self._loader.persistent_workers else epoch) >> 1)
        batches = self._batches()
        counted = stream.counts.popleft
        for data in batches:
            if self._here is None:
                clear_cached_gaussian()
            samples, total = counted()
            yield Batch(data, samples, total)

    def _batches(self) -> Iterator[Any]:
        if self._here is None or self._loader.pin_memory:
            return iter(self._loader)
        # What a DataLoader does without workers, less the 15 microseconds that its iterator takes for each batch.
        fetch = self._here.__getitems__ if self.stream.batching else self._here.__getitem__
        return map(fetch, self.stream)


def _note(loader: DataLoader[Any], stream: DistributedBatchSampler, label: str, shuffle: bool | None) -> str | None:
    """What the user should know about what became of their sampler."""
    source = stream.source
    notes = []
    if type(source) is DistributedSampler:
        notes.append("its DistributedSampler is replaced: every process gets its part, without repeated samples")
    if stream.shards_itself:
        notes.append(f"its {type(source).__name__} shards by itself (num_replicas, rank) and is used as it is")
    if stream.random_access is not None and getattr(source, "generator", None) is not None:
        notes.append("its generator is not used: the order comes from the trainer's seed and the epoch")
    if shuffle is False and not (stream.random_access is not None and stream.random_access.sequential):
        notes.append(f"its {type(source).__name__} gives the order of epoch 0 in every epoch")
    if not getattr(loader, "in_order", True):
        notes.append("in_order=False is ignored: a run can be resumed only if batches come in order")
    return f"{label}: {'; '.join(notes)}." if notes else None
