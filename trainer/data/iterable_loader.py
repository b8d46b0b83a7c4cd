"""IterableLoader: any iterable of batches that is not a plain DataLoader, used unchanged."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer.arguments import defines
from trainer.data.fingerprints import describe_function, length_of
from trainer.data.loader import Batch, BatchLoader, Reading, has_state, round_of
from trainer.data.sampler_state import own_generators, seed_with, set_epoch
from trainer.data.worker_processes import data_loaders_in
from trainer.errors import ConfigError, restoring
from trainer.metrics.metric_log import first_dimensions
from trainer.model.reachable import OwnGenerator
from trainer.seed import isolated_rng, mix_seed, seed_cpu_generators

log = logging.getLogger("trainer")

_EMPTY_ROUNDS = 2
"""Times that a stateful loader is iterated again if it yields nothing: torchdata's loader, and then its dataset, first
finish an epoch that was read to its end."""


class _WithNext:
    """The batches of an epoch, which tell whether there is another one before it is taken.

    Args:
        most: the batches that are taken at most.
        sure: the batches that are sure to come, by the loader's length.
    """

    def __init__(self, batches: Iterator[Any], most: int, sure: int) -> None:
        self._batches, self._left, self._sure = batches, most, sure
        self._next: list[Any] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        self._left -= 1
        self._sure -= 1
        return self._next.pop() if self._next else next(self._batches)

    @property
    def is_asked(self) -> bool:
        """Whether the loader has been asked for the next batch, which was not taken yet."""
        return bool(self._next) or self._error is not None

    @property
    def is_cut(self) -> bool:
        """Whether the limit ended the epoch, and the loader may have more batches."""
        return self._left == 0

    def ends(self) -> bool:
        """Whether the epoch has ended; asks the loader for the next batch if necessary, but never beyond the limit.

        An error of the loader waits until that batch is taken.
        """
        if self._left == 0:
            return True
        if self._sure > 0:
            return False
        try:
            self._next += islice(self._batches, 1 - len(self._next))
        except Exception as error:
            self._error = error
        return not self.is_asked


class EveryNth:
    """One process's batches of a loader that each process iterates completely."""

    def __init__(self, first: int, every: int) -> None:
        self.first, self.every = first, every
        self.passed = 0
        """Batches of the epoch in progress that the loader has yielded, of all processes; 0 after its end."""

    def length_of(self, length: int) -> int:
        """Return the number of this process's batches among so many."""
        return -(-(length - self.first) // self.every)

    def of(self, batches: Iterator[Any], passed: int) -> Iterator[Any]:
        """Return this process's batches among the given ones; `passed` batches came before these."""
        return batches if self.every == 1 else self._counted(batches, passed)

    def _counted(self, batches: Iterator[Any], passed: int) -> Iterator[Any]:
        self.passed = passed
        for number, batch in enumerate(batches, passed):
            self.passed = number + 1
            if number % self.every == self.first:
                yield batch
        self.passed = 0


class IterableLoader(BatchLoader):
    """Iterates the user's object unchanged, on each process independently.

    Where each process would get all samples, it iterates all batches and takes every n-th of them.

    Random numbers drawn by `iter()`, by the first batch of an epoch and by skipped batches follow from (seed, epoch): a
    shuffling loader gives the same order after a restart, and the model's random numbers stay undisturbed.

    Raises:
        ConfigError: the object has length 0, or `limit` cannot be applied to it.
    """

    def __init__(self, loader: Any, label: str, limit: int | float | None, reading: Reading, share: EveryNth) -> None:
        self._loader, self._reading, self._share = loader, reading, share
        self._single_process, self._training = reading.world_size == 1, reading.training
        self._restored: dict[str, Any] | None = None
        """The state to begin the next epoch with; None: continue where the last one ended."""
        self._first: dict[str, Any] | None = None
        """The state before the first epoch, where each epoch repeats the first."""
        self._asked: dict[str, Any] | None = None
        """The state before the next batch was asked for."""
        self._batches: _WithNext | None = None
        """The batches of the epoch in progress, of a loader with a state; None: none is in progress."""
        self._told: int | None = None
        """The epoch that `set_epoch` has received for the next iteration."""
        self._used = self._reported = False
        self.one_shot = defines(loader, "__next__") and iter(loader) is loader
        self._keeper = _keeper_of_place(loader)
        """The object whose state is the place in the data: the loader or its dataset; None: neither has a state."""
        self._is_of_nodes = any(kind.__module__.startswith("torchdata.nodes.") for kind in type(loader).__mro__)
        self.stateful = self._keeper is not None
        self._is_list = isinstance(loader, (list, tuple))
        self.exact = self.stateful or self._is_list
        self._makes_batches = isinstance(loader, DataLoader) and loader.batch_sampler is not None
        """True if a DataLoader makes batches of samples; False: the user's object yields batches."""
        super().__init__(loader, label, limit)
        # Each worker of a DataLoader over an IterableDataset makes or drops its own short batch.
        self._slack = max(0, (self.num_workers or 0) - 1)
        self.measure()
        self.note = self._make_note()

    def measure(self, epoch: int | None = None, start: int = 0) -> None:
        length = length_of(self._loader)
        if epoch is not None and length is not None:
            # It may depend on the epoch, and on the state at its beginning.
            with isolated_rng(generators=_generators(self._loader)):
                state = self._state_before(start)
                if state is not None and start == 0:
                    self._load(state)
                self._seed_and_tell(epoch, mix_seed(self._reading.seed, self._reading.order_of(epoch)))
                self._told = epoch if state is None or start > 0 else None
                if state is not None and start > 0:
                    self._load(state)
            length = length_of(self._loader)
        self._length = length = None if length is None else self._share.length_of(length)
        self._set_lengths(length, length, length)
        # In evaluation one process may have no batch.
        if self.limit != 0 and length == 0 and (self._training or self._single_process):
            raise ConfigError(f"{self.label} has no batch: {self._kind()} has length 0.")

    def identity(self, world_size: int) -> dict[str, str]:
        known = {} if self._length is None else {"dataset": f"{self._length} batches on each process"}
        if isinstance(self._loader, DataLoader) and not self.stateful and self._loader.batch_size is not None:
            known["batch_size"] = f"{self._loader.batch_size} on each process"
            known["drop_last"] = str(self._loader.drop_last)
        return {"loader": self._kind().removeprefix("the "), **known}

    def numbers(self) -> dict[str, dict[str, str]]:
        if not isinstance(self._loader, DataLoader):
            return {}
        return {"collate_fn": {"": describe_function(self._loader.collate_fn)}}

    def state_dict(self) -> dict[str, Any]:
        if self._keeper is None:
            return {}
        place = self._place()
        # If each epoch is the first one, a resumed run needs its state, too.
        return place if self._first is None else {**place, "first": self._first}

    def _place(self) -> dict[str, Any]:
        if self._restored is not None:
            return self._restored
        batches = self._batches
        if batches is None:
            with isolated_rng():  # a StatefulDataLoader draws the seed of its workers
                return self._state(ended=False, goes_on=False)
        if not batches.is_asked:
            # A state may be the same at an epoch's end and at its beginning, so the loader has to say which it is.
            self._asked = deepcopy(self._state(ended=False, goes_on=True))
            if batches.ends():
                return self._state(ended=True, goes_on=batches.is_cut)
        assert self._asked is not None
        return self._asked

    def _state(self, ended: bool, goes_on: bool) -> dict[str, Any]:
        """Return the current state; `iter()` of a restored loader continues with it if it was left before its end."""
        state = self._keeper.state_dict()
        return {"loader": state, "passed": self._share.passed, "ended": ended, "goes_on": goes_on}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Loaded when iteration begins, before or after `set_epoch`.
        if self.stateful and "loader" in state:
            place = {"passed": 0, "ended": False, "goes_on": False, **state}
            self._first = place.pop("first", self._first)
            self._restored = place

    def streams(self) -> list[Any]:
        return [] if self.exact else [self._loader, *(one.dataset for one in data_loaders_in(self._loader))]

    @contextmanager
    def kept_place(self) -> Iterator[None]:
        place = None if self._keeper is None else deepcopy(self._keeper.state_dict())
        marks = self._restored, self._batches, self._asked, self._first, self._used, self._told
        share = copy(self._share)
        try:
            yield
        finally:
            self._restored, self._batches, self._asked, self._first, self._used, self._told = marks
            self._share = share
            if place is not None:
                self._keeper.load_state_dict(place)

    def iterate(self, epoch: int, start: int = 0, again: int = 0) -> Iterator[Batch]:
        return chain.from_iterable(self._epoch(epoch, start, again))

    def _epoch(self, epoch: int, start: int, again: int) -> Iterator[Iterator[Batch]]:
        """Yield the batches of an epoch as one iterator: no batch passes a frame."""
        rest = (sys.maxsize if self.limit is None else self.limit) - start
        self._restored = self._state_before(start)
        ended = start > 0 and self._restored is not None and self._restored["ended"]
        # After more batches than its length there is one too many.
        complete = start == self._promised and not self._slack
        if ended or complete or rest <= 0:
            return
        if start == 0 and self._reading.shuffle is False and self.stateful and self._first is None:
            with isolated_rng():
                self._restored = self._first = deepcopy(self._state(ended=False, goes_on=False))
        begun = self._begun(epoch, start, again)
        if begun is None:
            self._refuse_nothing()
            return
        self._used = True
        if self.stateful:
            cuts = self._length is None or self._length - start > rest
            sure = 0 if self._promised is None or self._slack else self._promised - start
            begun = self._batches = _WithNext(begun, rest if cuts else sys.maxsize, sure)
        given = itertools.count(start)
        batches = map(self._received, islice(begun, rest), given)
        yield self.as_promised(batches, start, self._kind(), self._slack)
        self._report_short_epoch(next(given))

    def _begun(self, epoch: int, start: int, again: int) -> Iterator[Any] | None:
        """Return the loader's batches from number `start` on; None if it has none."""
        restored, self._restored, self._batches = self._restored, None, None
        seed = mix_seed(self._reading.seed, self._reading.order_of(round_of(epoch, again)))
        with isolated_rng():
            if restored is not None and start == 0:
                self._end_epoch_before(restored, seed)
            opened = self._start_epoch(epoch, seed, restored if start else None)
            # An endless loader that this run has not read yet has also given the epochs before.
            before = epoch * (self.limit or 0) if self.one_shot and not self._used else 0
            for _ in islice(opened, start + before if restored is None else 0):
                pass
            return opened if start > 0 else self._with_first(opened, seed)

    def _with_first(self, batches: Iterator[Any], seed: int) -> Iterator[Any] | None:
        """Return the batches of an epoch, the first one drawn with the epoch's random numbers; None if it has none.

        If the state of a loader is the end of an epoch, such loaders first finish that epoch, without a batch.
        """
        for number in range(1 + _EMPTY_ROUNDS if self.stateful else 1):
            if number > 0:
                seed_cpu_generators(seed)
                batches = self._own_batches()
            # Neither a list that stays nor a variable of a loop, which would keep a batch in memory.
            if head := [*islice(batches, 1)]:
                return chain(_popped(head), batches)
        return None

    def _received(self, data: Any, number: int) -> Batch:
        if data is None:
            raise self._none_error(number)
        samples = self._samples_in(data) if self._makes_batches else None
        # The constructor of a namedtuple is written in Python, and takes more than twice as long.
        return tuple.__new__(Batch, (data, samples, samples if self._single_process else None))

    def _samples_in(self, data: Any) -> int | None:
        """Return the number of samples that a DataLoader has put into a batch: the first dimension of all its tensors.

        None: the tensors differ in it.
        """
        sizes = first_dimensions(data)
        samples = next(iter(sizes), 0)
        fits = len(sizes) == 1 and 0 < samples <= (self._loader.batch_size or samples)
        return samples if fits else None

    def _report_short_epoch(self, given: int) -> None:
        """Report, once, that an epoch of training had fewer batches than the limit, which schedules rely on."""
        reports = self._training and not self._reported and self._length is None
        if reports and self.limit is not None and given < self.limit:
            self._reported = True
            words = "%s gave %d batches, fewer than its limit of %d: schedules made at the start go by the limit"
            log.warning(words, self.label, given, self.limit)

    def _state_before(self, start: int) -> dict[str, Any] | None:
        """Return the state for reading batch number `start` of an epoch; None: the loader's current one."""
        if start == 0 and self._first is not None:
            return self._first
        if self._batches is not None and self._batches.is_asked:
            return self._asked  # before the batch that nobody has taken
        return self._restored

    def _seed_and_tell(self, epoch: int, seed: int, told: bool = False) -> None:
        """Seed the random generators of samplers, and call `set_epoch` of the loader's parts."""
        # A loader with a state goes through its samplers several times when it is restored.
        seed_with(seed, [] if self.stateful else _generators(self._loader))
        if not told:
            set_epoch(_parts(self._loader), self._reading.order_of(epoch))

    def _load(self, state: dict[str, Any]) -> None:
        with restoring(f"the state of {self.label}"):
            self._keeper.load_state_dict(state["loader"])

    def _end_epoch_before(self, state: dict[str, Any], seed: int) -> None:
        """Restore a state from before an epoch, so that the epoch can begin as it does after the one before.

        `seed`: of the epoch.
        """
        with restoring(f"the state of {self.label}"):
            self._keeper.load_state_dict(state["loader"])
            if self._keeper is not self._loader or not (isinstance(self._loader, DataLoader) or self._is_of_nodes):
                return
            batches = self._begin()
            if isinstance(getattr(self._loader, "dataset", None), IterableDataset):
                return  # it has its state before it is told the epoch; the next `iter()` begins again
            if state["goes_on"]:
                # Torchdata's samplers go to their place when they are asked for a batch, and not before.
                next(batches, None)
            # Else it has begun again automatically, with other random numbers than the epoch's.
            elif isinstance(self._loader, DataLoader):
                begun = deepcopy(self._keeper.state_dict())
                of_workers = begun.get("_snapshot", {}).get("_main_snapshot", {})
                if "_base_seed" in of_workers and self._loader.generator is None:
                    seed_cpu_generators(seed)
                    of_workers["_base_seed"] = torch.empty((), dtype=torch.int64).random_().item()  # as torch does
                self._keeper.load_state_dict(begun)
            else:
                self._loader._it = None  # the iterator of torchdata.nodes would return the old state during the epoch

    def _start_epoch(self, epoch: int, seed: int, restored: dict[str, Any] | None) -> Iterator[Any]:
        told, self._told = self._told == epoch, None
        self._seed_and_tell(epoch, seed, told)
        for one in [] if self.stateful else data_loaders_in(self._loader):
            # torch draws a number for a new iterator, and none where persistent workers continue.
            if one.persistent_workers and vars(one).get("_iterator") is not None:
                torch.empty((), dtype=torch.int64).random_(generator=one.generator)
        if restored is None:
            return self._own_batches()
        self._load(restored)
        with restoring(f"the state of {self.label}"):
            return self._own_batches(restored["passed"])

    def _own_batches(self, passed: int = 0) -> Iterator[Any]:
        return self._share.of(self._begin(), passed)

    def _refuse_nothing(self) -> None:
        if self._training or self._single_process or (self.one_shot and self._used):
            raise ConfigError(
                f"{self.label} has no batch: {self._kind()} yielded nothing. A generator is used up after one pass: "
                "give a list, a DataLoader, or another object that can be iterated again."
            )

    def _kind(self) -> str:
        dataset = f" over {type(self._loader.dataset).__name__}" if isinstance(self._loader, DataLoader) else ""
        return f"the {type(self._loader).__name__}{dataset}"

    def _make_note(self) -> str | None:
        notes, kind = [], self._kind()
        if self._share.every > 1:
            notes.append(
                f"{kind} is a subclass of DataLoader: each process loads all batches and takes one of "
                f"{self._share.every}. Faster: a plain DataLoader, or a sampler with num_replicas and rank"
            )
        elif not self._single_process:
            notes.append(
                f"each process iterates {kind} itself: it must give each process its own part (of a Hugging Face "
                "dataset: datasets.distributed.split_dataset_by_node with self.trainer.reader and self.trainer.readers)"
            )
        if self._training and self.one_shot:
            notes.append(f"{kind} can be iterated only once: one epoch")
        inexact = _why_not_exact(self._loader, self.stateful) if self._training and not self._is_list else None
        if inexact is not None:
            notes.append(f"resume will not be exact: {kind} {inexact}")
        return f"{self.label}: {'; '.join(notes)}." if notes else None


def _why_not_exact(loader: Any, stateful: bool) -> str | None:
    """Return why a resumed run may get other batches, as the end of a sentence; None if it gets the same."""
    dataset = getattr(loader, "dataset", None)
    if not stateful:
        return (
            "has no state_dict and load_state_dict (torchdata's StatefulDataLoader has them), so a resumed run reads "
            "the batches already used again and skips them"
        )
    if _shuffles_in_a_buffer(dataset) or _generators(loader):
        return (
            "has a buffer of shuffled samples, or a sampler with a random generator, which is not in its state. Give "
            "the sampler state_dict and load_state_dict, or use a plain DataLoader without workers"
        )
    if getattr(loader, "num_workers", 0) > 0:
        return (
            "keeps its place, but not the random numbers of its workers: random augmentation is the same only if it "
            "follows from the index"
        )
    return None


def _keeper_of_place(loader: Any) -> Any:
    """Return the loader if it has a state, else its dataset; None if neither has one that determines the rest."""
    dataset = getattr(loader, "dataset", None)
    if has_state(loader) and not _counts_batches(loader, dataset):
        return loader
    # Without workers a DataLoader has taken the samples of the batches that it has given, and no others.
    plain = type(loader) is DataLoader and loader.num_workers == 0 and isinstance(dataset, IterableDataset)
    return dataset if plain and has_state(dataset) and not _shuffles_in_a_buffer(dataset) else None


def _counts_batches(loader: Any, dataset: Any) -> bool:
    """Whether the state of a StatefulDataLoader is a number of batches, because its stream has no state.

    That number is wrong once it has been restored: torchdata 0.11 counts the batches that it reads again, too.
    """
    of_torchdata = any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(loader).__mro__)
    if not of_torchdata or not isinstance(dataset, IterableDataset) or has_state(dataset):
        return False
    with isolated_rng():
        return not has_state(iter(copy(dataset)))


def _shuffles_in_a_buffer(dataset: Any) -> bool:
    """Whether a Hugging Face dataset shuffles in a buffer, whose samples are not in its state."""
    source = getattr(dataset, "_ex_iterable", None)
    while source is not None:
        if "BufferShuffled" in type(source).__name__:
            return True
        source = getattr(source, "ex_iterable", None)
    return False


def _generators(loader: Any) -> list[OwnGenerator]:
    """Return the generators of a DataLoader's samplers, except for samplers that save their state.

    The iterators of torchdata's samplers save the generators.
    """
    samplers = [loader.sampler, loader.batch_sampler] if isinstance(loader, DataLoader) else []
    without_state = [
        sampler
        for sampler in samplers
        if not hasattr(sampler, "state_dict") and not type(sampler).__module__.startswith("torchdata.")
    ]
    return own_generators(*without_state)


def _popped(items: list[Any]) -> Iterator[Any]:
    while items:
        yield items.pop()


def _parts(loader: Any) -> list[Any]:
    """Return the loader and its parts that may have a `set_epoch`."""
    parts = [loader]
    if isinstance(loader, DataLoader):
        batches = loader.batch_sampler
        parts += [loader.dataset, loader.sampler, batches, getattr(batches, "sampler", None)]
    return list({id(part): part for part in parts}.values())
