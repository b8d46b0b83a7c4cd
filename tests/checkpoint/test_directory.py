from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.messages import raises_recorded
from trainer.checkpoint.directory import CheckpointDirectory, locate
from trainer.checkpoint.disk import this_machine
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError, ConfigError


def add(directory: CheckpointDirectory, name: str, **info: Any) -> Path:
    write_checkpoint(directory.folder / name, {"model": {"w": torch.ones(5)}, "name": name}, info=info)
    return directory.folder / name


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """Return a directory with checkpoints of steps 2, 10 and 30, the latest first by name."""
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for name, step in (("c", 2), ("b", 10), ("a", 30)):
        add(directory, name, step=step)
    return directory


def names(directory: CheckpointDirectory) -> list[str]:
    return [path.name for path in directory.list()]


def damage(path: Path) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_checkpoints_are_listed_by_step_then_name(directory: CheckpointDirectory) -> None:
    add(directory, "without")
    add(directory, "also10", step=10)
    (directory.folder / "uncommitted").mkdir()
    (directory.folder / ".tmp-x-1-00000000").mkdir()
    (directory.folder / "notes.txt").write_text("")
    assert names(directory) == ["without", "c", "also10", "b", "a"]
    assert directory.info("b") == directory.info(directory.folder / "b") == {"step": 10}
    assert CheckpointDirectory(directory.folder / "none").list() == []


def test_a_damaged_manifest_is_named_and_left_out(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    (directory.folder / "a" / "manifest.json").write_text("{")
    assert names(directory) == ["c", "b"]
    assert str(directory.folder / "a" / "manifest.json") in caplog.text


def test_pointers_are_set_moved_and_read(directory: CheckpointDirectory) -> None:
    assert directory.pointer("last") is None
    directory.set_pointer("last", "b")
    directory.set_pointer("best", directory.folder / "c")
    directory.set_pointer("last", "a")
    assert directory.pointer("last") == directory.resolve("last") == directory.folder / "a"
    assert directory.pointer("best") == directory.resolve("best") == directory.folder / "c"
    assert sorted(path.name for path in directory.folder.iterdir()) == ["a", "b", "best.json", "c", "last.json"]


@pytest.mark.parametrize("name", ["missing", "../checkpoints/a/x", "..", "/etc", "", ".tmp-x"])
def test_pointers_point_to_checkpoints_only(directory: CheckpointDirectory, name: str) -> None:
    with pytest.raises(CheckpointError):
        directory.set_pointer("last", name)
    with pytest.raises(CheckpointError):
        directory.remove(name)
    assert directory.pointer("last") is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"checkpoint": 3}', '{"checkpoint": "../a"}', '{"checkpoint": "gone"}']
)
def test_a_pointer_that_leads_nowhere_is_reported_and_passed_over(
    directory: CheckpointDirectory, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    for pointer in ("last", "best"):
        (directory.folder / f"{pointer}.json").write_text(text)
    assert directory.pointer("last") is None
    assert "last.json" in caplog.text
    assert directory.resolve("last") == directory.folder / "a"
    with raises_recorded(CheckpointError):
        directory.resolve("best")


def test_readers_always_see_a_complete_pointer(directory: CheckpointDirectory) -> None:
    directory.set_pointer("last", "a")
    stop = threading.Event()
    seen: list[Path | None] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(directory.pointer("last"))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        directory.set_pointer("last", "b")
        directory.set_pointer("last", "a")
    stop.set()
    reader.join()
    assert set(seen) == {directory.folder / "a", directory.folder / "b"}


def test_a_pointer_that_cannot_be_written_stays(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.set_pointer("last", "b")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with raises_recorded(CheckpointError):
        directory.set_pointer("last", "a")
    assert directory.pointer("last") == directory.folder / "b"
    assert sorted(path.name for path in directory.folder.iterdir()) == ["a", "b", "c", "last.json"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    directory.set_pointer("last", "a")
    assert directory.newest_valid() == directory.folder / "a"
    (directory.folder / "a" / "notes.txt").write_text("a file too many is no damage")
    assert directory.newest_valid() == directory.folder / "a"
    damage(directory.folder / "a")
    assert directory.newest_valid() == directory.folder / "b"
    assert str(directory.folder / "a" / "model.safetensors") in caplog.text
    assert directory.resolve("last") == directory.folder / "b"
    for name in ("b", "c"):
        damage(directory.folder / name)
    assert directory.newest_valid() is None
    with raises_recorded(CheckpointError):
        directory.resolve("last")


def test_paths_and_names_are_resolved(directory: CheckpointDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    write_checkpoint(elsewhere, {})
    assert directory.resolve(elsewhere) == directory.resolve(str(elsewhere)) == elsewhere
    assert directory.resolve("b") == directory.folder / "b"
    with raises_recorded(CheckpointError):
        directory.resolve("lats")
    (tmp_path / "folder").mkdir()
    with raises_recorded(CheckpointError):
        directory.resolve(tmp_path / "folder")


def test_all_but_the_last_intact_checkpoint_can_be_removed(directory: CheckpointDirectory) -> None:
    directory.remove("b")
    (directory.folder / "a" / "model.safetensors").unlink()
    with raises_recorded(CheckpointError):
        directory.remove("c")
    directory.remove(directory.folder / "a")
    assert [path.name for path in directory.folder.iterdir()] == ["c"]
    with raises_recorded(CheckpointError):
        directory.remove("a")


def test_readers_see_a_removed_checkpoint_complete_or_not_at_all(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    unlink = os.unlink

    def spy(*args: Any, **kwargs: Any) -> None:
        seen.append(names(directory))
        unlink(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", spy)
    directory.remove("b")
    assert len(seen) == 3
    assert all(listed == ["c", "a"] for listed in seen)


def test_leftovers_of_dead_writers_are_cleaned(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftovers = {
        "dead": directory.folder / f".tmp-x-{dead.pid}-00000000",
        "alive": directory.folder / f".tmp-x-{os.getpid()}-00000000",
        "dead file": directory.folder / f".tmp-last.json-{dead.pid}-00000000",
        "not ours": directory.folder / ".tmp-notes",
    }
    for name, path in leftovers.items():
        if name == "dead file":
            path.write_text("")
        else:
            path.mkdir()
            (path / "model.safetensors").write_text("partial")
    assert sorted(directory.clean()) == sorted([leftovers["dead"], leftovers["dead file"]])
    assert leftovers["alive"].exists()
    assert directory.clean(max_age=-1) == [leftovers["alive"]]
    assert leftovers["not ours"].exists()
    assert names(directory) == ["c", "b", "a"]
    assert CheckpointDirectory(directory.folder / "none").clean() == []


def test_leftovers_of_another_machine_stay_while_they_may_be_in_use(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    names = {
        "other": f".tmp-x-m00000000-{dead.pid}-00000000",
        "own": f".tmp-x-{this_machine()}-{dead.pid}-00000000",
        "deleted": f".del-x-m00000000-{os.getpid()}-00000000",
    }
    paths = {which: directory.folder / name for which, name in names.items()}
    for path in paths.values():
        path.mkdir()
        (path / "model.safetensors").write_text("partial")
    # This machine's clock may be wrong: the file system's counts.
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 10**8)
    assert sorted(directory.clean()) == sorted([paths["own"], paths["deleted"]])
    os.utime(paths["other"], (0, 0))
    assert directory.clean() == []  # the file in it has grown
    os.utime(paths["other"] / "model.safetensors", (0, 0))
    os.utime(paths["other"], (0, 0))
    assert directory.clean() == [paths["other"]]


def test_the_longest_names_have_temporary_ones(tmp_path: Path) -> None:
    name = "x" * 255
    for number in (1, 2):
        write_checkpoint(tmp_path / name, {"number": number}, overwrite=True)
    directory = CheckpointDirectory(tmp_path)
    directory.set_pointer("last", name)
    write_checkpoint(tmp_path / "y", {})
    directory.remove(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.json", "y"]
    for too_long in ("x" * 256, "a\0b"):
        with pytest.raises((CheckpointError, ConfigError)):
            write_checkpoint(tmp_path / too_long, {})


def test_a_checkpoint_set_aside_by_a_dead_writer_goes_back(
    directory: CheckpointDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    aside = directory.folder / f".old-b-{dead.pid}-00000000"
    (directory.folder / "b").rename(aside)
    with caplog.at_level(logging.WARNING):
        assert directory.clean() == []
    assert "the old one is back" in caplog.text
    assert read_checkpoint(directory.folder / "b")["name"] == "b"
    (directory.folder / "c").rename(aside)
    assert directory.clean() == [aside]  # the new one was in place already
    assert read_checkpoint(directory.folder / "b")["name"] == "b"


def test_a_pointer_may_end_a_path(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", {"model": {"w": torch.ones(1)}}, info={"step": 1})
    write_checkpoint(tmp_path / "two", {"model": {"w": torch.ones(1)}}, info={"step": 2})
    CheckpointDirectory(tmp_path).set_pointer("best", "one")
    assert locate(tmp_path / "best").name == "one"
    assert locate(str(tmp_path / "last")).name == "two"
    assert locate(tmp_path / "two").name == "two"
    with raises_recorded(CheckpointError):
        locate(tmp_path / "bset")


def test_of_equally_good_ones_the_oldest_is_the_best() -> None:
    kept = {"one": 0.9, "two": 0.99, "three": 0.99, "four": None}
    retention = Retention(by_value=True, mode="max", top_k=1, last=False)
    assert retention.best(kept) == ["two"]
    assert retention.to_delete(kept) == ["one", "three", "four"]


def test_a_damaged_last_one_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step, name in enumerate(("one", "two")):
        write_checkpoint(tmp_path / name, {"model": {"w": torch.ones(1)}}, info={"step": step})
    CheckpointDirectory(tmp_path).set_pointer("last", "two")
    (tmp_path / "two" / "model.safetensors").unlink()
    assert CheckpointDirectory(tmp_path).resolve("last").name == "one"
    assert caplog.text.count("Skipping the damaged checkpoint two") == 1
