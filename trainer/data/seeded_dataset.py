"""SeededDataset: a map-style dataset whose batches have the same random numbers, whichever process loads them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

from torch.utils.data import Dataset, Subset, TensorDataset, default_collate, default_convert, get_worker_info

from trainer.data.loader import Batch
from trainer.errors import ConfigError
from trainer.seed import mix_seed, seed_cpu_generators


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
        isolated: the context to load in; a worker, which has generators of its own, needs none.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], isolated: AbstractContextManager[None]) -> None:
        self.dataset = dataset
        self._collate = collate
        self._isolated = isolated
        self._seeds = not draws_nothing(dataset, collate)

    def __getitem__(self, request: SeededIndices) -> Batch:
        return self._load(request, self._fetch_one)

    def __getitems__(self, request: SeededIndices) -> Batch:
        return self._load(request, self._fetch_batch)

    def _load(self, request: SeededIndices, fetch: Callable[[SeededIndices], Any]) -> Batch:
        try:
            if not self._seeds:
                data = self._collate(fetch(request))
            else:
                with self._isolated:
                    data = self._collate(fetch(request))
        except StopIteration as error:  # which would end the epoch here, as if there were no more data
            raise ConfigError(
                f"{type(self.dataset).__name__} raised StopIteration for the indices {request.indices}, as a bare "
                "next() does: write next(iterator, None), and return a sample for each index."
            ) from error
        except (KeyboardInterrupt, SystemExit) as error:
            if get_worker_info() is None:
                raise
            # A worker ignores Ctrl-C, so the user's code raised it; the worker would end without a word.
            raise RuntimeError(
                f"{type(self.dataset).__name__} raised {type(error).__name__} in a data worker for the indices "
                f"{request.indices}, and a worker cannot end the run: raise another exception to report an error."
            ) from error
        return Batch(data, request.samples, request.total)

    def _fetch_one(self, request: SeededIndices) -> Any:
        self._seed(request.seed if request.position is None else mix_seed(request.seed, request.position))
        return self.dataset[request.indices]

    def _fetch_batch(self, request: SeededIndices) -> Any:
        fetch = self._fetch_all if hasattr(self.dataset, "__getitems__") else None
        if request.position is None or not self._seeds:
            self._seed(request.seed)
            return fetch(request.indices) if fetch else [self.dataset[index] for index in request.indices]
        samples: list[Any] = []
        for position, index in enumerate(request.indices, request.position):
            self._seed(mix_seed(request.seed, position))
            samples += fetch([index]) if fetch else [self.dataset[index]]
        return samples

    def _fetch_all(self, indices: Any) -> Any:
        samples = self.dataset.__getitems__(indices)
        # With a collate_fn of the user's, it may be a batch: a list of tensors.
        if type(samples) is list and self._collate is default_collate and len(samples) != len(indices):
            raise ConfigError(
                f"{type(self.dataset).__name__}.__getitems__ returned {len(samples)} samples for {len(indices)} "
                "indices: return one for each, or leave samples out beforehand."
            )
        return samples

    def _seed(self, seed: int) -> None:
        if self._seeds:
            seed_cpu_generators(seed)


def draws_nothing(dataset: Any, collate: Any) -> bool:
    """Return True if loading runs only torch's own code that draws no random numbers, so that seeding has no effect."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and collate in (default_collate, default_convert)


def identity_collate(batch: Any) -> Any:
    """Return the batch, which `SeededDataset` has collated."""
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
