"""Loaders of the Engine that are set up again in a loop, left early or cycled: killed at each save, they go on."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.messages import raises_recorded
from trainer import ConfigError, Engine

CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "seed": 7}
EPOCHS = 3


class KilledError(Exception):
    """Ends a program after a save."""


def numbers(first: int, samples: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(first), first + samples)), batch_size=4, shuffle=True)


class Loop:
    """A program of a user: it saves after each step, or after epochs, and is killed after save number `stop`."""

    def __init__(self, engine: Engine, path: Path, stop: int | None) -> None:
        torch.manual_seed(3)
        self.engine, self.path, self.stop, self.saves = engine, path, stop, 0
        self.net = nn.Linear(1, 1)
        self.model, self.optimizer = engine.setup(self.net, SGD(self.net.parameters(), lr=1e-4))
        self.state = {"model": self.model, "optimizer": self.optimizer, "epoch": 0, "seen": []}

    def step(self, *batches: Any) -> None:
        inputs = torch.cat([one for (one,) in batches])[:, None]
        self.optimizer.zero_grad()
        self.engine.backward(mse_loss(self.model(inputs), inputs))
        self.optimizer.step()
        self.state["seen"].append([self.state["epoch"], *inputs.flatten().tolist()])

    def save(self) -> None:
        self.engine.save(self.path, self.state)
        self.saves += 1
        if self.saves == self.stop:
            raise KilledError

    def through(self, loader: Any) -> None:
        for batch in loader:
            self.step(batch)
            self.save()

    def end_epoch(self) -> None:
        self.state["epoch"] += 1
        self.save()

    def evaluate(self) -> None:
        held_out = self.engine.setup_dataloaders(numbers(500), training=False)
        with torch.no_grad():
            self.state["seen"].append([-1.0, *torch.cat([one for (one,) in held_out]).tolist()])

    @property
    def epochs(self) -> range:
        return range(self.state["epoch"], EPOCHS)


def fixed(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        loop.through(data)
        loop.end_epoch()


def of_a_variable(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        loader = loop.engine.setup_dataloaders(numbers(0))
        loop.through(loader)
        loop.end_epoch()


def of_no_variable(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        for batch in loop.engine.setup_dataloaders(numbers(0)):
            loop.step(batch)
            loop.save()
        loop.end_epoch()


def of_a_helper_and_a_cycle(loop: Loop, data: Any) -> None:
    def make(first: int) -> Any:
        return loop.engine.setup_dataloaders(numbers(first))

    class Holder:
        def __init__(self) -> None:
            self.itself, self.loader = self, make(0)

    for _ in loop.epochs:
        holder = Holder()
        loop.through(holder.loader)
        loop.end_epoch()


def with_evaluation(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        loop.through(data)
        loop.evaluate()
        loop.end_epoch()


def one_after_the_other(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        for first in (0, 100):
            loop.through(loop.engine.setup_dataloaders(numbers(first)) if first else data)
        loop.through(loop.engine.setup_dataloaders(numbers(200, 20)))
        loop.end_epoch()


def together(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        first, second = (loop.engine.setup_dataloaders(numbers(number)) for number in (0, 100))
        for pair in zip(first, second, strict=True):
            loop.step(*pair)
            loop.save()
        loop.end_epoch()


def in_phases(loop: Loop, data: Any) -> None:
    while loop.state["epoch"] < 2:
        warm = loop.engine.setup_dataloaders(numbers(0))
        loop.through(warm)
        loop.end_epoch()
    while loop.state["epoch"] < 4:
        fine = loop.engine.setup_dataloaders(numbers(0))
        loop.through(fine)
        loop.end_epoch()


def limited(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        for batch in data:
            loop.step(batch)
            if data.batch == 2:
                break
            loop.save()
        loop.end_epoch()


def cycled(loop: Loop, data: Any) -> None:
    for _ in loop.epochs:
        for pair in data:
            loop.step(pair["labeled"], pair["unlabeled"])
            loop.save()
        loop.end_epoch()


def given(program: Callable[..., None]) -> Any:
    return {"labeled": numbers(100, 8), "unlabeled": numbers(0, 20)} if program is cycled else numbers(0)


def run(program: Callable[..., None], path: Path, stop: int | None = None, resume: bool = False) -> Any:
    """Return weights and samples, or None if it was killed after save number `stop`."""
    with Engine(**CPU) as engine:
        loop = Loop(engine, path, stop)
        data = engine.setup_dataloaders(given(program)) if program in OF_ONE_LOADER else None
        if resume:
            engine.load(path, loop.state)
        try:
            program(loop, data)
        except KilledError:
            return None
        return {"seen": loop.state["seen"], **loop.net.state_dict(), "saves": loop.saves}


OF_ONE_LOADER = [fixed, with_evaluation, one_after_the_other, limited, cycled]
PROGRAMS = [*OF_ONE_LOADER, of_a_variable, of_no_variable, of_a_helper_and_a_cycle, together, in_phases]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loop_killed_at_any_save_goes_on_with_the_same_bits(program: Callable[..., None], tmp_path: Path) -> None:
    gc.disable()  # a collection may come at any time
    try:
        whole = run(program, tmp_path / "whole")
    finally:
        gc.enable()
    saves = whole.pop("saves")
    for stop in range(1, saves, 1 + saves // 4):
        path = tmp_path / str(stop)
        assert run(program, path, stop) is None
        assert run(program, path, stop=2, resume=True) is None or stop > saves - 2
        resumed = run(program, path, resume=True)
        del resumed["saves"]
        assert_same_bits(resumed, whole)


def test_a_loader_that_is_set_up_again_draws_what_one_loader_would(tmp_path: Path) -> None:
    assert run(of_a_variable, tmp_path / "a")["seen"] == run(fixed, tmp_path / "b")["seen"]
    seen = run(of_no_variable, tmp_path / "c")["seen"]
    assert len({tuple(map(tuple, seen[3 * epoch : 3 * epoch + 3])) for epoch in range(EPOCHS)}) == EPOCHS


def test_loaders_that_are_gone_are_not_kept() -> None:
    with Engine(**CPU) as engine:
        workers = []
        for _ in range(2):
            data = DataLoader(TensorDataset(torch.zeros(8)), batch_size=4, num_workers=1, persistent_workers=True)
            loader = engine.setup_dataloaders(data, training=False)
            assert len([*loader]) == 2
            (worker,) = loader._loader._loader._iterator._workers
            workers.append(worker)
            known = weakref.ref(loader)
            del loader, data
            assert known() is None
        assert not any(worker.is_alive() for worker in workers)
        assert len(engine.loaders.positions) == 1


@pytest.mark.parametrize("program", ["fixed", "set up again"])
def test_a_run_goes_back_with_a_loader_that_is_set_up_again(program: str, tmp_path: Path) -> None:
    with Engine(**CPU) as engine:
        loop = Loop(engine, tmp_path / "one", None)
        kept = engine.setup_dataloaders(numbers(0)) if program == "fixed" else None
        back, seen = False, []
        while loop.state["epoch"] < 2:
            data = kept or engine.setup_dataloaders(numbers(0))
            for batch in data:
                loop.step(batch)
                seen.append((loop.state["epoch"], data.batch))
                if len(seen) == 4:
                    loop.save()
                if len(seen) == 5:
                    back = True
                    break
            if back:
                rest = loop.state["seen"][4:]
                engine.load(tmp_path / "one", loop.state)
                back = False
                continue
            loop.state["epoch"] += 1
        assert seen == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 2), (1, 3)]
        assert loop.state["seen"][4:5] == rest


def test_a_look_at_each_loader_of_one_line_takes_no_place() -> None:
    with Engine(**CPU) as engine:
        loaders = []
        for first in (0, 100):
            loaders.append(engine.setup_dataloaders(numbers(first)))
            assert len(next(iter(loaders[-1]))[0]) == 4
        assert [len([*one]) for one in loaders] == [3, 3]


def test_loaders_that_are_kept() -> None:
    with Engine(**CPU) as engine:
        net = nn.Linear(1, 1)
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        held_out, training = [], []
        for _ in range(2):
            held_out.append(engine.setup_dataloaders(numbers(0), training=False))
            training.append(engine.setup_dataloaders(numbers(0)))
            for (batch,) in training[-1]:
                engine.backward(model(batch[:, None]).mean())
                optimizer.step()
            assert all(len([*one]) == 3 for one in held_out)
        with raises_recorded(ConfigError):
            iter(training[0])


def test_a_checkpoint_without_the_places_of_calls_goes_by_order(tmp_path: Path) -> None:
    def loaders(engine: Engine) -> Any:
        net = nn.Linear(1, 1)
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        return {"model": model, "optimizer": optimizer}, *engine.setup_dataloaders(numbers(0), numbers(100))

    with Engine(**CPU) as engine:
        state, first, second = loaders(engine)
        next(batches := iter(second))
        assert len([*first]) == 3
        engine.save(tmp_path / "one", state)
        rest = [one.tolist() for (one,) in batches]
    with Engine(**CPU) as engine:
        state, first, second = loaders(engine)  # other lines
        extra = engine.setup_dataloaders(numbers(500), training=False)
        engine.load(tmp_path / "one", state)
        assert (first.epoch, second.epoch, second.batch, extra.epoch) == (1, 0, 1, 0)
        assert [one.tolist() for (one,) in second] == rest


def test_a_loader_that_another_line_sets_up_after_a_load_is_told_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def epochs(saves: bool, loads: bool, again: bool, moved: bool) -> int:
        with Engine(**CPU) as engine:
            net = nn.Linear(1, 1)
            model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
            state = {"model": model, "optimizer": optimizer}
            data = None if moved else engine.setup_dataloaders(numbers(0))
            if loads:
                engine.load(tmp_path / "one", state)
            if again:
                data = engine.setup_dataloaders(numbers(0))
            assert data is not None
            before = data.epoch
            if saves:
                assert len([*data]) == 3
                engine.save(tmp_path / "one", state)
            return before

    epochs(saves=True, loads=False, again=False, moved=False)
    assert epochs(saves=False, loads=True, again=True, moved=False) == 0
    (said,) = (text for text in caplog.messages if "begins with epoch 0" in text)
    assert "Set it up before engine.load, once" in said
    caplog.clear()
    assert epochs(saves=False, loads=True, again=False, moved=False) == 1  # as it says
    epochs(saves=True, loads=False, again=True, moved=True)
    assert epochs(saves=False, loads=True, again=True, moved=True) == 1
    assert "begins with epoch 0" not in caplog.text


@pytest.mark.parametrize("how", ["enumerate", "islice", "zip"])
def test_a_save_after_a_loop_was_left_says_once_how_to_count(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "trainer")
    with Engine(**CPU) as engine:
        loop = Loop(engine, tmp_path / "one", None)
        data, shorter = engine.setup_dataloaders(numbers(0), numbers(100, 8))

        def read() -> Iterator[Any]:
            if how == "enumerate":
                for number, batch in enumerate(data):
                    if number == 2:
                        return
                    yield batch
            elif how == "islice":
                yield from islice(data, 2)
            else:
                yield from (pair[0] for pair in zip(data, shorter, strict=False))

        for _ in range(3):
            for batch in read():
                loop.step(batch)
                loop.save()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (how != "zip")
    assert all("count by loader.batch" in one for one in said)
