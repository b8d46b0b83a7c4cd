"""Random numbers for data: seeds from coordinates, private generators for samplers, seeded loading."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from trainer.fault_tolerance.stop import ignore_signals_in_worker

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


def seed_globals(seed: int, *, numpys: bool = True, pythons: bool = True) -> None:
    """Seed the global generators of torch (CPU), numpy and random: in 1, 2 and 8 microseconds."""
    # torch.manual_seed visits every backend, which costs more than all three of these.
    torch.default_generator.manual_seed(seed >> 1)
    if numpys:
        np.random.seed(seed & 0xFFFFFFFF)
    if pythons:
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


class SetAside:
    """Inside its `with` block the global generators of torch (CPU) and numpy may be seeded and drawn from; outside they
    are untouched. Made for every batch: 2 microseconds.

    One thing is not kept: numpy's old functions (`np.random.normal`) make normals in pairs, and forget the second one.
    """

    def __init__(self) -> None:
        self._global = np.random.mtrand
        self._spare = np.random.MT19937(0)
        # `MT19937.state` takes 30 microseconds; this looks at its first word and its place, which drawing changes.
        self._words = (ctypes.c_uint32 * 625).from_address(self._spare.ctypes.state_address)
        self._unused = self._words[0], self._words[624]
        self._torch: Any = None
        self._numpy: Any = None

    def numpy_was_used(self) -> bool:
        """Whether anything has ever been drawn from numpy's generator inside, or it was seeded."""
        return (self._words[0], self._words[624]) != self._unused

    def __enter__(self) -> None:
        self._torch = torch.default_generator.get_state()
        # np.random.get_state takes 30 microseconds; this exchanges a pointer.
        self._numpy = self._global.get_bit_generator()
        self._global.set_bit_generator(self._spare)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.default_generator.set_state(self._torch)
        self._global.set_bit_generator(self._numpy)


class HiddenRandom:
    """The state of the generator behind the functions of `random`: remembered, looked at and put back, in less than a
    microsecond.

    `random.getstate` makes 625 Python numbers, a tenth of the time of a small batch; this copies the generator's
    memory. Where CPython keeps the words there is found out with a generator whose words are known; if they are not
    found, `random.getstate` it is.
    """

    def __init__(self) -> None:
        self._generator: Any = random.random.__self__  # type: ignore[attr-defined]
        place = _place_of_words() if sys.implementation.name == "cpython" else None
        self._address = None if place is None else id(self._generator) + place
        self._copy = ctypes.create_string_buffer(_WORDS.size)
        self._head_before = (ctypes.c_char * _HEAD).from_buffer(self._copy)
        self._head = None if self._address is None else (ctypes.c_char * _HEAD).from_address(self._address)
        self._state: Any = None
        self._second_normal: float | None = None

    def remember(self) -> None:
        """Keep the state as it is now, for the other two."""
        if self._address is None:
            self._state = random.getstate()
            return
        ctypes.memmove(self._copy, self._address, _WORDS.size)
        self._second_normal = self._generator.gauss_next

    def has_changed(self) -> bool:
        """Whether it is another state: drawing changes the index, or all words if that comes round."""
        if self._head is None:
            return bool(random.getstate() != self._state)
        return self._head.raw != self._head_before.raw or bool(self._generator.gauss_next != self._second_normal)

    def put_back(self) -> None:
        """Go on from the state that was remembered."""
        state = self._state
        if self._address is not None:
            index, *words = _WORDS.unpack(self._copy.raw)
            state = (self._generator.VERSION, (*words, index), self._second_normal)
        random.setstate(state)


_WORDS = struct.Struct("=i624I")
"""The Mersenne twister of CPython's `_random.Random`: the index of the next word, and the words."""
_HEAD = 12
"""Bytes of the index and the first two words."""


def clear_cached_gaussian() -> None:
    """What `SetAside` does to numpy's old functions: for loading elsewhere, so that the main process draws the same."""
    generators = np.random.mtrand
    generators.set_bit_generator(generators.get_bit_generator())


def _place_of_words() -> int | None:
    """At which byte of a `random.Random` its index and words begin; None: they are kept in another way."""
    probe, place = random.Random(0), None
    for _ in range(2):
        *words, index = probe.getstate()[1]
        memory = ctypes.string_at(id(probe), random.Random.__basicsize__)
        if place is None:
            place = memory.find(_WORDS.pack(index, *words))
        if place < 0 or not memory.startswith(_WORDS.pack(index, *words), place):
            return None
        probe.random()
    return place


class SeededIndices(NamedTuple):
    """What is loaded next: an index or a batch of them, and the seed of everything random in it."""

    indices: Any
    seed: int
    first: int | None = None
    """A number for the first sample, the following ones count on: each sample gets a seed of its own. None: one seed
    for the batch."""


class SeededDataset(Dataset[Any]):
    """A map-style dataset indexed by `SeededIndices`: a batch's random numbers do not depend on who loads it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.seed: Callable[[int], None] = seed_globals

    def __getitem__(self, request: SeededIndices) -> Any:
        self.seed(request.seed if request.first is None else mix(request.seed, request.first))
        return self.dataset[request.indices]

    def __getitems__(self, request: SeededIndices) -> Any:
        fetch = getattr(self.dataset, "__getitems__", None)
        if request.first is not None:
            return self._one_by_one(request, fetch)
        self.seed(request.seed)
        if fetch:
            return fetch(request.indices)
        return [self.dataset[index] for index in request.indices]

    def _one_by_one(self, request: SeededIndices, fetch: Any) -> list[Any]:
        samples: list[Any] = []
        for number, index in enumerate(request.indices, cast(int, request.first)):
            self.seed(mix(request.seed, number))
            samples += fetch([index]) if fetch else [self.dataset[index]]
        return samples


class InProcessDataset(SeededDataset):
    """The same for the main process, whose own random numbers are set aside meanwhile.

    It collates, too, since that may draw as well; the DataLoader around it has `collate_fn=identity_collate`.
    numpy and `random`, which are slow to seed, are only watched until a batch is seen to draw from one; that batch is
    loaded again, and from then on that generator is seeded each time. The numbers are those that seeding always gives.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        super().__init__(dataset)
        self.seed = self._seed_what_is_used
        self._collate = collate
        self._aside = SetAside()
        self._random = HiddenRandom()
        self._uses_numpy = False
        self._uses_random = False

    def __getitem__(self, request: SeededIndices) -> Any:
        return self._load(super().__getitem__, request)

    def __getitems__(self, request: SeededIndices) -> Any:
        return self._load(super().__getitems__, request)

    def _load(self, fetch: Callable[[SeededIndices], Any], request: SeededIndices) -> Any:
        with self._aside:
            self._random.remember()
            try:
                batch = self._collate(fetch(request))
                while self._sees_another_used():
                    batch = self._collate(fetch(request))
                return batch
            finally:
                if self._uses_random:
                    self._random.put_back()

    def _sees_another_used(self) -> bool:
        uses = self._uses_numpy, self._uses_random
        self._uses_numpy = self._uses_numpy or self._aside.numpy_was_used()
        self._uses_random = self._uses_random or self._random.has_changed()
        return uses != (self._uses_numpy, self._uses_random)

    def _seed_what_is_used(self, seed: int) -> None:
        seed_globals(seed, numpys=self._uses_numpy, pythons=self._uses_random)


def identity_collate(batch: Any) -> Any:
    """The `collate_fn` beside `InProcessDataset`."""
    return batch


class WorkerInit:
    """The `worker_init_fn` beside `SeededDataset`: leaves the signals that stop a run to the main process, shows the
    user's dataset in `get_worker_info()`, calls theirs."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self.users = users

    def __call__(self, worker_id: int) -> None:
        ignore_signals_in_worker()
        info: Any = get_worker_info()
        # WorkerInfo refuses plain assignment.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.users is not None:
            self.users(worker_id)
