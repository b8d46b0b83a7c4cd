"""ShardedDataLoader: a plain torch DataLoader over a map-style dataset; each process loads its part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from trainer.data.batch_sampler import DistributedBatchSampler
from trainer.data.fingerprints import (
    contents_fingerprints,
    describe_function,
    indices_fingerprint,
    length_of,
    name_of,
    samples_fingerprints,
)
from trainer.data.loader import Batch, BatchLoader, FactsForRanks, round_of
from trainer.data.micro_batches import parts_of
from trainer.data.sampler_check import order_of, resumes_exactly
from trainer.data.seeded_dataset import SeededDataset, ShowDataset, identity_collate
from trainer.errors import ConfigError
from trainer.seed import PrivateRng, drop_cached_normal, mix_seed

_KEPT = ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")


def is_plain(loader: Any) -> bool:
    """Return True for exactly torch's DataLoader (no subclass) over a map-style dataset."""
    return type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)


class ShardedDataLoader(BatchLoader):
    """The user's DataLoader, made again from its public attributes around a `DistributedBatchSampler` and a
    `SeededDataset`; the global generators of the process stay unchanged.

    The random numbers in a batch (torch, numpy, random) depend on (seed, epoch, position, rank), not on the process
    that loads it, so a resumed run and any `num_workers` (0 included) load the same. With `seed_per_sample` they do not
    depend on the rank either.
    """

    def __init__(
        self, loader: DataLoader[Any], sampler: DistributedBatchSampler, label: str, limit: int | float | None
    ) -> None:
        self.sampler = sampler
        super().__init__(loader, label, limit)
        self.parts = 1
        """Micro-batches into which each batch is split."""
        self._given = loader
        self._seed = mix_seed(sampler.seed, sampler.reading.rank)
        self._dataset: Any = loader.dataset
        self._generator = torch.Generator()
        self._options: dict[str, Any] = {}
        self._measure()
        self.note = _note(loader, sampler, label)

    def measure(self, epoch: int | None = None, start: int = 0) -> None:
        self.sampler.measure(epoch, -(-start // self.parts))
        self._measure()

    def forget_sizes(self) -> None:
        self.sampler.forget_sizes()

    def _measure(self) -> None:
        sampler, loader = self.sampler, self._given
        if self._given_limit != 0 and sampler.num_global_batches == 0:
            raise self._no_batch()
        local, everywhere = sampler.num_local_batches(), sampler.num_global_batches
        self._set_lengths(local, everywhere, everywhere if sampler.pads else local)
        self.samples_per_epoch = None if self.max_length is None else sampler.samples_in(self.max_length)
        self.batch_size = _batch_size(sampler)
        if self.parts > 1:
            self._count_parts()
        options = {name: getattr(loader, name) for name in (*_KEPT, "worker_init_fn", "collate_fn")}
        if options != self._options:
            if self._options:
                self.close()
            self._options, self._collate = options, loader.collate_fn
            self._loader = self._make_again(loader)

    def _no_batch(self) -> ConfigError:
        sampler = self.sampler
        size = sampler.batch_size * (sampler.world_size if sampler.reading.training else 1)
        return ConfigError(
            f"{self.label} has no batch: {type(sampler.sampler).__name__} over {type(self._dataset).__name__} gives "
            f"{sampler.samples or 0} samples, and a batch needs {size} (drop_last={sampler.drop_last}). Check the "
            "data, or use a smaller batch_size."
        )

    @property
    def counts_everywhere(self) -> bool:
        # Without automatic batching an index may stand for a batch of a size that is only known once it is loaded.
        return super().counts_everywhere and self.sampler.automatic_batching

    def split(self, samples: int) -> int:
        """Split each batch into micro-batches of so many samples, a divisor of `batch_size`; return their number."""
        assert self.batch_size is not None
        self.parts = self.batch_size // samples
        self._count_parts()
        return self.parts

    def _count_parts(self) -> None:
        assert self.batch_size is not None
        self.batch_size, self._measured = self.batch_size // self.parts, None
        self.length = None if self.length is None else self.length * self.parts
        self.max_length = None if self.max_length is None else self.max_length * self.parts

    def _make_again(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        options = {name: getattr(loader, name) for name in _KEPT}
        if getattr(loader, "pin_memory_device", ""):  # deprecated in torch 2.13
            options["pin_memory_device"] = loader.pin_memory_device
        if loader.num_workers > 0:
            options["worker_init_fn"] = ShowDataset(loader.worker_init_fn)
        if self.sampler.automatic_batching:
            options["batch_sampler"] = self.sampler
        else:
            options |= {"sampler": self.sampler, "batch_size": None}
        isolated = PrivateRng() if loader.num_workers == 0 else nullcontext()
        alone, evaluates = self.sampler.world_size == 1, not self.sampler.reading.training
        dataset = SeededDataset(loader.dataset, loader.collate_fn, isolated, alone, evaluates)
        return DataLoader(dataset, generator=self._generator, collate_fn=identity_collate, **options)

    def iterate(self, epoch: int, start: int = 0, again: int = 0) -> Iterator[Batch]:
        if self.parts == 1:
            yield from self._unsplit_batches(epoch, start, again)
            return
        first, skip = divmod(start, self.parts)
        for batch in self._unsplit_batches(epoch, first, again):
            assert self.batch_size is not None
            yield from islice(parts_of(batch, self.batch_size, self.parts), skip, None)
            skip = 0

    def pass_by(self, epoch: int, start: int, again: int = 0) -> None:
        self.sampler.seek(epoch, start, 0, again)
        iter(self.sampler)

    def _unsplit_batches(self, epoch: int, start: int, again: int) -> Iterator[Batch]:
        """Yield the batches as the user's DataLoader makes them."""
        self.sampler.seek(epoch, start, self.limit, again)
        # Persistent workers start once, and with the same numbers in a run that is resumed in a later epoch.
        seed = 0 if self._loader.persistent_workers else round_of(epoch, again)
        self._generator.manual_seed(mix_seed(self._seed, seed) >> 1)
        batches = map(self._received, self._batches(), itertools.count(start))
        yield from self.as_promised(batches, start, f"its {type(self.sampler.sampler).__name__}")

    def facts_for_ranks(self) -> FactsForRanks:
        sampler, kind = self.sampler, type(self.sampler.sampler)
        equal: dict[str, object] = {
            "kind": "split by the trainer",
            "sampler": kind,
            "collate_fn": name_of(self._collate),
        }
        if sampler.shards_itself:
            return FactsForRanks(equal)
        equal |= {"batch_size": sampler.batch_size, "drop_last": sampler.drop_last, "shuffled": sampler.shuffled}
        equal |= {"samples in an epoch": self.samples_per_epoch, "batches in an epoch": sampler.num_global_batches}
        equal |= {f"{name} of its {kind.__name__}": one for name, one in sampler.numbers().items()}
        equal |= {f"{name} of its dataset": one for name, one in self._dataset_facts().items()}
        order = None if sampler.world_size == 1 else order_of(sampler)
        orders = {} if order is None else {f"order of its {kind.__name__}": order}
        return FactsForRanks(equal, orders, contents_fingerprints(self._dataset))

    def _dataset_facts(self) -> dict[str, str]:
        indices = indices_fingerprint(self._dataset)
        return samples_fingerprints(self._dataset) | ({} if indices is None else {"indices": indices})

    def keep_indices(self) -> None:
        self.sampler.keep_indices()

    def indices(self, epoch: int, number: int) -> list[Any] | None:
        if self.parts == 1:
            return self.sampler.indices(epoch, number)
        first, part = divmod(number, self.parts)
        full = self.sampler.indices(epoch, first)
        size = self.batch_size or 0
        return None if full is None else full[part * size : (part + 1) * size]

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)

    @contextmanager
    def kept_place(self) -> Iterator[None]:
        with self.sampler.kept_place():
            yield

    def numbers(self) -> dict[str, dict[str, str]]:
        contents = {} if self.sampler.shards_itself else contents_fingerprints(self._dataset)
        return {
            "sampler": {**self.sampler.numbers(), **self.sampler.globals()},
            "dataset": self._dataset_facts(),
            "contents": contents,
            "collate_fn": {"": describe_function(self._collate)},
        }

    def identity(self, world_size: int) -> dict[str, str]:
        sampler, dataset = self.sampler, self._dataset
        length = length_of(dataset)
        return {
            "loader": "DataLoader, split by the trainer",
            "dataset": type(dataset).__name__ if length is None else f"{type(dataset).__name__}, {length} samples",
            "sampler": sampler.describe(length),
            "shuffle": "shuffled" if sampler.shuffled else "in order",
            "batch_size": "" if sampler.has_batch_sampler else f"{sampler.batch_size * world_size} over all processes",
            "drop_last": str(sampler.drop_last),
        }

    def _received(self, batch: Batch, number: int) -> Batch:
        drop_cached_normal()
        if batch.data is None:
            raise self._none_error(number)
        return batch

    def _batches(self) -> Iterator[Batch]:
        if self._loader.num_workers > 0 or self._loader.pin_memory:
            return self._begin()
        # A DataLoader without workers does the same, but its iterator takes 15 microseconds for each batch.
        dataset: Any = self._loader.dataset
        return map(dataset.__getitems__ if self.sampler.automatic_batching else dataset.__getitem__, self.sampler)


def _batch_size(sampler: DistributedBatchSampler) -> int | None:
    if sampler.has_batch_sampler:
        size = getattr(sampler.sampler, "batch_size", None)
        return size if isinstance(size, int) else None
    return sampler.batch_size if sampler.automatic_batching else None


def _note(loader: DataLoader[Any], sampler: DistributedBatchSampler, label: str) -> str | None:
    """Return one line that names all that was replaced or ignored, or None."""
    source, known, reading = sampler.sampler, sampler.random_access, sampler.reading
    kind = type(source).__name__
    notes = {
        "its DistributedSampler is replaced: every process gets its part, without repeated samples": (
            type(source) is DistributedSampler
        ),
        f"its {kind} does its own sharding (num_replicas, rank) and is used unchanged": sampler.shards_itself,
        "its generator is not used: the order comes from the trainer's seed and the epoch": (
            known is not None and getattr(source, "generator", None) is not None
        ),
        "its samples come in order, also on several processes: to shuffle them, give shuffle=True": (
            reading.training and sampler.world_size > 1 and sampler.comes_in_order
        ),
        f"its {kind} gives the order of epoch 0 in every epoch": (
            reading.shuffle is False and (known is None or not known.sequential)
        ),
        "in_order=False is ignored: a run can be resumed only if batches come in order": (
            not getattr(loader, "in_order", True)
        ),
        f"resume will not be exact: {kind} keeps state that is not found. Have set_epoch(epoch) decide the order, "
        "define state_dict and load_state_dict, or keep generators and counters in its attributes": (
            reading.training and reading.rank == 0 and resumes_exactly(sampler) is False
        ),
    }
    shown = [note for note, applies in notes.items() if applies]
    return f"{label}: {'; '.join(shown)}." if shown else None
