"""On a full disk the run reports the error and keeps the former checkpoint; with free space it continues."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks._chaos_training import main
from benchmarks.chaos import TRAINING, problems, python_path
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.manifest import verify_checkpoint
from trainer.errors import CheckpointError
from trainer.testing import fault, largest_file, run_python, small_disk

OPTIONS = ("--epochs", "3", "--width", "4")


@pytest.fixture(scope="module")
def uninterrupted(memory_folder: Path) -> Path:
    main([str(memory_folder / "uninterrupted"), *OPTIONS])
    return memory_folder / "uninterrupted" / "version_0"


def assert_the_former_stays(run: Path) -> None:
    directory = CheckpointDirectory(run / "checkpoints")
    assert directory.list()
    assert [problem for path in directory.list() for problem in verify_checkpoint(path)] == []
    # The last but one where the disk was full for the file of the pointer.
    assert directory.pointer("last") in directory.list()[-2:]
    assert [path.name for path in directory.folder.iterdir() if path.name.startswith(".tmp")] == []


def test_a_small_disk(uninterrupted: Path, tmp_path: Path) -> None:
    """The disk is a real, small file system, and the run a process of its own."""
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk(tmp_path / "disk", size=130_000))
        except PermissionError as error:
            pytest.skip(str(error))
        result = run_python(*TRAINING, str(disk), *OPTIONS, cwd=tmp_path, env=python_path()).check(1)
        assert "No space left on device" in result.stderr
        assert "Earlier checkpoints were left alone" in result.stderr
        assert_the_former_stays(disk / "version_0")
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        main([str(disk), *OPTIONS])
        assert problems(disk, uninterrupted) == []


@pytest.mark.parametrize(
    ("point", "count"), [("in_file", 61), ("after_file", 45), ("before_rename", 7), ("before_pointer", 9)]
)
def test_full_at_any_point(
    point: str, count: int, uninterrupted: Path, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = memory_folder / point
    for name, value in fault(point, "full", count).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="No space left on device"):
        main([str(folder), *OPTIONS])
    assert_the_former_stays(folder / "version_0")
    main([str(folder), *OPTIONS])
    assert problems(folder, uninterrupted) == []


def test_files_that_may_not_grow(memory_folder: Path) -> None:
    """Files cannot grow, as under a quota: not even the first checkpoint can be written."""
    folder = memory_folder / "quota"
    with largest_file(6_000), pytest.raises(CheckpointError, match="File too large"):
        main([str(folder), *OPTIONS])
    assert CheckpointDirectory(folder / "version_0" / "checkpoints").list() == []
