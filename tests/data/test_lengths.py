"""A loader that gives fewer or more batches than its length is an error on the process where it does, never a hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.helpers.processes import fork_ranks
from tests.helpers.strategy_models import FEATURES, MLP
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.data.adapters import make_batch_loader

SAMPLES, BATCH = 16, 2


def sample(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((FEATURES,), index / SAMPLES), torch.tensor(index / SAMPLES)


class Items:
    """Gives `given` items, and says that there are `length`."""

    def __init__(self, given: int, length: int) -> None:
        self.given, self.length = given, length

    def __len__(self) -> int:
        return self.length

    def items(self) -> Iterator[Any]:
        return iter(range(self.given))

    def __iter__(self) -> Iterator[Any]:
        return self.items()


class Indices(Items, Sampler[Any]):
    def items(self) -> Iterator[Any]:
        return (index % SAMPLES for index in range(self.given))


class LaterWrong(Indices):
    """Gives other indices on rank 1, but not in the forked copy in which its order is tried before the run."""

    def __init__(self, more: int) -> None:
        super().__init__(SAMPLES, SAMPLES)
        self.more = more

    def items(self) -> Iterator[Any]:
        wrong = os.environ["RANK"] == "1" and os.environ["RANK_PID"] == str(os.getpid())
        given = self.given + (self.more if wrong else 0)
        return (index % SAMPLES for index in range(given))


class Batches(Items, Sampler[Any]):
    def items(self) -> Iterator[Any]:
        return ([index % SAMPLES, (index + 1) % SAMPLES] for index in range(self.given))


class Stream(Items, IterableDataset[Any]):
    def items(self) -> Iterator[Any]:
        return map(sample, range(self.given))


class Iterable(Items):
    def items(self) -> Iterator[Any]:
        return iter(DataLoader(Samples()[: self.given * BATCH], BATCH))


class Samples(Dataset[Any]):
    """A dataset that raises StopIteration from an index on."""

    def __init__(self, stop: int = SAMPLES) -> None:
        self.stop = stop

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [sample(one) for one in range(index.stop)]
        return sample(index) if index < self.stop else next(iter(()))


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


FULL = SAMPLES // BATCH


def a_loader(kind: str, off: int, **options: Any) -> Any:
    """Return a loader whose length is wrong by `off` batches."""
    if kind == "iterable":
        return Iterable(FULL + off, FULL)
    if kind == "stream":
        return DataLoader(Stream(SAMPLES + off * BATCH, SAMPLES), BATCH, **options)
    if kind == "sampler":
        return DataLoader(Samples(), BATCH, sampler=Indices(SAMPLES + off * BATCH, SAMPLES), **options)
    if kind == "sampler on one":
        return DataLoader(Samples(), BATCH, sampler=LaterWrong(off * BATCH), **options)
    if kind == "batch sampler":
        return DataLoader(Samples(), batch_sampler=Batches(FULL + off, FULL), **options)
    assert kind == "dataset"
    return DataLoader(Samples(SAMPLES + off * BATCH), BATCH, **options)


def given_by(loader: Any, training: bool = True, start: int = 0, limit: int | None = None) -> int:
    made = make_batch_loader(loader, rank=0, world_size=1, seed=1, training=training, limit=limit)
    return start + sum(1 for _ in made.iterate(0, start))


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["iterable", "stream", "sampler", "batch sampler"])
def test_fewer_and_more_than_the_length_are_reported(kind: str, training: bool, start: int) -> None:
    assert given_by(a_loader(kind, 0), training, start) == FULL
    with raises_recorded(ConfigError):
        given_by(a_loader(kind, -2), training, start)
    with raises_recorded(ConfigError):
        given_by(a_loader(kind, 1), training, start)


@pytest.mark.parametrize("kind", ["iterable", "sampler", "batch sampler"])
def test_a_limit_within_what_there_is_makes_the_length_right(kind: str) -> None:
    assert given_by(a_loader(kind, -2), limit=FULL - 2) == FULL - 2
    assert given_by(a_loader(kind, 5), limit=FULL) == FULL


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sampler", [None, Endless()])
def test_stop_iteration_of_a_dataset_is_reported(workers: int, sampler: Any) -> None:
    loader = DataLoader(Samples(9), BATCH, sampler=sampler, num_workers=workers)
    # A worker puts its traceback before the message.
    with pytest.raises(ConfigError, match=r"raised StopIteration for the indices .*8.*9.*next\(iterator, None\)"):
        given_by(loader)


class PartOfEach(Stream):
    """A stream of which each worker takes its part."""

    def items(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        return map(sample, range(info.id, self.given, info.num_workers))


def test_each_worker_of_a_stream_may_have_a_short_batch() -> None:
    """10 samples in two workers are 2 x 3 batches of 2; the DataLoader's length is 5."""
    assert given_by(DataLoader(PartOfEach(10, 10), BATCH, num_workers=2)) == 6
    with raises_recorded(ConfigError):
        given_by(DataLoader(PartOfEach(4, 10), BATCH, num_workers=2))


# -- one of two processes ----------------------------------------------------------------------------------------------

ON_ONE_RANK = {
    "ddp": ("train", "sampler on one", 3, "the training loader gave more than 4 batches"),
    "fsdp": ("val", "dataset", -2, "Samples raised StopIteration"),
    "deepspeed_stage_2": ("train", "iterable", -2, "the training loader gave only 6 batches, and its length is 8"),
    "deepspeed_stage_3": (
        "val",
        "sampler on one",
        -2,
        "the evaluation loader gave only 3 batches, and its length is 4",
    ),
}


def fit(strategy: str) -> None:
    os.environ["RANK_PID"] = str(os.getpid())
    where, kind, off, _ = ON_ONE_RANK[strategy]
    wrong = a_loader(kind, off if "on one" in kind or os.environ.get("RANK") == "1" else 0)
    train, val = (wrong, None) if where == "train" else (a_loader("dataset", 0), wrong)
    trainer = quiet(strategy=strategy, devices=2, max_epochs=1, watchdog_seconds=100)
    trainer.fit(MLP(), train, val)


def test_a_process_whose_loader_is_wrong_ends_the_run_with_a_message_on_every_strategy() -> None:
    Path("train.py").write_text("import sys\nfrom tests.data.test_lengths import fit\nfit(sys.argv[1])\n")
    running = {strategy: fork_ranks("train.py", strategy) for strategy in ON_ONE_RANK}
    try:
        for strategy, (*_, expected) in ON_ONE_RANK.items():
            output = running[strategy].wait().check(1).stderr
            assert "rank 1 of 2 failed" in output, output
            assert expected in output, output
            assert "the run hangs" not in output, output
    finally:
        for one in running.values():
            one.kill()
