"""A folder that one process at a time may write to; a dead process is never in the way."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path

NAME = ".lock"

_PATIENCE_S = 2.0
"""A process that was just killed may need a moment until the system has taken its locks away."""


class FolderLock:
    """The right to write to a folder, held from `acquire` to `release` or to the end of the process, however it ends.

    It is an flock on the file `.lock` in the folder, which says who holds it. Where the file system has no locks
    everybody gets it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / NAME
        self._descriptor: int | None = None

    def acquire(self, patience: float = _PATIENCE_S) -> str | None:
        """Take it. The folder has to exist.

        Args:
            patience: seconds to wait for it.

        Returns:
            None when it was taken; else who holds it: "process 123 on host h since 2025-01-31 12:00:00".

        Raises:
            OSError: the folder cannot be written to.
        """
        deadline = time.monotonic() + patience
        while (holder := self._try()) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        return holder

    def release(self) -> None:
        """Give it back; nothing of it stays in the folder. Does nothing the second time."""
        if self._descriptor is not None:
            with suppress(OSError):
                self._file.unlink()
            os.close(self._descriptor)
            self._descriptor = None

    def _try(self) -> str | None:
        try:
            import fcntl
        except ImportError:
            return None  # not on this system
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.read(descriptor, 1000))
            os.close(descriptor)
            return holder
        except OSError:
            os.close(descriptor)
            return None  # not on this file system
        if not self._is_still_there(descriptor):
            os.close(descriptor)
            return self._try()  # it was given back, and its file deleted, in the meantime
        os.ftruncate(descriptor, 0)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.write(descriptor, json.dumps(about).encode())
        self._descriptor = descriptor
        # A forked data worker may outlive this process for a while, and must not hold the lock then.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(this()))
        return None

    def _is_still_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        except FileNotFoundError:
            return False


def _let_go(lock: FolderLock | None) -> None:
    if lock is not None and lock._descriptor is not None:
        os.close(lock._descriptor)
        lock._descriptor = None


def _holder(text: bytes) -> str:
    try:
        about = json.loads(text)
        return f"process {about['pid']} on host {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
