"""A folder has one writer at a time, and the lock of a dead process is released."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import alive, start_python, wait_until
from trainer.fault_tolerance.file_lock import NAME, FolderLock

HOLDER = """
import os, signal, sys, time
from pathlib import Path
from trainer.fault_tolerance.file_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
assert lock.acquire() is None
# A data worker, which is forked and outlives a killed parent.
child = os.fork()
if child == 0:
    time.sleep(3600)
print("child", child, flush=True)
time.sleep(3600)
"""


def test_the_second_one_gets_the_name_of_the_holder(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert first.acquire() is None
    holder = second.acquire(timeout=0)
    assert holder is not None
    assert holder.startswith(f"process {os.getpid()} on host {socket.gethostname()} since 20")
    second.release()
    assert FolderLock(tmp_path).acquire(timeout=0) is not None
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    assert second.acquire(timeout=0) is None
    second.release()


def test_what_a_dead_process_left_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"pid": 1, "host": socket.gethostname(), "since": "1970-01-01 00:00:00"}))
    lock = FolderLock(tmp_path)
    assert lock.acquire(timeout=0) is None
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_killed_process_gives_it_up_though_its_children_live(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    running = start_python(HOLDER, str(folder), cwd=tmp_path)
    running.wait_for("child")
    child = int(running.stdout.split()[1])
    try:
        holder = FolderLock(folder).acquire(timeout=0)
        assert holder is not None
        assert holder.startswith(f"process {running.pid} on host")
        running.send(signal.SIGKILL)
        running.process.wait()
        assert alive(child)
        lock = FolderLock(folder)
        assert lock.acquire() is None
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: not alive(child))


def test_a_process_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    assert first.acquire() is None
    ending = threading.Timer(0.3, first.release)
    ending.start()
    assert second.acquire(timeout=60) is None
    ending.join()
    second.release()


def test_a_lock_that_is_deleted_between_opening_and_taking_it_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    calls: list[int] = []

    def delete_first(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / NAME).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    lock = FolderLock(tmp_path)
    assert lock.acquire() is None
    assert len(calls) == 2
    assert FolderLock(tmp_path).acquire(timeout=0) is not None
    lock.release()


def test_where_there_are_no_locks_everybody_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for lock in (FolderLock(tmp_path), FolderLock(tmp_path)):
        assert lock.acquire(timeout=0) is None
        lock.release()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        FolderLock(tmp_path / "none").acquire()
