"""Worker processes end with the stage that started them."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.processes import run_python
from tests.helpers.toy import Toy, quiet

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, in torchdata


class Numbers(Dataset[Any]):
    """Twelve samples. Loading the first collects garbage, which a worker inherits from the process that forked it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            gc.collect()
        return torch.full((4,), float(index)), torch.zeros(1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from map(Numbers().__getitem__, range(12))


class OwnLoader(DataLoader[Any]):
    """A subclass, which is used as it is."""


class Both:
    """Two loaders together, as an iterable of the user's own."""

    def __init__(self, **options: Any) -> None:
        self.one, self.other = DataLoader(Numbers(), **options), DataLoader(Numbers(), **options)

    def __iter__(self) -> Iterator[Any]:
        yield from (one for one, _ in zip(self.one, self.other, strict=True))


def stateful(**options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Numbers(), **options)


LOADERS: dict[str, Callable[..., Any]] = {
    "plain": lambda **options: DataLoader(Numbers(), **options),
    "stream": lambda **options: DataLoader(Stream(), **options),
    "subclass": lambda **options: OwnLoader(Numbers(), **options),
    "stateful": stateful,
    "two together": Both,
}


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return lambda: LOADERS[request.param](batch_size=3, num_workers=1, persistent_workers=True)


def workers() -> int:
    return len(multiprocessing.active_children())


class FailsLate(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


def test_persistent_workers_end_with_each_stage(make: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    module, train, val = Toy(), make(), make()
    for _ in range(2):
        quiet(max_epochs=2, limit_val_batches=2).fit(module, train, val)
        assert workers() == 0
    trainer = quiet()
    assert "val_loss" in trainer.validate(module, val)[0]
    assert workers() == 0
    trainer.test(module, val)
    assert workers() == 0
    trainer.predict(module, val)
    assert workers() == 0
    assert "can only test a child process" not in capfd.readouterr().err


GARBAGE = """
import gc, torch, torch.distributed as dist
from tests.data.test_worker_lifetime import LOADERS
from tests.helpers.toy import Toy, quiet

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
kept = {"group": dist.distributed_c10d._get_default_group()}
kept["itself"] = kept
dist.destroy_process_group()
del kept
quiet(max_epochs=1).fit(Toy(), LOADERS["plain"](batch_size=3, num_workers=1))
"""


def test_a_worker_leaves_the_garbage_of_its_parent_alone(tmp_path: Path) -> None:
    """The worker collects garbage (see Numbers). A process group without its threads would make it hang."""
    run_python(GARBAGE, cwd=tmp_path, timeout=60).check(0)


HANGS = """
import os, time, torch.distributed as dist
from tests.data.test_worker_lifetime import LOADERS
from tests.helpers.toy import Toy, quiet
from trainer.data import worker_processes

forks = []
os.register_at_fork(before=lambda: forks.append(1), after_in_child=lambda: len(forks) == 2 and time.sleep(3600))
worker_processes._FORK_HANGS, worker_processes._BEGIN_S = True, 1.0
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
quiet(max_epochs=1).fit(Toy(), LOADERS["plain"](batch_size=3, num_workers=2))
dist.destroy_process_group()
assert len(forks) > 2
"""


def test_a_worker_that_hangs_in_its_fork_is_started_again(tmp_path: Path) -> None:
    run_python(HANGS, cwd=tmp_path, timeout=60).check(0)


def test_they_persist_from_epoch_to_epoch() -> None:
    seen = []

    class Watched(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append({child.pid for child in multiprocessing.active_children()})
            return super().training_step(batch, batch_idx)

    loader = LOADERS["plain"](batch_size=3, num_workers=1, persistent_workers=True)
    quiet(max_epochs=2).fit(Watched(), loader)
    assert len(seen) == 8
    assert len(set.union(*seen)) == 1


@pytest.mark.parametrize("kind", ["plain", "stream", "subclass", "stateful"])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_an_error_that_is_kept(kind: str, persistent: bool, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"batch_size": 3, "num_workers": 1, "persistent_workers": persistent}
    with pytest.raises(ArithmeticError) as kept:
        quiet(max_epochs=1).fit(FailsLate(), LOADERS[kind](**options), LOADERS[kind](**options))
    assert workers() == 0
    del kept
    quiet(max_epochs=1).fit(Toy(), LOADERS[kind](**options), LOADERS[kind](**options))
    assert workers() == 0
    assert "can only test a child process" not in capfd.readouterr().err


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_a_stop(persistent: bool) -> None:
    class Stops(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.stop("enough")
            return super().training_step(batch, batch_idx)

    options = {"batch_size": 3, "num_workers": 1, "persistent_workers": persistent}
    quiet(max_epochs=1).fit(Stops(), LOADERS["plain"](**options), LOADERS["plain"](**options))
    assert workers() == 0
