"""ModelCheckpoint survives writes that fail or take long."""

from __future__ import annotations

import logging
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_distributed, start_python
from tests.helpers.saving import At, SavedPaths, fit, steps, there
from tests.helpers.toy import Toy
from trainer import Callback, CheckpointError, Trainer
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint import async_writer as writer
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.format import read_checkpoint, read_manifest, verify_checkpoint


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event that the writer waits for before it begins."""
    opened = threading.Event()
    write = writer.write_plan

    def wait_and_write(*args: Any) -> None:
        assert opened.wait(600)
        write(*args)

    monkeypatch.setattr(writer, "write_plan", wait_and_write)
    yield opened
    opened.set()


# -- a disk that refuses -----------------------------------------------------------------------------------------------


def limit_files(size: int) -> None:
    """Limit the size of files that this process writes; -1: no limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def wait_for(checkpoint: ModelCheckpoint) -> None:
    """Wait until nothing is being written, so that what follows concerns the next checkpoint."""
    if checkpoint._writer is not None:
        checkpoint._writer.wait()


@pytest.fixture
def unlimited() -> Iterator[None]:
    yield
    limit_files(-1)


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.usefixtures("unlimited")
def test_a_disk_that_refuses_ends_the_run_and_the_former_checkpoint_stays(async_save: bool, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    checkpoint = steps(dirpath=folder, async_save=async_save)
    full = At(step3=lambda trainer: (wait_for(checkpoint), limit_files(1000)))
    with pytest.raises(WriteError, match=r"cannot write the checkpoint .*step=3: File too large\. Earlier checkpoints"):
        fit([full, checkpoint])
    assert there(folder) == ["step=1", "step=2"]
    assert CheckpointDirectory(folder).resolve("last") == folder / "step=2"
    assert sorted(path.name for path in folder.iterdir()) == ["last.json", "step=1", "step=2"]
    assert checkpoint.last_model_path == str(folder / "step=2")
    limit_files(-1)
    trainer = fit([steps(dirpath=folder)], ckpt_path="last")
    assert trainer.global_step == 6


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.usefixtures("unlimited")
def test_training_goes_on_with_the_former_checkpoint_if_wanted(
    async_save: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = steps(dirpath=tmp_path, async_save=async_save, on_write_error="warn")
    kept: list[list[str]] = []
    hole = At(
        step3=lambda trainer: (wait_for(checkpoint), limit_files(1000)),
        step5=lambda trainer: (wait_for(checkpoint), limit_files(-1)),
        step6=lambda trainer: kept.append(list(checkpoint.kept)),
    )
    saved = SavedPaths()
    fit([hole, saved, checkpoint])
    assert kept[0] == ["step=2", "step=5"]
    assert there(tmp_path) == ["step=5", "step=6"]
    assert [name for name, _ in saved.paths] == ["step=1", "step=2", "step=5", "step=6"]
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    for number, message in zip((3, 4), errors, strict=True):
        assert "NO CHECKPOINT WAS WRITTEN, and training goes on" in message
        assert f"step={number}: File too large" in message
        assert "The last checkpoint is still step=2." in message


@pytest.mark.usefixtures("unlimited")
def test_the_end_tries_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = steps(dirpath=tmp_path, every_n_train_steps=6, on_write_error="warn")

    class Freed(Callback):
        runs_last = True

        def on_train_end(self, trainer: Trainer, module: Any) -> None:
            limit_files(-1)

    fit([At(step6=lambda trainer: limit_files(1000)), Freed(), checkpoint])
    assert "There is none yet." in caplog.text
    assert there(tmp_path) == ["step=6"]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk(async_save: bool, tmp_path: Path) -> None:
    """The disk is a file system of one megabyte, which fills up."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system is not allowed here")
    try:
        with pytest.raises(WriteError, match=r"No space left on device \(0 MB are free there\)\. Earlier"):
            fit([steps(dirpath=disk, save_top_k=-1, async_save=async_save)], 20, Wide())
        names = there(disk)
        assert names
        assert CheckpointDirectory(disk).resolve("last") == disk / names[-1]
        assert all(verify_checkpoint(disk / name) == [] for name in names)
        assert {path.name for path in disk.iterdir()} == {*names, "last.json"}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Wide(Toy):
    """A module of about 0.2 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(50_000))


def test_what_cannot_be_stored_ends_the_run_whatever_the_policy(tmp_path: Path) -> None:
    class Odd(Toy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {1, 2}

    for async_save in (False, True):
        with pytest.raises(CheckpointError, match="mine: it is a set"):
            fit([steps(dirpath=tmp_path, async_save=async_save, on_write_error="warn")], module=Odd())


# -- in the background -------------------------------------------------------------------------------------------------


def test_the_same_checkpoints_in_the_background(tmp_path: Path) -> None:
    for async_save in (False, True):
        folder = tmp_path / str(async_save)
        saved = SavedPaths()
        fit([saved, steps(dirpath=folder, save_top_k=-1, async_save=async_save, monitor="train_loss")])
        assert [name for name, _ in saved.paths] == [f"step={number}" for number in range(1, 7)]
    for number in range(1, 7):
        one, other = (read_checkpoint(tmp_path / str(which) / f"step={number}") for which in (False, True))
        assert torch.equal(one["model"]["layer.weight"], other["model"]["layer.weight"])
        for part in ("progress", "callbacks", "optimizers"):
            assert one[part] == other[part]
    infos = [read_manifest(tmp_path / which / "step=6").info for which in ("True", "False")]
    assert infos[0] == infos[1]


def test_training_goes_on_while_one_is_written(
    gate: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[list[str]] = []
    saved = SavedPaths()
    look = At(step4=lambda trainer: (seen.append(there(tmp_path)), gate.set()))
    fit([look, saved, steps(dirpath=tmp_path, async_save=True, every_n_train_steps=2)])
    assert seen == [[]]  # two steps later
    assert there(tmp_path) == ["step=4", "step=6"]
    assert read_checkpoint(tmp_path / "step=4")["progress"]["step"] == 4
    assert saved.paths[0] == ("step=2", 4)
    assert saved.paths[-1] == ("step=6", 6)


def test_a_due_one_waits_for_the_one_before_and_says_so_once(
    gate: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timers = [threading.Timer(0.3, gate.set)]
    fit([At(step2=lambda trainer: timers[0].start()), steps(dirpath=tmp_path, async_save=True, save_top_k=-1)])
    assert there(tmp_path) == [f"step={number}" for number in range(1, 7)]
    assert caplog.text.count("a checkpoint is due while the one before it is still being written") == 1


def test_an_error_of_the_writer_comes_up_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("the writer's own mistake")

    monkeypatch.setattr(writer, "write_plan", fail)
    checkpoint = steps(dirpath=tmp_path, async_save=True, every_n_train_steps=2)

    reached: list[int] = []
    with pytest.raises(WriteError, match="RuntimeError: the writer's own mistake"):
        fit([At(step3=lambda trainer: wait_for(checkpoint), step4=lambda trainer: reached.append(4)), checkpoint])
    assert reached == []
    assert there(tmp_path) == []
    assert checkpoint.last_model_path == ""


@pytest.mark.parametrize("how", ["stop", "exception", "interrupt", "end"])
def test_nothing_ends_before_the_commit(how: str, gate: threading.Event, tmp_path: Path) -> None:
    def end(trainer: Trainer) -> None:
        threading.Timer(0.3, gate.set).start()
        if how == "stop":
            trainer.stop("enough")
        if how == "exception":
            raise ZeroDivisionError
        if how == "interrupt":
            raise KeyboardInterrupt

    saved = SavedPaths()
    callbacks = [At(step3=end), saved, steps(dirpath=tmp_path, async_save=True, every_n_train_steps=2)]
    if how in ("exception", "interrupt"):
        with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
            fit(callbacks)
        assert saved.paths == [("step=2", 3)]
    else:
        fit(callbacks)
    last = {"stop": 3, "end": 6}.get(how, 2)
    assert CheckpointDirectory(tmp_path).pointer("last") == tmp_path / f"step={last}"
    assert verify_checkpoint(tmp_path / f"step={last}") == []
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]


def test_an_error_of_the_writer_is_not_lost_behind_another_one(
    gate: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(trainer: Trainer) -> None:
        (tmp_path / "step=2").write_text("in the way")
        gate.set()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit([At(step3=end), steps(dirpath=tmp_path, async_save=True, every_n_train_steps=2)])
    assert "step=2 exists" in caplog.text


SIGNALLED = """
import os, signal, sys, time
from tests.helpers.saving import At, fit, steps
from trainer.checkpoint import async_writer as writer

write = writer.write_plan
def slow(*args):
    time.sleep(0.5)
    write(*args)
writer.write_plan = slow
fit([At(step3=lambda trainer: os.kill(os.getpid(), signal.SIGTERM)), steps(dirpath=sys.argv[1], async_save=True)])
"""


def test_sigterm_waits_for_the_commit(tmp_path: Path) -> None:
    start_python(SIGNALLED, str(tmp_path / "c"), cwd=tmp_path).wait().check(143)
    assert CheckpointDirectory(tmp_path / "c").resolve("last").name == "step=3"


def _two_processes(folder: str) -> Any:
    torch.set_num_threads(1)
    checkpoint = steps(dirpath=folder, async_save=True, on_write_error="warn", save_top_k=-1)
    saved = SavedPaths()

    def fill(trainer: Trainer) -> None:
        wait_for(checkpoint)
        limit_files(1000 if trainer.is_global_zero else -1)

    hole = At(step3=fill, step5=lambda trainer: (wait_for(checkpoint), limit_files(-1)))
    trainer = fit([hole, saved, checkpoint], batches=12, devices=2, strategy="ddp", default_root_dir=folder)
    return trainer.global_step, checkpoint.kept, checkpoint.last_model_path, [name for name, _ in saved.paths]


def test_two_processes_agree_on_what_was_written(tmp_path: Path) -> None:
    (first, other) = run_distributed(_two_processes, 2, str(tmp_path / "c"))
    names = ["step=1", "step=2", "step=5", "step=6"]
    kept = dict.fromkeys(names)
    assert first == (6, kept, str(tmp_path / "c" / "step=6"), names)
    assert other == (6, kept, str(tmp_path / "c" / "step=6"), [])
