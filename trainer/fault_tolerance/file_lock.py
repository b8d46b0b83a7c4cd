"""A directory lock that is released when its holder dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

NAME = ".lock"

_TIMEOUT_S = 2.0
"""The system may need some time to release the locks of a process that was just killed."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

log = logging.getLogger("trainer")


class FolderLock:
    """The right to write to a directory, from `acquire` to `release` or the end of the process, however it ends.

    It is a lock of `filelock` on the file `.lock` in the directory. The rest is here because `filelock` does not say
    who holds a lock, and takes a pipe and a second name of another file for one. On file systems without locks every
    process gets it, with a logged warning: what `filelock` would use there would outlive a killed process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / NAME
        self._lock = FileLock(self._file, mode=0o644, thread_local=False, fallback_to_soft=False)

    def acquire(self, timeout: float = _TIMEOUT_S) -> str | None:
        """Acquire the lock. The directory has to exist.

        Args:
            timeout: seconds to wait for it.

        Returns:
            None if it was acquired; else its holder: "process 123 on host h since 2025-01-31 12:00:00".

        Raises:
            OSError: the directory cannot be written to.
        """
        os.close(self._open(os.O_CREAT))
        try:
            self._lock.acquire(timeout=timeout, poll_interval=0.1)
        except Timeout:
            descriptor = self._open()
            holder = _holder(os.read(descriptor, 1000))
            os.close(descriptor)
            return holder
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "the file system of %s lacks locks (%s): take care that no other run writes there, too.",
                self.folder,
                error.strerror or error,
            )
            return None
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        descriptor = self._open()
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(about).encode())
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Release the lock and delete its file. Does nothing the second time."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._file.unlink()
            self._lock.release()

    def _open(self, more: int = 0) -> int:
        """Open the file, which may have been put there by anybody: never through a link, nor one with another name."""
        wrong = OSError(errno.EINVAL, f"{NAME} there is a link, or not a regular file: delete it")
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | more, 0o644)
        except OSError as error:
            raise wrong if error.errno == errno.ELOOP else error from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            raise wrong
        return descriptor


def _holder(text: bytes) -> str:
    try:
        about = json.loads(text)
        return f"process {about['pid']} on host {about['host']} since {about['since']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
