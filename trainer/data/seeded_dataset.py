"""SeededDataset: a map-style dataset whose batches have the same random numbers, whichever process loads them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, default_convert, get_worker_info

from trainer.data.loader import Batch
from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError
from trainer.metrics.metric_log import first_dimensions
from trainer.seed import mix_seed, seed_cpu_generators

log = logging.getLogger("trainer")


class SeededIndices(NamedTuple):
    """The indices of one batch (or the one index, without automatic batching) and the seed of its random numbers."""

    indices: Any
    seed: int
    position: int | None
    """Position of the first sample in the epoch, for a seed per sample; None: one seed for the batch."""
    samples: int
    """See `Batch`."""
    total: int | None
    """See `Batch`."""


class SeededDataset(Dataset[Batch]):
    """Loads and collates a batch for its `SeededIndices`, after seeding the global generators of torch (CPU), numpy and
    `random`; the `collate_fn` of the DataLoader around it is `identity_collate`.

    Args:
        dataset: the user's.
        collate: the user's `collate_fn`.
        isolated: the context to load in; a worker, with separate generators, needs none.
        alone: no other process loads a part of the same micro-batches.
        evaluates: the samples of a batch are weights of values only, not of gradients.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        isolated: AbstractContextManager[None],
        alone: bool = True,
        evaluates: bool = False,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._isolated = isolated
        self._alone = alone
        self._counts = collate not in (default_collate, default_convert)
        # On several processes the requested samples weight a gradient: it is unknown how many the others left out.
        self._weighs = alone or evaluates
        self._warned = False
        self._seeds = not draws_nothing(dataset, collate)

    def __getitem__(self, request: SeededIndices) -> Batch:
        return self._load(request, self._fetch_one)

    def __getitems__(self, request: SeededIndices) -> Batch:
        return self._load(request, self._fetch_batch)

    def _load(self, request: SeededIndices, fetch: Callable[[SeededIndices], Any]) -> Batch:
        try:
            with self._isolated if self._seeds else nullcontext():
                fetched = fetch(request)
                data = self._collate(fetched)
        except StopIteration as error:  # which would end the epoch here, as if there were no more data
            raise ConfigError(
                f"{type(self.dataset).__name__} raised StopIteration for the indices {request.indices}, as a bare "
                "next() does: write next(iterator, None), and return a sample for each index."
            ) from error
        if not isinstance(request.indices, list):
            return self._batch_of_one_index(data, request)
        if self._counts and request.samples:
            samples = samples_left(data, fetched, request.samples)
            if samples is not None and self._weighs:
                return Batch(data, samples, samples if self._alone else request.total)
            if samples != request.samples and not self._warned:
                self._warned = True
                log.warning(
                    "collate_fn gave a batch of %s samples for %d indices (None: not known). Gradients and means go by "
                    "the indices, unless the module's num_items(batch) returns the number",
                    samples,
                    request.samples,
                )
        return Batch(data, request.samples, request.total)

    def _batch_of_one_index(self, data: Any, request: SeededIndices) -> Batch:
        """Return the data of one index, without automatic batching: a sample, or a batch that the dataset has made."""
        sizes = first_dimensions(data)
        if not sizes or request.samples != 1:
            return Batch(data, request.samples, request.total)
        samples = sizes[0] if len(sizes) == 1 else None
        return Batch(data, samples, samples if self._alone else None)

    def _fetch_one(self, request: SeededIndices) -> Any:
        self._seed(request.seed if request.position is None else mix_seed(request.seed, request.position))
        return self.dataset[request.indices]

    def _fetch_batch(self, request: SeededIndices) -> Any:
        if request.position is None or not self._seeds:
            self._seed(request.seed)
            return self._fetch_all(request.indices)
        samples: list[Any] = []
        for position, index in enumerate(request.indices, request.position):
            self._seed(mix_seed(request.seed, position))
            fetched = self._fetch_all([index])
            if not isinstance(fetched, (list, tuple)):
                raise ConfigError(
                    f"seed_per_sample=True needs a list of samples, and {type(self.dataset).__name__}.__getitems__ "
                    f"returned a {type(fetched).__name__}: return a list, or leave seed_per_sample out."
                )
            samples += fetched
        return samples

    def _fetch_all(self, indices: Any) -> Any:
        if not hasattr(self.dataset, "__getitems__"):
            return [self.dataset[index] for index in indices]
        samples = self.dataset.__getitems__(indices)
        # With the user's collate_fn, it may be a batch: a list of tensors.
        if type(samples) is list and self._collate is default_collate and len(samples) != len(indices):
            raise ConfigError(
                f"{type(self.dataset).__name__}.__getitems__ returned {len(samples)} samples for {len(indices)} "
                "indices: return one for each, or leave samples out beforehand."
            )
        return samples

    def _seed(self, seed: int) -> None:
        if self._seeds:
            seed_cpu_generators(seed)


def samples_left(data: Any, fetched: Any, asked: int) -> int | None:
    """Return the number of samples in a batch: fewer than were `asked` for, if a collate function leaves some out.

    None: unknown, because the rows may also be time, pairs of samples, or several samples in a row.
    """
    sizes = first_dimensions(data)
    if min(sizes, default=asked) == asked:
        return asked
    rows = [shape for shape in _shapes(data) if shape]
    in_all, there = _shapes_in_all(fetched, asked)
    alike = {shape[0] for shape in rows if shape[1:] in in_all and shape[0]}
    if len(alike) == 1 and (left := min(alike)) < asked:
        return left
    if any(size % asked == 0 for size in alike) or any(asked in shape[:2] for shape in rows):
        return asked
    return there if there < asked and there in sizes else None


def _shapes_in_all(fetched: Any, asked: int) -> tuple[set[tuple[int, ...]], int]:
    """Return the shapes of tensors that all samples have, and the number of samples."""
    if not isinstance(fetched, (list, tuple)):  # `__getitems__` has made a batch
        return {shape[1:] for shape in _shapes(fetched)}, asked
    present = [{*_shapes(sample)} for sample in fetched if sample is not None]
    # If samples differ in length, a row as long as one sample may consist of several.
    return set.intersection(*present) if present else set(), len(present)


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors and arrays in a batch or sample; empty ones for all else."""
    shapes: list[tuple[int, ...]] = []

    def add(leaf: Any) -> Any:
        shapes.append(tuple(getattr(leaf, "shape", ())))
        return leaf

    map_leaves(batch, add)
    return shapes


def draws_nothing(dataset: Any, collate: Any) -> bool:
    """Return True if loading runs only code of torch that draws no random numbers, so that seeding has no effect."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and collate in (default_collate, default_convert)


def identity_collate(batch: Any) -> Any:
    """Return the batch unchanged: `SeededDataset` has collated it."""
    return batch


class ShowDataset:
    """The `worker_init_fn` for a `SeededDataset`: show the user's dataset in `get_worker_info()`, and call the user's
    own `worker_init_fn`."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self.users = users

    def __call__(self, worker_id: int) -> None:
        info = cast(Any, get_worker_info())
        # WorkerInfo refuses plain assignment.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.users is not None:
            self.users(worker_id)
