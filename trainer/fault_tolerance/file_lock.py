"""A directory lock that is released when its holder dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import time
import weakref
from contextlib import suppress
from datetime import datetime
from pathlib import Path

NAME = ".lock"

_TIMEOUT_S = 2.0
"""The system may need some time to release the locks of a process that was just killed."""

log = logging.getLogger("trainer")


class FolderLock:
    """The right to write to a directory, from `acquire` to `release` or the end of the process, however it ends.

    It is an flock on the file `.lock` in the directory, which names the holder. On file systems without locks every
    process gets it, with a logged warning.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / NAME
        self._descriptor: int | None = None

    def acquire(self, timeout: float = _TIMEOUT_S) -> str | None:
        """Acquire the lock. The directory has to exist.

        Args:
            timeout: seconds to wait for it.

        Returns:
            None if it was acquired; else its holder: "process 123 on host h since 2025-01-31 12:00:00".

        Raises:
            OSError: the directory cannot be written to.
        """
        deadline = time.monotonic() + timeout
        while (holder := self._try()) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        return holder

    def release(self) -> None:
        """Release the lock and delete its file. Does nothing the second time."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                self._file.unlink()
            with suppress(OSError):  # closed all the same
                os.close(descriptor)

    def _try(self) -> str | None:
        try:
            import fcntl
        except ImportError:
            return None  # not on this system
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.read(descriptor, 1000))
            os.close(descriptor)
            return holder
        except OSError as error:
            os.close(descriptor)
            log.warning(
                "the file system of %s has no locks (%s): take care that no other run writes there, too.",
                self.folder,
                error.strerror or error,
            )
            return None
        if not self._is_still_there(descriptor):
            os.close(descriptor)
            return self._try()  # it was released, and its file deleted, in the meantime
        os.ftruncate(descriptor, 0)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        os.write(descriptor, json.dumps(about).encode())
        self._descriptor = descriptor
        # A forked data worker may outlive this process, and must not hold the lock.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _close_in_child(this()))
        return None

    def _open(self) -> int:
        """Open the file, which may have been put there by anybody: never through a link, nor one with another name."""
        wrong = OSError(errno.EINVAL, f"{NAME} there is a link or no regular file: delete it")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._file, flags, 0o644)
        except OSError as error:
            raise wrong if error.errno == errno.ELOOP else error from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            raise wrong
        return descriptor

    def _is_still_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        except FileNotFoundError:
            return False


def _close_in_child(lock: FolderLock | None) -> None:
    if lock is not None and lock._descriptor is not None:
        os.close(lock._descriptor)
        lock._descriptor = None


def _holder(text: bytes) -> str:
    try:
        about = json.loads(text)
        return f"process {about['pid']} on host {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
