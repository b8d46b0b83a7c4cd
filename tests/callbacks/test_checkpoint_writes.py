"""ModelCheckpoint survives writes that fail or take long."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_distributed, start_python
from tests.helpers.saving import At, SavedPaths, fit, steps, there
from tests.helpers.toy import Toy
from tests.messages import raises_recorded
from trainer import Callback, CheckpointError, Trainer
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint import async_writer as writer
from trainer.checkpoint import disk
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import read_manifest, verify_checkpoint
from trainer.fault_tolerance.fault_points import VARIABLE


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
    if checkpoint._checkpoints.writer is not None:
        checkpoint._checkpoints.writer.wait()


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
    with raises_recorded(WriteError):
        fit([full, checkpoint])
    assert there(folder) == ["step=1", "step=2"]
    assert CheckpointDirectory(folder).resolve("last") == folder / "step=2"
    assert sorted(path.name for path in folder.iterdir()) == ["last.json", "step=1", "step=2"]
    assert checkpoint.last_model_path == str(folder / "step=2")
    limit_files(-1)
    trainer = fit([steps(dirpath=folder)], ckpt_path="last")
    assert trainer.global_step == 6


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    limit_files(1000)


def link_to_nothing(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("nothing")


@pytest.mark.parametrize("happens", [replace_by_a_file, link_to_nothing, empty])
@pytest.mark.usefixtures("unlimited")
def test_a_folder_that_others_have_taken_away_is_reported(
    happens: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "c"
    checkpoint = steps(dirpath=folder, on_write_error="warn")
    with raises_recorded(WriteError) as caught:
        fit([At(step3=lambda trainer: happens(folder)), checkpoint])
    reported = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    for message in (*reported, str(caught.value)):
        assert "The last checkpoint that was written: step=2." in message


def test_a_write_that_fails_when_its_checkpoint_is_there_leaves_none_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = steps(dirpath=tmp_path, async_save=True, on_write_error="warn")

    def fail(trainer: Trainer) -> None:
        wait_for(checkpoint)
        monkeypatch.setenv(VARIABLE, "after_rename=error")

    fit([At(step3=fail, step4=lambda trainer: wait_for(checkpoint)), checkpoint])
    assert there(tmp_path) == ["step=5", "step=6"]
    assert list(checkpoint.kept) == ["step=5", "step=6"]


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
        assert "SAVING A CHECKPOINT HAS FAILED, and training continues" in message
        assert f"step={number}: File too large" in message
        assert "The last checkpoint that was written: step=2." in message


@pytest.mark.usefixtures("unlimited")
def test_the_end_tries_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = steps(dirpath=tmp_path, every_n_train_steps=6, on_write_error="warn")

    class Freed(Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
            limit_files(-1)

    fit([At(step6=lambda trainer: limit_files(1000)), Freed(), checkpoint])
    assert "The last checkpoint that was written: none." in caplog.text
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
        with raises_recorded(WriteError):
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


# -- file systems that refuse other things -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["EINVAL", "ENOTSUP", "EBADF"])
def test_a_file_system_that_cannot_flush_folders(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    disk._warn_no_flush.cache_clear()
    fit([steps(dirpath=tmp_path / "c")])
    assert there(tmp_path / "c") == ["step=5", "step=6"]
    assert caplog.text.count("a power cut may take the newest files") == 1


@pytest.mark.parametrize("filename", ["{step}", "model"])
def test_a_disk_that_turns_read_only_after_the_rename(
    filename: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new checkpoint is in place and complete, and the message says nothing else."""
    folder, fsync, rename, exchange = tmp_path / "c", os.fsync, os.rename, disk._exchange
    disk_is = {"failing": False, "read-only": False}

    def flush(descriptor: int) -> None:
        if disk_is["failing"] and os.path.samestat(os.fstat(descriptor), folder.stat()):
            disk_is["read-only"] = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    def refuse(source: Any, target: Any) -> None:
        if disk_is["read-only"]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(disk, "_exchange", lambda one, other: not disk_is["read-only"] and exchange(one, other))
    happens = At(
        step3=lambda trainer: disk_is.update({"failing": True}),
        step4=lambda trainer: disk_is.update({"failing": False, "read-only": False}),
    )
    top_k = 1 if filename == "model" else 2
    fit([happens, steps(dirpath=folder, filename=filename, on_write_error="warn", save_top_k=top_k)])
    assert f"{filename.format(step='step=3')} is complete, but its folder cannot be flushed" in caplog.text
    assert caplog.text.count("was written, and cannot write") == 1
    assert "unchanged" not in caplog.text
    assert there(folder) == (["model"] if filename == "model" else ["step=5", "step=6"])
    assert all(verify_checkpoint(folder / name) == [] for name in there(folder))


@contextmanager
def renames_refused(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> Iterator[None]:
    """Refuse to rename the folder of this name, as a server does for one that is in use."""
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        if Path(source).name == name:
            raise OSError(code, os.strerror(code))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        yield


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("on_write_error", ["raise", "warn"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_deleted_later(
    on_write_error: str, async_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    checkpoint = steps(dirpath=tmp_path, async_save=async_save, on_write_error=on_write_error, save_top_k=1)
    seen: list[list[str]] = []
    with renames_refused(monkeypatch, "step=1", errno.EBUSY):
        fit([At(step3=lambda trainer: (wait_for(checkpoint), seen.append(there(tmp_path)))), checkpoint], max_steps=4)
    assert seen == [["step=1", "step=2"]]
    assert there(tmp_path) == ["step=1", "step=4"]
    assert caplog.text.count("stays until it can be deleted: cannot remove") == 1
    assert "HAS FAILED" not in caplog.text
    # The next run of this training knows of it.
    fit([steps(dirpath=tmp_path, save_top_k=1)], 6, ckpt_path="last")
    assert there(tmp_path) == ["step=6"]


def test_a_link_instead_of_an_old_checkpoint_is_deleted_and_its_target_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bigger, folder = tmp_path / "bigger disk", tmp_path / "c"

    def move(trainer: Trainer) -> None:
        (folder / "step=1").rename(bigger)
        (folder / "step=1").symlink_to(bigger)

    fit([At(step3=move), steps(dirpath=folder)])
    assert there(folder) == ["step=5", "step=6"]
    assert verify_checkpoint(bigger) == []
    assert f"{bigger}, is not deleted" in caplog.text


def test_what_remains_of_a_deletion_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in use on a server stay as .nfs..., so that their folder cannot be deleted yet."""
    unlink = os.unlink
    busy = [True]

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        if busy and str(path).endswith("manifest.json"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", refuse)
    fit([At(step5=lambda trainer: busy.clear()), steps(dirpath=tmp_path / "c", save_top_k=1)])
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["last.json", "step=6"]


@pytest.fixture
def refused_pointers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse to replace the files of these names."""
    replace, refused = os.replace, list[str]()

    def refuse(source: Any, target: Any) -> None:
        if Path(target).name in refused:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    return refused


@pytest.mark.parametrize("async_save", [False, True])
def test_a_pointer_that_cannot_be_replaced_is_no_lost_checkpoint(
    async_save: bool, tmp_path: Path, refused_pointers: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = steps(dirpath=tmp_path, async_save=async_save, on_write_error="warn")
    seen: list[Any] = []

    def look(trainer: Trainer) -> None:
        wait_for(checkpoint)
        seen.append((there(tmp_path), CheckpointDirectory(tmp_path).resolve("last").name))
        refused_pointers.clear()

    refuse = At(step3=lambda trainer: (wait_for(checkpoint), refused_pointers.append("last.json")), step7=look)
    fit([refuse, checkpoint], 8)
    # None is deleted before a pointer leads to a newer one.
    assert seen == [([f"step={number}" for number in range(1, 7)], "step=6")]
    assert there(tmp_path) == ["step=7", "step=8"]
    assert caplog.text.count("was written, and cannot write") == 4


def test_a_pointer_that_cannot_be_replaced_ends_the_run_with_a_true_message(
    tmp_path: Path, refused_pointers: list[str]
) -> None:
    refused_pointers.append("last.json")
    with raises_recorded(WriteError):
        fit([steps(dirpath=tmp_path)])
    refused_pointers.clear()
    assert there(tmp_path) == ["step=1"]
    assert fit([steps(dirpath=tmp_path)], ckpt_path="last").global_step == 6


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.usefixtures("unlimited")
def test_a_run_whose_last_weights_are_not_saved_does_not_end_well(async_save: bool, tmp_path: Path) -> None:
    checkpoint = steps(dirpath=tmp_path / "c", async_save=async_save, on_write_error="warn")
    full = At(step4=lambda trainer: (wait_for(checkpoint), limit_files(1000)))
    with raises_recorded(WriteError):
        fit([full, checkpoint])
    assert there(tmp_path / "c") == ["step=2", "step=3"]
    limit_files(-1)
    checkpoint = steps(dirpath=tmp_path / "c", async_save=async_save, on_write_error="warn")
    full = At(step4=lambda trainer: (wait_for(checkpoint), limit_files(1000)))
    again = At(step6=lambda trainer: limit_files(-1))
    fit([full, again, checkpoint])
    assert there(tmp_path / "c")[-1].startswith("step=6")


@pytest.mark.usefixtures("unlimited")
def test_a_run_that_is_to_be_started_again_is_so_though_its_last_weights_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With "warn" a cluster's warning means the same as without a full disk: 75, and it goes on from before."""

    def stop(number: signal.Signals, policy: str) -> Any:
        def fill_and_stop(trainer: Trainer) -> None:
            limit_files(1000)
            signal.raise_signal(number)

        folder = tmp_path / f"{number.name}-{policy}"
        fit([At(step4=fill_and_stop), steps(dirpath=folder, on_write_error=policy)])

    with caplog.at_level(logging.ERROR, "trainer"), pytest.raises(SystemExit) as ended:
        stop(signal.SIGUSR1, "warn")
    assert ended.value.code == 75
    assert "step 4, and its last weights are NOT SAVED" in caplog.text
    assert "The last checkpoint that was written: step=3. The exit code stays 75" in caplog.text
    for number, policy in ((signal.SIGTERM, "warn"), (signal.SIGUSR1, "raise")):
        limit_files(-1)
        with pytest.raises(WriteError):
            stop(number, policy)
    limit_files(-1)
    assert fit([steps(dirpath=tmp_path / "SIGUSR1-warn")], ckpt_path="last").global_step == 6


def test_what_cannot_be_stored_ends_the_run_whatever_the_policy(tmp_path: Path) -> None:
    class Odd(Toy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {len} if self.global_step else [1, 2]

    for async_save in (False, True):
        with raises_recorded(CheckpointError):
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
        for checkpoint in (one, other):
            for state in checkpoint["callbacks"].values():
                state.pop("owner", None)  # a random name, as below
        for part in ("progress", "callbacks", "optimizers"):
            assert one[part] == other[part]
    infos = [read_manifest(tmp_path / which / "step=6").info for which in ("True", "False")]
    assert {type(info.pop(name)) for info in infos for name in ("began", "captured")} == {int}
    assert [len(info.pop("owner")) for info in infos] == [16, 16]
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


def test_a_due_one_waits_for_the_one_before_and_logs_that_once(
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
    with raises_recorded(WriteError):
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


def test_a_name_that_a_thread_is_still_writing_is_taken(gate: threading.Event, tmp_path: Path) -> None:
    both = [ModelCheckpoint(tmp_path / "c", filename="one", save_top_k=k, async_save=True) for k in (1, -1)]
    opening = threading.Timer(0.5, gate.set)
    opening.start()
    fit([*both], default_root_dir=tmp_path)
    assert [[*one.kept] for one in both] == [["one"], ["one-v1"]]
    assert sorted(there(tmp_path / "c")) == ["one", "one-v1"]
