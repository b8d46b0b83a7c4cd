"""Samplers with generators, counters and lists of their own give the same order after a resume."""

from __future__ import annotations

import copy
import fcntl
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.helpers.toy import Toy, quiet
from trainer.callbacks import ModelCheckpoint
from trainer.data import sampler_check
from trainer.data.adapters import make_batch_loader
from trainer.data.sampler_state import own_generators

SAMPLES = 16
GLOBAL_RNG = np.random.default_rng(7)


class Own(Sampler[int]):
    """Draws an order from what it holds."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(permuted(self.rng))


def permuted(rng: Any) -> list[int]:
    if isinstance(rng, torch.Generator):
        return torch.randperm(SAMPLES, generator=rng).tolist()
    if isinstance(rng, random.Random):
        return rng.sample(range(SAMPLES), SAMPLES)
    return rng.permutation(SAMPLES).tolist()


class Nested(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(permuted(self.rng["inside"][0].here))


class Slots(Own):
    __slots__ = ("hidden",)

    def __init__(self, rng: Any) -> None:
        self.hidden = rng

    def __iter__(self) -> Iterator[int]:
        return iter(permuted(self.hidden))


class OfClass(Own):
    shared = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(permuted(self.shared))


class OfModule(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(permuted(GLOBAL_RNG))


class Function(Own):
    def __iter__(self) -> Iterator[int]:
        return iter(self.rng())


class Counting(Own):
    """Counts its epochs, and seeds itself by that."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(permuted(random.Random(self.epochs)))


class InPlace(Own):
    """Reorders a list of its own again and again."""

    def __init__(self, kind: Any) -> None:
        self.order = kind(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        self.order[0], self.order[3] = int(self.order[3]), int(self.order[0])
        return iter([int(one) for one in self.order])


class Late(Counting):
    """Counts when an epoch is through."""

    def __iter__(self) -> Iterator[int]:
        yield from permuted(random.Random(self.epochs))
        self.epochs += 1


class Batches(Sampler[list[int]]):
    def __init__(self, rng: Any) -> None:
        self.rng, self.drawn = rng, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn += 1
        order = [(one + self.drawn) % SAMPLES for one in permuted(self.rng)]
        return iter([order[first : first + 4] for first in range(0, SAMPLES, 4)])


def closure() -> Any:
    rng = random.Random(3)
    return lambda: permuted(rng)


SAMPLERS: dict[str, Any] = {
    "torch": lambda: Own(torch.Generator().manual_seed(1)),
    "numpy": lambda: Own(np.random.default_rng(1)),
    "numpy, without a seed": lambda: Own(np.random.default_rng()),
    "Philox": lambda: Own(np.random.Generator(np.random.Philox(1))),
    "RandomState": lambda: Own(np.random.RandomState(1)),
    "random": lambda: Own(random.Random(1)),
    "nested": lambda: Nested({"inside": [SimpleNamespace(here=np.random.default_rng(1))]}),
    "slots": lambda: Slots(random.Random(1)),
    "class": lambda: OfClass(None),
    "module": lambda: OfModule(None),
    "closure": lambda: Function(closure()),
    "partial": lambda: Function(partial(permuted, random.Random(2))),
    "counting": Counting,
    "late": Late,
    "list": lambda: InPlace(list),
    "array": lambda: InPlace(lambda numbers: np.array(numbers)),
    "tensor": lambda: InPlace(lambda numbers: torch.tensor(numbers)),
}


class Seen(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch[2].tolist()
        return super().training_step(batch, batch_idx)


def data() -> Dataset[Any]:
    return TensorDataset(torch.zeros(SAMPLES, 4), torch.zeros(SAMPLES, 1), torch.arange(SAMPLES))


def seen(folder: Path, loader: DataLoader[Any], steps: int, ckpt_path: str | None = None, **options: Any) -> list[int]:
    checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=100)
    module = Seen()
    quiet(max_steps=steps, callbacks=[checkpoint], enable_checkpointing=True, default_root_dir=folder, **options).fit(
        module, loader, ckpt_path=ckpt_path
    )
    return module.seen


def check(make: Any, folder: Path, **options: Any) -> None:
    """Check that runs that stop at the end of an epoch, or in the next, go on with the samples of an unbroken run."""
    unbroken = seen(folder / "unbroken", make(), 12, **options)
    for steps in (4, 6):
        broken = seen(folder / str(steps), make(), steps, **options)
        assert broken + seen(folder / str(steps), make(), 12, "last", **options) == unbroken, steps
    epochs = [unbroken[first : first + SAMPLES] for first in (0, SAMPLES, 2 * SAMPLES)]
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    check(lambda: DataLoader(data(), 4, sampler=SAMPLERS[kind]()), tmp_path)


def test_batch_samplers_go_on_where_they_were(tmp_path: Path) -> None:
    check(lambda: DataLoader(data(), batch_sampler=Batches(np.random.default_rng())), tmp_path / "own")
    inside = Own(random.Random(1))
    check(lambda: DataLoader(data(), batch_sampler=BatchSampler(inside, 4, False)), tmp_path / "around another")


IN_A_LIST = [random.Random(5)]
COUNTS = {"epochs": 0}


def helper() -> list[int]:
    return IN_A_LIST[0].sample(range(SAMPLES), SAMPLES)


class Holder:
    def __init__(self) -> None:
        self.epochs = 0

    def next(self) -> int:
        self.epochs += 1
        return self.epochs


def forever() -> Iterator[int]:
    yield from itertools.count()


def counted(number: int) -> list[int]:
    return random.Random(number).sample(range(SAMPLES), SAMPLES)


def of_pcg(bits: np.random.PCG64) -> list[int]:
    return counted(int(bits.random_raw()))


def in_a_module() -> int:
    COUNTS["epochs"] += 1
    return COUNTS["epochs"]


def appended(things: Any) -> int:
    (things.add if isinstance(things, set) else things.append)(len(things))
    return len(things)


def of_weak_key(holders: Any, key: Holder) -> list[int]:
    return counted(holders.setdefault(key, Holder()).next())


HIDDEN: dict[str, Callable[[], Callable[[], list[int]]]] = {
    "a generator in a helper": lambda: helper,
    "a bare PCG64": lambda: partial(of_pcg, np.random.PCG64(1)),
    "a generator made in __iter__": lambda: lambda: permuted(np.random.default_rng()),
    "the clock": lambda: lambda: counted(time.monotonic_ns()),
    "a dict": lambda: partial(lambda counts: counted(appended(counts["drawn"])), {"drawn": []}),
    "an object": lambda: partial(lambda holder: counted(holder.next()), Holder()),
    "a tuple": lambda: partial(lambda pair: counted(appended(pair[1])), (0, [])),
    "a set": lambda: partial(lambda numbers: counted(appended(numbers)), set()),
    "a deque": lambda: partial(lambda numbers: counted(appended(numbers)), deque()),
    "itertools.count": lambda: partial(lambda numbers: counted(next(numbers)), itertools.count()),
    "a generator function": lambda: partial(lambda numbers: counted(next(numbers)), forever()),
    "a dict of a module": lambda: lambda: counted(in_a_module()),
    "a function's attribute": lambda: lambda: counted(appended(vars(helper).setdefault("epochs", []))),
    "a weak key": lambda: partial(of_weak_key, WeakKeyDictionary(), Holder()),
}
"""Orders drawn from state of places that are not looked into."""


class Stated(Own):
    """Saves its hidden state itself."""

    def __init__(self) -> None:
        super().__init__({"drawn": [0]})

    def __iter__(self) -> Iterator[int]:
        self.rng["drawn"][0] += 1
        return iter(counted(self.rng["drawn"][0]))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.rng["drawn"][0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng["drawn"][0] = state["drawn"]


class OfEpoch(Own):
    def set_epoch(self, epoch: int) -> None:
        self.rng["epoch"] = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(counted(self.rng["epoch"]))


def note(sampler: Any, **options: Any) -> str:
    given = {"batch_sampler": sampler} if options.pop("batches", False) else {"sampler": sampler, "batch_size": 4}
    loader = DataLoader(data(), **given)
    return make_batch_loader(loader, rank=options.get("rank", 0), world_size=2, seed=1, training=True).note or ""


@pytest.mark.parametrize("kind", HIDDEN)
def test_state_that_is_not_found_is_reported_before_the_run(kind: str) -> None:
    sampler = Function(HIDDEN[kind]())
    assert "resume will not be exact: Function keeps state that is not found" in note(sampler)
    assert note(sampler, rank=1) == ""  # once


def test_the_samplers_are_as_before_when_they_have_been_tried(capfd: pytest.CaptureFixture[str]) -> None:
    class Prints(Counting):
        def __iter__(self) -> Iterator[int]:
            print("iterated")
            return super().__iter__()

    sampler, counts = Prints(), dict(COUNTS)
    assert note(sampler) == ""
    note(Function(HIDDEN["a dict of a module"]()))
    assert (sampler.epochs, COUNTS, capfd.readouterr().out) == (0, counts, "")


def test_of_exact_samplers_nothing_is_reported() -> None:
    exact = [*(make() for make in SAMPLERS.values()), Stated(), OfEpoch({"epoch": 0}), range(SAMPLES), [3, 1, 2]]
    assert {note(sampler) for sampler in exact} == {""}
    assert note(Batches(np.random.default_rng()), batches=True) == ""


def test_a_sampler_that_hangs_or_fails_is_tried_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_check, "_LONGEST_S", 0.3)
    assert note(Function(lambda: time.sleep(3600))) == note(Function(lambda: 1 / 0)) == ""


def test_a_sampler_with_a_state_dict_goes_on_where_it_was(tmp_path: Path) -> None:
    check(lambda: DataLoader(data(), 4, sampler=Stated()), tmp_path / "sampler")
    check(lambda: DataLoader(data(), batch_sampler=BatchSampler(Stated(), 4, False)), tmp_path / "around another")


class Loader(DataLoader[Any]):
    """A subclass, which is iterated as it is."""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_loaders_that_are_iterated_as_they_are(tmp_path: Path) -> None:
    check(lambda: Loader(data(), 4, sampler=Own(np.random.default_rng())), tmp_path / "subclass")
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    words = "or a sampler with a random generator, which is not in its state"
    for sampler, reported in ((Own(np.random.default_rng()), True), (None, False)):
        loader = make_batch_loader(stateful(data(), 4, sampler=sampler), rank=0, world_size=1, seed=1, training=True)
        assert (words in (loader.note or "")) is reported


def test_generators_of_others_are_left_alone() -> None:
    class Around(Own):
        def __init__(self, dataset: Any) -> None:
            self.data_source, self.all = dataset, [np.random.mtrand._rand, torch.default_generator]  # type: ignore[attr-defined]

    dataset: Any = data()
    dataset.rng = random.Random(1)
    sampler = Around(dataset)
    sampler.me = sampler  # type: ignore[attr-defined]
    assert own_generators(sampler) == []


def test_a_child_is_read_from_a_process_with_many_open_files() -> None:
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, 1500)  # select.select takes descriptors up to 1023
    os.write(write, b"order")
    for descriptor in (read, write):
        os.close(descriptor)
    assert sampler_check._read(high) == b"order"
    os.close(high)


def prune(sampler: Any) -> None:
    sampler.indices = sampler.indices[2:]


def weigh_less(sampler: Any) -> None:
    sampler.weights[:5] *= 0.3  # in place, as a module does to its own buffer


@pytest.mark.parametrize("taken", [2, None], ids=["within", "at the end"])
@pytest.mark.parametrize(
    ("sampler", "change"),
    [
        (lambda: SubsetRandomSampler([*range(20)]), prune),
        (lambda: WeightedRandomSampler(torch.ones(20, dtype=torch.float64), 20), weigh_less),
    ],
)
def test_indices_and_weights_of_torchs_samplers_are_restored(sampler: Any, change: Any, taken: int | None) -> None:
    def made() -> Any:
        return make_batch_loader(
            DataLoader([*range(20)], 4, sampler=sampler()), rank=0, world_size=1, seed=1, training=True
        )

    def epoch(loader: Any, number: int, start: int = 0) -> Iterator[Any]:
        loader.measure(number, start)
        return (batch.data.tolist() for batch in loader.iterate(number, start))

    before, after = made(), made()
    weights = after.sampler.sampler.weights if change is weigh_less else None
    list(epoch(before, 0))
    change(before.sampler.sampler)
    batches = epoch(before, 1)
    list(itertools.islice(batches, taken))
    change(before.sampler.sampler)  # the order in progress stays
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    rest = list(batches) if taken else []
    if taken:
        assert list(epoch(after, 1, taken)) == rest
    for number in (2, 3):
        assert list(epoch(after, number)) == list(epoch(before, number))
        change(before.sampler.sampler)
        change(after.sampler.sampler)
    assert weights is None or after.sampler.sampler.weights is weights
