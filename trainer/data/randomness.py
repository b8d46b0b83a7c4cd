"""Random numbers for data: seeds from coordinates, private generators for samplers, seeded batches in workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from trainer.runtime.stop import shield_data_worker

_MASK = 2**64 - 1


def mix(*parts: int) -> int:
    """A 64-bit seed from coordinates such as (seed, epoch, position, rank); any integers, the same on every machine.

    Each part goes through the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
    generators", OOPSLA 2014), so that neighbouring coordinates give unrelated seeds.
    """
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_globals(seed: int) -> None:
    """Seed the global generators of torch (CPU), numpy and random, in about 20 microseconds."""
    # torch.manual_seed visits every backend, which costs more than all three of these.
    torch.default_generator.manual_seed(seed >> 1)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class PrivateRandomness:
    """Inside its `with` block the global generators are private ones that start at `seed`; outside they are untouched.

    The block may be entered again: the private numbers go on where they were. `generators` are treated the same.
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._seed = seed
        self._generators = (torch.default_generator, *generators)
        self._inside: Any = None
        self._outside: Any = None

    def __enter__(self) -> None:
        self._outside = self._states()
        if self._inside is None:
            seed_globals(self._seed)
            for generator in self._generators[1:]:
                generator.manual_seed(self._seed >> 1)
        else:
            self._restore(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = self._states()
        self._restore(self._outside)

    def _states(self) -> Any:
        return random.getstate(), np.random.get_state(), [g.get_state() for g in self._generators]

    def _restore(self, states: Any) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for generator, state in zip(self._generators, states[2], strict=True):
            generator.set_state(state)


class Request(NamedTuple):
    """What a worker is asked for: an index or a batch of them, and the seed of everything random in loading it."""

    indices: Any
    seed: int


class SeededDataset(Dataset[Any]):
    """A map-style dataset that is asked by `Request`: the random numbers of a batch do not depend on its worker."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, request: Request) -> Any:
        seed_globals(request.seed)
        return self.dataset[request.indices]

    def __getitems__(self, request: Request) -> Any:
        seed_globals(request.seed)
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch:
            return fetch(request.indices)
        return [self.dataset[index] for index in request.indices]


class WorkerStart:
    """The `worker_init_fn` beside `SeededDataset`: leaves the signals that stop a run to the main process, shows the user's
    dataset in `get_worker_info()`, calls theirs."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self.users = users

    def __call__(self, worker_id: int) -> None:
        shield_data_worker()
        info: Any = get_worker_info()
        # WorkerInfo refuses plain assignment.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.users is not None:
            self.users(worker_id)
