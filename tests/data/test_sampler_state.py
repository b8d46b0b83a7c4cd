"""Samplers with generators, counters and lists of their own give the same order after a resume."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset

from tests.helpers.toy import Toy, quiet
from trainer.callbacks import ModelCheckpoint
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
    """Check that runs that stop at the end of an epoch, or in the next one, go on with the samples of a whole run."""
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


class Loader(DataLoader[Any]):
    """A subclass, which is iterated as it is."""


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_loaders_that_are_iterated_as_they_are(tmp_path: Path) -> None:
    check(lambda: Loader(data(), 4, sampler=Own(np.random.default_rng())), tmp_path / "subclass")
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    words = (
        "resume will not be exact: the sampler of the StatefulDataLoader over TensorDataset holds a random generator"
    )
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
