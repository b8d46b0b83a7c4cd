"""ModelCheckpoint writes to object stores, and refuses the folder of another run."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.helpers.processes import run_distributed, start_python
from tests.helpers.saving import At, SavedPaths, fit, steps, there
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer
from trainer.callbacks import BadStepGuard, EarlyStopping, ModelCheckpoint
from trainer.checkpoint.disk import this_machine
from trainer.checkpoint.manifest import is_committed, verify_checkpoint
from trainer.errors import CheckpointError
from trainer.fault_tolerance.file_lock import NAME, FolderLock
from trainer.loop import setup
from trainer.runs.run_directory import locked_folders

# -- elsewhere ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    return "memory://bucket/run"


@pytest.mark.parametrize("async_save", [False, True])
def test_checkpoints_in_an_object_store(async_save: bool, memory: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dirpath": memory, "async_save": async_save, "monitor": "train_loss"}
    run: dict[str, Any] = {"default_root_dir": tmp_path / "runs", "ckpt_path": "last"}
    first, saved = steps(**options), SavedPaths()
    trainer = fit([saved, first], max_steps=4, **run)
    assert list(first.kept) == there(memory)
    assert there(memory)[-1] == "step=4"
    assert first.last_model_path == f"{memory}/step=4"
    assert [name for name, _ in saved.paths] == ["step=1", "step=2", "step=3", "step=4"]
    second = steps(**options)
    again = fit([second], **run)
    assert (again.global_step, again.run_dir) == (6, trainer.run_dir)
    assert again.run_dir.parent == tmp_path / "runs"
    assert list(second.kept) == there(memory)
    assert not Path(memory).exists()
    assert not (trainer.run_dir / "checkpoints").exists()
    module = Toy.load_from_checkpoint(second.last_model_path)
    assert torch.equal(module.layer.weight, again.module.layer.weight.detach())  # type: ignore[operator,union-attr]
    quiet().validate(Toy(), loader(2), ckpt_path=second.best_model_path)
    with raises_recorded(ConfigError):
        quiet().validate(Toy(), loader(2), ckpt_path=f"{memory}/none")


class Begins(Callback):
    """Record the steps at which runs begin."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize("second_place", ["b", None], ids=["its own folder", "the run directory"])
@pytest.mark.parametrize(("every", "step"), [((2, 3), 3), ((3, 2), 3), ((1, 1), 3), ((2, 2), 2)], ids=str)
def test_the_newest_of_several_is_the_last(
    every: tuple[int, int], step: int, second_place: str | None, tmp_path: Path
) -> None:
    """After an error in the fourth step each goes on with all of its own checkpoints."""
    begins = Begins()

    def fails(trainer: Trainer) -> None:
        raise ArithmeticError

    def run(*others: Callback) -> None:
        places = tmp_path / "a", second_place and tmp_path / second_place
        both = [
            steps(dirpath=place, every_n_train_steps=n, save_top_k=-1, monitor=monitor)
            for place, n, monitor in zip(places, every, ("train_loss", None), strict=True)
        ]
        trainer = fit([*others, *both], default_root_dir=tmp_path / "runs", ckpt_path="last")
        for one, place in zip(both, places, strict=True):
            assert sorted(one.kept) == sorted(there(place or trainer.run_dir / "checkpoints"))

    with pytest.raises(ArithmeticError):
        run(At(step4=fails))
    for manifest in (tmp_path / "a").glob("*/manifest.json"):
        os.utime(manifest)  # committed after the other's, as an asynchronous one may be
    run(begins)
    assert begins.steps == [step]


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("places", ["ab", "a", "b"])
@pytest.mark.parametrize("written", [True, False])
def test_the_last_is_of_the_run_that_wrote_last_though_only_one_of_several_has(
    written: bool, places: str, order: str, tmp_path: Path
) -> None:
    begins = Begins()

    def run(*others: Callback, ckpt_path: Any) -> Trainer:
        both = [
            steps(dirpath=tmp_path / name if name in places else None, every_n_train_steps=every[name], save_top_k=-1)
            for name in order
        ]
        return fit([*others, *both], default_root_dir=tmp_path / "runs", ckpt_path=ckpt_path)

    def end(trainer: Trainer) -> None:
        raise ArithmeticError

    every = {"a": 2, "b": 3}
    first = run(ckpt_path=None)
    folder = tmp_path / "a" if "a" in places else first.run_dir / "checkpoints"
    with pytest.raises(ArithmeticError):  # when only "b" has written, or none
        run(At(**{"step4" if written else "step3": end}), ckpt_path=folder / "step=2")
    run(begins, ckpt_path="last")
    assert begins.steps == [3 if written else 6]


def test_the_root_of_a_store_is_a_folder(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"default_root_dir": "runs", "ckpt_path": "last"}
    checkpoint = steps(dirpath="memory://")
    fit([checkpoint], max_steps=4, **options)
    assert checkpoint.last_model_path == "memory://step=4"
    assert fit([steps(dirpath="memory://")], **options).global_step == 6
    assert [one.name for one in tmp_path.iterdir()] == ["runs"]


def test_a_folder_under_two_names_is_one(tmp_path: Path) -> None:
    """Of two callbacks in it, the first one with a monitor has "best", and both go on."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    def both() -> list[ModelCheckpoint]:
        lowest = steps(dirpath=tmp_path / "real", filename="a-{step}", monitor="train_loss", save_top_k=1)
        highest = {"monitor": "train_loss", "mode": "max", "save_top_k": 1}
        return [lowest, steps(dirpath=tmp_path / "link", filename="b-{step}", **highest)]

    options: dict[str, Any] = {"default_root_dir": tmp_path / "runs", "ckpt_path": "last"}
    lowest, highest = both()
    fit([lowest, highest], max_steps=4, **options)
    pointer = json.loads((tmp_path / "real" / "best.json").read_text())
    assert Path(lowest.best_model_path).name == pointer["checkpoint"] != Path(highest.best_model_path).name
    assert fit(both(), **options).global_step == 6


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    checkpoint = steps(dirpath=f"file://{tmp_path}/c")
    fit([checkpoint])
    assert checkpoint.last_model_path == str(tmp_path / "c" / "step=6")
    assert is_committed(tmp_path / "c" / "step=6")


# -- somebody else's ---------------------------------------------------------------------------------------------------

LONG = """
import time
from tests.helpers.saving import At, fit, steps

def wait(trainer):
    print("at step", trainer.global_step, flush=True)
    time.sleep(3600)

fit([At(step3=wait), steps()], default_root_dir="runs")
"""


def test_a_second_run_in_the_same_directory_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    running = start_python(LONG, cwd=tmp_path)
    try:
        running.wait_for("at step 3")
        config = {"default_root_dir": tmp_path / "runs", "ckpt_path": "last"}
        with pytest.raises(ConfigError) as refused:
            fit([steps()], **config)
        assert f"version_0 is in use: process {running.pid} on host " in str(refused.value)
        assert "is training there" in str(refused.value)
        assert "leave ckpt_path='last' out, or give another default_root_dir" in str(refused.value)
        # Another folder can be used, and its checkpoints can be read.
        assert fit([steps()], default_root_dir=tmp_path / "runs").run_dir.name == "version_1"
        quiet().validate(Toy(), loader(2), ckpt_path=tmp_path / "runs/version_0/checkpoints/step=2")
    finally:
        running.send(signal.SIGKILL)
        running.process.wait()
    rmtree(tmp_path / "runs" / "version_1")
    trainer = fit([steps()], **config)
    assert (trainer.run_dir.name, trainer.global_step) == ("version_0", 6)
    assert not (trainer.run_dir / NAME).exists()


def test_a_folder_of_checkpoints_is_for_one_run_too(tmp_path: Path) -> None:
    refused: list[str] = []

    def second(trainer: Trainer) -> None:
        with pytest.raises(ConfigError) as error:
            fit([steps(dirpath=tmp_path / "shared")], default_root_dir=tmp_path / "other")
        refused.append(str(error.value))

    folder = tmp_path / "shared"
    fit([At(step2=second), steps(dirpath=folder), steps(dirpath=folder, filename="also {step}")])
    assert f"{folder} is in use: process" in refused[0]
    assert not (folder / NAME).exists()
    assert list((tmp_path / "other").iterdir()) == []  # the refused run leaves no files


@contextmanager
def ended(kind: type[BaseException]) -> Iterator[None]:
    with pytest.raises(kind):
        yield


def test_the_lock_is_given_back_however_a_run_ends(tmp_path: Path) -> None:
    def fail(trainer: Trainer) -> None:
        assert FolderLock(trainer.run_dir).acquire(timeout=0) is not None
        raise ZeroDivisionError

    with ended(ZeroDivisionError):
        fit([At(step2=fail), steps()], default_root_dir=tmp_path)
    trainer = fit([steps()], default_root_dir=tmp_path, ckpt_path="last")
    assert trainer.run_dir == tmp_path / "version_0"
    lock = FolderLock(trainer.run_dir)
    assert lock.acquire(timeout=0) is None
    lock.release()


def test_a_run_that_goes_on_in_the_folder_until_it_is_locked_is_taken_into_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit([steps(save_top_k=1)], max_steps=2, default_root_dir=tmp_path)
    trained: list[int] = []

    def locked_later(run: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(setup, "locked_folders", locked_folders)
            fit([steps(save_top_k=1)], max_steps=4, default_root_dir=tmp_path, ckpt_path="last")
        return locked_folders(run)

    monkeypatch.setattr(setup, "locked_folders", locked_later)
    note = lambda trainer: trained.append(trainer.global_step)  # noqa: E731
    fit([At(step3=note, step4=note, step5=note, step6=note)], default_root_dir=tmp_path, ckpt_path="last")
    assert trained == [5, 6]


def test_a_trial_locks_nothing(tmp_path: Path) -> None:
    quiet(fast_dev_run=True, default_root_dir=tmp_path).fit(Toy(), loader(2))
    assert list(tmp_path.iterdir()) == []


def test_a_trial_validates_whatever_the_intervals(tmp_path: Path) -> None:
    trainer = quiet(fast_dev_run=True, val_check_interval=250, check_val_every_n_epoch=3, default_root_dir=tmp_path)
    trainer.fit(Toy(), loader(2), loader(2))
    assert trainer.global_step == 1
    assert "val_loss" in trainer.callback_metrics


def test_what_a_killed_run_left_of_its_first_checkpoint_is_deleted_by_the_next_run(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = tmp_path / "version_0" / "checkpoints"
    names = {pid: f".tmp-step=1-{this_machine()}-{pid}-0123abcd" for pid in (ended.pid, os.getppid())}
    for name in names.values():
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(bytes(100))
    trainer = fit([steps()], default_root_dir=tmp_path, ckpt_path="last")
    assert trainer.run_dir.name == "version_1"
    assert [path.name for path in folder.iterdir()] == [names[os.getppid()]]  # of a process that still runs


# -- several callbacks -------------------------------------------------------------------------------------------------


class End(Callback):
    """End the process at a checkpoint of a step, as a kill would: `number` of them are written."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.left = step, number

    def on_checkpoint_saved(self, trainer: Trainer, module: Any, path: str) -> None:
        self.left -= trainer.global_step == self.step
        if not self.left:
            os._exit(0)


@pytest.mark.parametrize("resumed_from", ["last", "a/step=4"])
@pytest.mark.parametrize("written", [1, 2])
@pytest.mark.parametrize("due", [{"every_n_train_steps": 4}, {"every_n_epochs": 1}], ids=["steps", "validations"])
def test_what_a_second_callback_had_not_written_of_a_step_is_written_by_the_resumed_run(
    due: dict[str, Any], resumed_from: str, written: int, tmp_path: Path
) -> None:
    def both() -> list[Callback]:
        first = {"every_n_train_steps": 2, "monitor": "val_loss" if "every_n_epochs" in due else None}
        every: dict[str, Any] = {"a": first, "b": {**due, "save_top_k": -1}}
        return [ModelCheckpoint(dirpath=tmp_path / name, filename="{step}", **one) for name, one in every.items()]

    def run(*more: Callback, ckpt_path: str | None = None) -> None:
        callbacks = [*more, *both()]
        options = {"max_epochs": 1, "val_check_interval": 4, "default_root_dir": tmp_path}
        trainer = quiet(enable_checkpointing=True, callbacks=callbacks, **options)
        trainer.fit(Toy(), loader(8), loader(1) if "every_n_epochs" in due else None, ckpt_path=ckpt_path)

    if not (child := os.fork()):
        try:
            run(End(4, written))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert there(tmp_path / "a") == ["step=4"]
    run(ckpt_path=resumed_from if resumed_from == "last" else str(tmp_path / resumed_from))
    assert [there(tmp_path / name) for name in "ab"] == [["step=8"], ["step=4", "step=8"]]


class EndsOnBoth(ModelCheckpoint):
    """Ends all processes at step 4, as a kill would, after its own write (`written` True) or before; None: never."""

    written: bool | None = None

    def on_train_step_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_step == 4 and self.written is False:
            self._end(trainer)
        super().on_train_step_end(trainer, pl_module)
        if trainer.global_step == 4 and self.written:
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        for one in trainer.checkpoint_callbacks:
            if one._checkpoints.writer is not None:
                one._checkpoints.writer.wait()
        with suppress(Exception):  # the other process may be gone already
            trainer.strategy.barrier()
        os._exit(0)


def _two_on_two(folder: str, strategy: str, async_save: bool, ends: bool | None) -> Any:
    """Train on two processes with two callbacks; `ends`: end at step 4, before (False) or after the second's write."""
    both = [
        EndsOnBoth(f"{folder}/{name}", filename="{step}", async_save=async_save, save_top_k=-1, **options)
        for name, options in (("a", {"every_n_train_steps": 2}), ("b", {"every_n_train_steps": 4}))
    ]
    both[1].written = ends
    if ends is not None and (child := os.fork()):
        return os.waitpid(child, 0)[1]
    try:
        trainer = quiet(
            max_epochs=1,
            enable_checkpointing=True,
            callbacks=both,
            default_root_dir=folder,
            devices=2,
            strategy=strategy,
        )
        trainer.fit(Toy(), loader(16), ckpt_path=None if ends is not None else "last")
    finally:
        if ends is not None:
            os._exit(1)
    return trainer.global_step, [list(one.kept) for one in both], [one.last_model_path for one in both]


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_write_what_a_second_callback_owed(
    strategy: str, written: bool, async_save: bool, tmp_path: Path
) -> None:
    run_distributed(_two_on_two, 2, str(tmp_path), strategy, async_save, written)
    assert there(tmp_path / "a") == ["step=2", "step=4"]
    assert there(tmp_path / "b") == ["step=4"] * written
    first, other = run_distributed(_two_on_two, 2, str(tmp_path), strategy, async_save, None)
    names = [["step=2", "step=4", "step=6", "step=8"], ["step=4", "step=8"]]
    assert [there(tmp_path / name) for name in "ab"] == names
    assert first == other == (8, names, [str(tmp_path / name / "step=8") for name in "ab"])
    for name, number in (("a", 4), ("b", 4), ("b", 8)):
        verify_checkpoint(tmp_path / name / f"step={number}")


# -- several that choose, and some with weights only -------------------------------------------------------------------


class Two(Toy):
    """Logs in the epochs two values, of which each is best in another one."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", (3.0, 1.0, 2.0, 4.0)[self.current_epoch])
        self.log("accuracy", (0.1, 0.2, 0.9, 0.3)[self.current_epoch])


SEVERAL: dict[str, Any] = {
    "loss": {"monitor": "loss"},
    "accuracy": {"monitor": "accuracy", "mode": "max", "save_weights_only": True},
    "full": {},
    "weights": {"save_weights_only": True, "save_top_k": -1},
}
LISTS = [*itertools.permutations(["loss", "accuracy", "full"]), *itertools.permutations(["loss", "weights"])]


class Mine(ModelCheckpoint):
    """A class of the user's."""


@pytest.mark.parametrize("elsewhere", [None, 0, 1])
@pytest.mark.parametrize("names", LISTS, ids="-".join)
def test_best_is_the_firsts_with_a_monitor_and_last_can_be_trained_on(
    names: tuple[str, ...], elsewhere: int | None, tmp_path: Path
) -> None:
    def several() -> list[ModelCheckpoint]:
        places = [tmp_path / "elsewhere" if number == elsewhere else None for number in range(len(names))]
        return [
            kind(place, filename=f"{name}-{{epoch}}", **SEVERAL[name])
            for kind, name, place in zip([ModelCheckpoint, Mine, Mine], names, places, strict=False)
        ]

    def run(epochs: int) -> tuple[Trainer, list[ModelCheckpoint]]:
        callbacks = several()
        trainer = quiet(max_epochs=epochs, enable_checkpointing=True, callbacks=callbacks, default_root_dir=tmp_path)
        trainer.fit(Two(), loader(2), loader(1), ckpt_path="last")
        return trainer, callbacks

    first, _ = run(3)
    trainer, callbacks = run(4)
    assert (first.global_step, trainer.global_step) == (6, 8)
    choosing = [one for one in callbacks if one.monitor is not None]
    expected = choosing[0].best_model_path
    assert Path(expected).name == {"loss": "loss-epoch=1", "accuracy": "accuracy-epoch=2"}[str(choosing[0].monitor)]
    again = quiet(enable_checkpointing=True, callbacks=several(), default_root_dir=tmp_path)
    for one in (trainer, again):
        one.validate(Two(), loader(1), ckpt_path="best")
        assert str(one.run.resumed_from) == expected


def test_a_training_does_not_go_on_from_weights_alone(tmp_path: Path) -> None:
    both = [ModelCheckpoint(filename=f"{name}-{{epoch}}", **SEVERAL[name]) for name in ("accuracy", "full")]
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = quiet(max_epochs=4, callbacks=both, **options)
    trainer.fit(Two(), loader(2), loader(1))
    with raises_recorded(CheckpointError):
        quiet(max_epochs=5, callbacks=both, **options).fit(Two(), loader(2), loader(1), ckpt_path="best")
    rewinds = [*both, BadStepGuard("rewind", z_score=None)]
    trainer = quiet(max_epochs=3, callbacks=rewinds, **options)
    trainer.fit(BadOnce(), loader(2), loader(1))
    assert trainer.global_step == 5


class BadOnce(Two):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if (self.current_epoch, batch_idx) == (2, 1) else loss


class CountsUp(BadOnce):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(self.global_step))


def test_a_validation_that_comes_again_after_going_back_replaces_its_checkpoint(tmp_path: Path) -> None:
    first = ModelCheckpoint(filename="a-{step}", every_n_train_steps=7)
    best = ModelCheckpoint(monitor="seen", mode="max", save_top_k=3, save_weights_only=True, filename="b-{step}")
    callbacks = [first, best, BadStepGuard("rewind", z_score=None)]
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 1, "default_root_dir": tmp_path}
    trainer = quiet(enable_checkpointing=True, callbacks=callbacks, **options)
    trainer.fit(CountsUp(), loader(3), loader(1))
    assert trainer.global_step == 8
    there = sorted(path.name for path in (trainer.run_dir / "checkpoints").iterdir() if path.is_dir())
    assert there == ["a-step=8", "b-step=6", "b-step=7", "b-step=8"]


class Stops(Callback):
    """Sends SIGTERM after step 2."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("epochs", [1, 2])  # two: EarlyStopping ends the run
def test_a_checkpoint_of_a_stop_gets_the_value_by_which_the_resumed_run_ends(epochs: int, tmp_path: Path) -> None:
    def run(*more: Callback) -> ModelCheckpoint:
        saving = ModelCheckpoint(monitor="val_loss", filename="{step}", every_n_train_steps=3)
        ends = EarlyStopping("val_loss", stopping_threshold=1e9)
        options: dict[str, Any] = {"max_epochs": epochs, "val_check_interval": 2, "default_root_dir": tmp_path}
        callbacks = [*more, *([ends] * (epochs - 1)), saving]
        trainer = quiet(enable_checkpointing=True, callbacks=callbacks, **options)
        trainer.fit(Toy(), loader(2 * epochs), loader(1), ckpt_path="last")
        return saving

    with pytest.raises(SystemExit):
        run(Stops())
    saving = run()
    assert list(saving.kept) == ["step=2"]
    assert saving.best_model_path == saving.last_model_path
    assert saving.best_model_score is not None


@pytest.mark.parametrize("names", ["fw", "wf"])
def test_weights_alone_that_a_stop_has_written_are_deleted_by_the_resumed_run(names: str, tmp_path: Path) -> None:
    def run(*more: Callback) -> Path:
        kinds = {"f": {}, "w": {"save_weights_only": True}}
        savers = [ModelCheckpoint(filename=f"{name}-{{step}}", **kinds[name]) for name in names]
        options: dict[str, Any] = {"max_epochs": 2, "default_root_dir": tmp_path}
        trainer = quiet(enable_checkpointing=True, callbacks=[*more, *savers], **options)
        trainer.fit(Toy(), loader(4), ckpt_path="last")
        return trainer.run_dir / "checkpoints"

    with pytest.raises(SystemExit):
        run(Stops())
    assert there(run()) == ["f-step=8", "w-step=8"]
