"""Batch and BatchLoader: what the loop sees of a loader on one process."""

from __future__ import annotations

import itertools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, compress, islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader

from trainer.data.sampler_state import own_generators, plain_attributes, set_attributes
from trainer.data.worker_processes import data_loaders_in
from trainer.errors import ConfigError
from trainer.model.reachable import OwnGenerator
from trainer.seed import isolated_rng

Divisor = float | torch.Tensor | None
NO_ITEMS = math.inf
"""The divisor of the loss of a batch without items; compared by `is`, which reads no device."""


class Batch(NamedTuple):
    """One micro-batch of one process."""

    data: Any
    """The object that the loader yielded."""
    samples: int | None
    """Samples of the epoch that it holds; None if unknown, 0 for padding."""
    total: int | None
    """Samples of this micro-batch over all processes, or the batches without padding where `samples` is None; None if
    unknown."""

    @property
    def share(self) -> int:
        """Its part of `total`."""
        return 1 if self.samples is None else self.samples

    @property
    def is_padding(self) -> bool:
        """True for a batch of weight zero: it repeats a sample so that this process takes as many steps as the
        others."""
        return self.samples == 0


@dataclass(frozen=True)
class Reading:
    """The part of the data that a process reads, and how it reads it."""

    rank: int
    """The number of this process among the processes that read different samples."""
    world_size: int
    """The number of these processes."""
    seed: int
    """The seed of order and augmentation, the same on all ranks."""
    training: bool
    """True: all ranks get the same number of batches, if need be with padding. False: no sample is repeated."""
    shuffle: bool | None = None
    """None: as the loader does. False: the same order in every epoch, sequential for plain loaders. True: shuffle where
    the loader is sequential."""
    seed_per_sample: bool = False
    """Seed the random numbers of loading for each sample instead of each micro-batch."""
    pad: bool = False
    """In evaluation, too, a plain DataLoader gives all ranks the same number of batches."""
    split: bool = True
    """False: each rank gets the samples of its own DataLoader's sampler."""

    def order_of(self, epoch: int) -> int:
        """Return the epoch that decides the order of `epoch`: 0 where all epochs have the same order."""
        return 0 if self.shuffle is False else epoch


class FactsForRanks(NamedTuple):
    """The facts of a loader that processes compare, by name."""

    equal: dict[str, object]
    """Facts that have to be equal on all processes."""
    orders: dict[str, str] = {}
    """Fingerprints of the orders of samples; they have to be equal if all processes know them."""
    contents: dict[str, str] = {}
    """Fingerprints of samples in memory, which should be equal on all processes."""


class BatchLoader(ABC):
    """The batches of one loader on one process, from any position on: a `ShardedDataLoader` or an `IterableLoader`,
    made by `adapters.make_batch_loader`.

    Raises:
        ConfigError: the loader is empty, or `limit` cannot be applied to it.
    """

    exact: bool = True
    """A resumed run gets the very same batches."""
    one_shot: bool = False
    """True if the loader can be iterated only once: then a second epoch needs an endless loader with a limit."""
    batch_size: int | None = None
    """Samples of a full micro-batch on one process; None if unknown."""
    note: str | None = None
    """A line for the user to read at the start of the run, or None."""
    _loader: Any
    """The loader that is iterated."""
    _promised: int | None = None
    """Batches per epoch on this process, by the loader's length; None if unknown."""
    _newest: weakref.ref[Any] | None = None
    """The newest iterator of the loader, if that may have workers."""

    def __init__(self, loader: Any, label: str, limit: int | float | None) -> None:
        self._users = loader
        self.label = label
        """The loader's name in messages."""
        self._given_limit = limit
        self._measured: tuple[int | None, ...] | None = None
        self.limit: int | None = None
        """Batches per epoch at most; None: all."""
        self.length: int | None = None
        """Batches per epoch on this process, after the limit and without padding in evaluation; None if unknown. An
        iterable's own `__len__` is believed; with an integer limit and nothing known, the limit."""
        self.max_length: int | None = None
        """The largest `length` of all processes. In training all have the same."""
        self.samples_per_epoch: int | None = None
        """Samples per epoch over all processes, after the limit; None if unknown."""
        options = loader if isinstance(loader, DataLoader) else None
        self.num_workers: int | None = getattr(options, "num_workers", None)
        """Number of processes that load batches; None: the loader is not a DataLoader."""
        self.pinned: bool | None = getattr(options, "pin_memory", None)
        """True if batches come in pinned memory; None: the loader is not a DataLoader."""

    def _set_lengths(self, num_local_batches: int | None, num_global_batches: int | None, promised: int | None) -> None:
        """Set the lengths; `promised`: this process's batches with padding, of which `as_promised` makes sure."""
        self.limit = _batches(self._given_limit, num_global_batches, self.label)
        before, self._measured = self._measured, (num_local_batches, num_global_batches, self.limit)
        if self._measured != before:  # else the length stays the common one of all processes
            self.length = _minimum(num_local_batches, self.limit)
            self.max_length = _minimum(num_global_batches, self.limit)
        # In training `length` may be another process's number.
        self._promised = None if promised is None else _minimum(promised, self.limit)

    @abstractmethod
    def measure(self, epoch: int | None = None, start: int = 0) -> None:
        """Read the sizes of the data and the options of the loader, for the epoch that is about to begin.

        Both may change from one epoch to the next, by what `set_epoch` is told and by the state of a checkpoint.

        Args:
            epoch: the epoch that `set_epoch` is told, for the next `iterate`; None: nothing is told yet.
            start: the consumed batches of the epoch; above 0 a resumed run continues the epoch with its first sizes.

        Raises:
            ConfigError: the loader has become empty, or lacks samples that the epoch began with.
        """

    def forget_sizes(self) -> None:
        """Have a resumed epoch use the sizes of the current data."""

    @abstractmethod
    def iterate(self, epoch: int, start: int = 0, again: int = 0) -> Iterator[Batch]:
        """Yield the batches of `epoch`, from this process's batch number `start` on.

        A plain DataLoader skips indices, never samples. Other iterables are read and discarded up to `start`, unless
        `load_state_dict` was called before: then they continue from that state.

        Args:
            again: the number of times that the loader has been at its end in this epoch.

        Raises:
            ConfigError: an iterable without a length yields nothing, or can be iterated only once and is used up.
        """

    def pass_by(self, epoch: int, start: int, again: int = 0) -> None:
        """Begin an epoch with nothing left in the samplers, as `iterate` does, without loading a batch."""

    def facts_for_ranks(self) -> FactsForRanks:
        """Return the facts that the processes compare; an iterable has only its kind. It may take seconds."""
        return FactsForRanks({"kind": "iterated by each process"})

    @abstractmethod
    def identity(self, world_size: int) -> dict[str, str]:
        """Return descriptions that have to be equal to resume inside an epoch.

        By names of `GROUPS` in `runs/facts.py`. A description with "on each process" depends on `world_size`.
        """

    def numbers(self) -> dict[str, dict[str, str]]:
        """Return the numbers that decide which samples are loaded, by a name of `GROUPS` and by their name.

        Numbers that a checkpoint restores are left out.
        """
        return {}

    def as_promised(self, batches: Iterator[Batch], start: int, source: str, slack: int = 0) -> Iterator[Batch]:
        """Return the batches from number `start` on; raise ConfigError if their number turns out to be another.

        Args:
            source: a description of the object that has the length.
            slack: the difference that is allowed.
        """
        length = self._promised
        return batches if length is None else chain.from_iterable(self._counted(batches, length, start, source, slack))

    def _counted(
        self, batches: Iterator[Batch], length: int, start: int, source: str, slack: int
    ) -> Iterator[Iterator[Batch]]:
        """Yield the batches as one iterator, and check their number when it is exhausted: no batch passes a frame."""
        # `compress` counts the batches: a loop with a variable would keep the last one in memory.
        counted = itertools.count(start + 1)
        yield compress(islice(batches, max(0, length + slack - start)), counted)
        given = next(counted) - 1
        more = given >= length + slack and next(batches, None) is not None
        if more or given < length - slack:
            number = f"more than {given}" if more else f"only {given}"
            raise ConfigError(
                f"{self.label} gave {number} batches, and its length is {length}: {source} has a wrong __len__. Define "
                "none, or return the number that __iter__ yields."
            )

    def shorten(self, lengths: list[int | None]) -> None:
        """Set the length to the least of all processes' lengths: an epoch of training ends on all at once."""
        known = [length for length in lengths if length is not None]
        if self.length is not None and known:
            self.length = self.max_length = min(known)

    @property
    def counts_everywhere(self) -> bool:
        """Whether each process has as many batches, which come with their samples over all processes."""
        return self.samples_per_epoch is not None

    def agree_on_length(self, lengths: list[int | None]) -> None:
        """Do as `shorten`, at the beginning of an epoch.

        Raises:
            ConfigError: the lengths differ, although all processes need the same data.
        """
        if self.samples_per_epoch is not None and len({*lengths}) > 1:
            raise ConfigError(
                f"{self.label} has epochs of {lengths} batches on the processes: each needs the full dataset, which "
                "the trainer splits. Change the data in the same way on all of them."
            )
        self.shorten(lengths)

    def keep_indices(self) -> None:
        """Remember from now on the indices of the latest batches, for `indices`."""

    def indices(self, epoch: int, number: int) -> list[Any] | None:
        """Return the indices of the samples in a recent batch of this process; None: they are not known."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an iterable that has one, else {}. Its position is after the last batch that `iterate`
        yielded: call it when the loop has consumed all of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the next `iterate` continues there."""

    def generators(self) -> list[OwnGenerator]:
        """Return the random generators in the user's loader and data."""
        return own_generators(self._users, of_data=True)

    def streams(self) -> list[Any]:
        """Return the user's objects that may keep a place in the data without a state to restore it."""
        return []

    @contextmanager
    def kept_place(self) -> Iterator[None]:
        """Allow reading in the block, and continue afterwards as if nothing had been read."""
        before = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(before)

    @contextmanager
    def kept_data(self) -> Iterator[None]:
        """Allow reading in the block; restore place, generators and plain attributes of the user's data at its end."""
        users = [one for name in ("dataset", "collate_fn") if (one := getattr(self._users, name, None)) is not None]
        before = [(one, plain_attributes(one)) for one in users]
        with isolated_rng(generators=self.generators()), self.kept_place():
            yield
        for one, values in before:
            set_attributes(one, values)
        if self.streams():
            self.close()  # persistent workers have the streams at another place

    def _none_error(self, number: int) -> ConfigError:
        """Return the error for a batch that is None: processes that skip different batches would lose each other."""
        return ConfigError(f"{self.label} gave None as batch {number} of the epoch: leave such samples out beforehand.")

    def close(self) -> None:
        """End the worker processes; the next `iterate` starts new ones."""
        _end_workers(None if self._newest is None else self._newest())
        for one in data_loaders_in(self._loader):
            _end_workers(iterator := vars(one).get("_iterator"))
            one._iterator = None if one.persistent_workers else iterator

    def _begin(self) -> Iterator[Any]:
        """Return an iterator of the loader, whose worker processes `close` ends."""
        iterator: Iterator[Any] = iter(self._loader)
        if hasattr(iterator, "_shutdown_workers"):
            # A weak one: the workers of an iterator that is dropped before its end go with it.
            self._newest = weakref.ref(iterator)
        return iterator


class Loaders:
    """The loaders of a stage on this process; evaluation loaders are by name."""

    def __init__(self) -> None:
        self.train: BatchLoader | None = None
        self.val: dict[str, BatchLoader] = {}
        self.test: dict[str, BatchLoader] = {}
        self.predict: dict[str, BatchLoader] = {}
        self.given: dict[str, Any] = {}
        """The user's loaders, by the names of the attributes."""
        self._make: Callable[[], None] | None = None
        self._keeps_indices = False

    def make_when_needed(self, make: Callable[[], None]) -> None:
        """Have `make` set the loaders at the first call of `needed`."""
        self._make = make

    def needed(self) -> None:
        """Make the loaders, unless they are there."""
        make, self._make = self._make, None
        if make is not None:
            make()

    def set_training(self, loader: BatchLoader, given: Any) -> None:
        """Set the training loader; the methods that return the other loaders may already use it."""
        self.train, self.given["train"] = loader, given
        if self._keeps_indices:
            loader.keep_indices()

    def keep_indices(self) -> None:
        """Have the training loader, and each later one, remember the indices of the latest batches."""
        self._keeps_indices = True
        if self.train is not None:
            self.train.keep_indices()

    def set_evaluation(
        self, kind: Literal["val", "test", "predict"], loaders: dict[str, BatchLoader], given: Any
    ) -> None:
        """Set the evaluation loaders."""
        setattr(self, kind, loaders)
        self.given[kind] = given

    @property
    def evaluated(self) -> dict[str, BatchLoader]:
        """The evaluation loaders: a stage has one kind."""
        return self.val or self.test or self.predict

    @contextmanager
    def kept_places(self) -> Iterator[None]:
        """Restore the places of all loaders at the end of the block."""
        with ExitStack() as places:
            for loader in self.all():
                places.enter_context(loader.kept_place())
            yield

    def all(self) -> list[BatchLoader]:
        """Return the loaders of the stage: the training loader first."""
        return [*([] if self.train is None else [self.train]), *self.evaluated.values()]

    def close(self) -> None:
        """End the worker processes of all loaders."""
        for loader in self.all():
            loader.close()


def has_state(one: Any) -> bool:
    """Whether an object saves and restores its state itself."""
    return all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))


def round_of(epoch: int, again: int) -> int:
    """Return a number for each time that a loader is iterated; the epoch for the first one in it."""
    return epoch + again * 1_000_003


def _end_workers(iterator: Any) -> None:
    """End the worker processes of a DataLoader's iterator, if it has any.

    The iterator's `__del__` would do the same, but workers forked later would run it, too, and complain.
    """
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _batches(limit: int | float | None, length: int | None, label: str) -> int | None:
    """Return how many batches a limit allows; None: all."""
    if limit is None or isinstance(limit, int):
        return limit
    if limit in (0.0, 1.0):
        return 0 if limit == 0.0 else None
    if length is None:
        raise ConfigError(f"limit {limit} is a fraction, but {label} has no length. Give a number of batches, or 1.0.")
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    batches = int(round(limit * length, 6))
    if batches == 0 and length > 0:
        raise ConfigError(
            f"limit {limit} of the {length} batches of {label} is less than one batch. "
            f"Use at least {1 / length:.3g}, a number of batches (an int), or 0 for none."
        )
    return batches


def _minimum(length: int | None, limit: int | None) -> int | None:
    known: set[Any] = {length, limit} - {None}
    return min(known, default=None)
