"""A killed writer or a full disk leaves complete checkpoints or none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.messages import raises_recorded
from trainer.checkpoint import disk
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import verify_checkpoint
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError
from trainer.testing import largest_file

ROUNDS = 20

WRITER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from trainer.checkpoint.writing import write_checkpoint

def state(number):
    return {
        "model": {str(i): torch.full((30_000,), float(number)) for i in range(4)},
        "optimizers": [torch.full((60_000,), float(number))],
        "number": number,
    }

def write_until_killed(folder, acknowledged):
    for number in range(1, 100_000):
        write_checkpoint(folder / "same", state(number), overwrite=True)
        write_checkpoint(folder / f"new-{number}", state(number), info={"step": number})
        acknowledged.write(f"{number}\\n".encode())

start = time.monotonic()
write_checkpoint(Path(sys.argv[1]) / "first", state(0))
unit = time.monotonic() - start
rng = random.Random(int(sys.argv[2]))
for round in range(int(sys.argv[3])):
    folder = Path(sys.argv[1]) / str(round)
    folder.mkdir()
    child = os.fork()
    if child == 0:
        with open(folder / "acknowledged", "wb", buffering=0) as acknowledged:
            write_until_killed(folder, acknowledged)
    time.sleep(rng.uniform(0, 8 * unit))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_killed_writer_leaves_complete_checkpoints_or_nothing(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), "1", str(ROUNDS)],
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    interrupted = committed = 0
    for round_ in range(ROUNDS):
        folder = tmp_path / str(round_)
        acknowledged = (folder / "acknowledged").read_text().split() if (folder / "acknowledged").exists() else []
        last = int(acknowledged[-1]) if acknowledged else 0
        for path in folder.iterdir():
            interrupted += path.name.startswith(".tmp-")
            if path.is_dir() and not path.name.startswith("."):
                assert verify_checkpoint(path) == []
                state = read_checkpoint(path)
                tensors = [*state["model"].values(), *state["optimizers"]]
                assert all((tensor == state["number"]).all() for tensor in tensors)
                assert state["number"] >= last or path.name != "same"
                committed += 1
        names = ["same", *(f"new-{number}" for number in range(1, last + 1))] if last else []
        assert all((folder / name).exists() for name in names)
        directory = CheckpointDirectory(folder)
        assert directory.newest_valid() == (directory.list()[-1] if directory.list() else None)
        directory.clean()
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert interrupted >= 3  # some kills came during a write
    assert committed >= 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_refuses_leaves_the_earlier_checkpoint_and_nothing_else(tmp_path: Path, overwrite: bool) -> None:
    write_checkpoint(tmp_path / "old", {"x": torch.ones(3)})
    path = tmp_path / ("old" if overwrite else "new")
    with largest_file(100_000), pytest.raises(CheckpointError) as caught:
        write_checkpoint(path, {"a": torch.ones(10), "b": torch.ones(100_000)}, overwrite=overwrite)
    assert f"cannot write the checkpoint {path}: File too large." in str(caught.value)
    assert "Earlier checkpoints were left alone." in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert read_checkpoint(tmp_path / "old")["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_rename_that_fails_after_it_is_done_has_committed(
    tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on network file systems whose answer is lost: the second try finds the name gone."""
    write_checkpoint(tmp_path / "c", {"x": torch.zeros(3)}) if overwrite else None
    rename = os.rename

    def lose_the_answer(source: Path, target: Path) -> None:
        rename(source, target)
        if Path(target) == tmp_path / "c":
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "rename", lose_the_answer)
    monkeypatch.setattr(disk, "_exchange", lambda one, other: False)
    write_checkpoint(tmp_path / "c", {"x": torch.ones(3)}, overwrite=overwrite)
    assert read_checkpoint(tmp_path / "c")["x"].tolist() == [1, 1, 1]
    assert "is complete, although the storage reported an error after its commit" in caplog.text


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with raises_recorded(CheckpointError):
        write_checkpoint(tmp_path / "c", {})
    assert list(tmp_path.iterdir()) == []


def test_an_impossible_location_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_recorded(CheckpointError):
        write_checkpoint(tmp_path / "file" / "c", {})


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "c", {"x": torch.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_everything_is_flushed_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def spy_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    write_checkpoint(tmp_path / "new" / "c", {"model": torch.ones(3)})
    assert events[0] == tmp_path.name
    assert events[1:4] == ["model.safetensors", "checkpoint.json", "manifest.json"]
    assert events[4].startswith(".tmp-c-")
    assert events[5:] == ["rename", "new"]


def test_a_replaced_checkpoint_is_never_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    if not disk._exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this system cannot exchange two folders in one step")
    write_checkpoint(tmp_path / "c", {"x": 1})
    renames: list[Path] = []
    monkeypatch.setattr(os, "rename", lambda source, target: renames.append(source))
    write_checkpoint(tmp_path / "c", {"x": 2}, overwrite=True)
    assert renames == []
    assert read_checkpoint(tmp_path / "c") == {"x": 2}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_replacing_works_where_folders_cannot_be_exchanged(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "c", {"x": 1})
    if not can_exchange:
        monkeypatch.setattr(disk, "_exchange", lambda one, other: False)
    write_checkpoint(tmp_path / "c", {"x": 2}, overwrite=True)
    assert read_checkpoint(tmp_path / "c") == {"x": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_the_old_one_goes_back_when_the_second_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "c", {"x": 1})
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(disk, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", fail)
    with raises_recorded(CheckpointError):
        write_checkpoint(tmp_path / "c", {"x": 2}, overwrite=True)
    assert read_checkpoint(tmp_path / "c") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_remains_of_a_deleted_checkpoint_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("old", "older"):
        write_checkpoint(tmp_path / name, {"x": 1})
    storage = disk.LocalStorage()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *args, **options: None)  # what an immutable file comes to
        storage.remove_checkpoint(tmp_path / "old")
    remains = [path.name for path in tmp_path.iterdir() if path.name.startswith(".del-")]
    assert len(remains) == 1
    assert "could not be deleted" in caplog.text
    assert remains[0] in caplog.text
    storage.remove_checkpoint(tmp_path / "older")
    assert list(tmp_path.iterdir()) == []
