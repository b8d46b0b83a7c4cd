"""Write files and directories atomically on a local or mounted file system.

The order is always the same: write under a temporary name, flush the contents (fsync of each file, then of the
directory that names it), rename, flush the directory in which the rename happened. A crash leaves at most a leftover,
recognized by its name:

    .tmp-<name>-<pid>-<random>       being written or deleted: worthless once its process is gone
    .old-<name>-<pid>-<random>       being replaced, where the system cannot exchange directories: may have to go back
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainer.errors import CheckpointError
from trainer.fault_tolerance.fault_points import fault_point

MANIFEST_FILE = "manifest.json"
"""The file, written last, that makes a directory a checkpoint."""

_LEFTOVER = re.compile(r"\.(tmp|old)-(.+)-(\d+)-[0-9a-f]{8}")
_log = logging.getLogger("trainer")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    bytes: int
    sha256: str


class WriteError(CheckpointError):
    """The disk or the network did not take a checkpoint; earlier checkpoints are unchanged."""


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there in the block replaces `path` at its end, or nothing changes."""
    temporary = temporary_beside(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


class LocalStorage:
    """Checkpoints in directories of a file system; see `Storage` for the contract."""

    @contextmanager
    def atomic_directory(self, final: Path, replace: bool) -> Iterator[Path]:
        temporary = temporary_beside(final)
        try:
            make_directory(final.parent)
            temporary.mkdir()
            yield temporary
            publish_directory(temporary, final, replace)
        except OSError as error:
            raise WriteError(_write_failure(final, temporary, error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # a partial one, or after an exchange the replaced one

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Also flush the contents to the disk, but not yet the name."""
        digest = hashlib.sha256()
        size = 0
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                fault_point("in_file")
            file.flush()
            os.fsync(file.fileno())
        fault_point("after_file")
        return FileEntry(size, digest.hexdigest())

    def replace_file(self, path: Path, contents: bytes) -> None:
        with atomic_file(path) as temporary:
            self.write_file(temporary, [contents])
            fault_point("before_pointer")
        fault_point("after_pointer")

    @contextmanager
    def open_file(self, path: Path) -> Iterator[tuple[BinaryIO, int]]:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is a symbolic link or not a regular file: a checkpoint has only files")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            yield file, status.st_size

    def path_in_use(self, path: Path) -> bool:
        return path.exists() or path.is_symlink()

    def remove_checkpoint(self, folder: Path) -> None:
        doomed = temporary_beside(folder)
        os.rename(folder, doomed)
        sync_directory(folder.parent)
        fault_point("in_removal")
        shutil.rmtree(doomed)

    def leftovers(self, folder: Path) -> list[Path]:
        return [leftover.path for leftover in _temporary_paths(folder)]

    def remove_leftovers(self, folder: Path, max_age: float) -> list[Path]:
        """Also move a checkpoint back into place whose replacement was interrupted between two renames."""
        removed = []
        for leftover in _temporary_paths(folder):
            if not leftover.is_dead(max_age):
                continue
            final = leftover.path.with_name(leftover.name)
            if leftover.kind == "old" and (leftover.path / MANIFEST_FILE).is_file() and not final.exists():
                leftover.path.rename(final)
                sync_directory(folder)
                _log.warning("The checkpoint %s was being replaced when its process died; the old one is back.", final)
                continue
            if leftover.path.is_dir():
                shutil.rmtree(leftover.path, ignore_errors=True)
            else:
                leftover.path.unlink(missing_ok=True)
            removed.append(leftover.path)
        return removed


@dataclass(frozen=True)
class TemporaryPath:
    """A temporary file or directory that a process left behind or is still using."""

    path: Path
    kind: str
    name: str
    """The name of the file or directory that it was to become, or was."""
    pid: int

    def is_dead(self, max_age: float) -> bool:
        """Return True if its process is gone from this machine, or nothing touched it for `max_age` seconds."""
        try:
            idle = time.time() - self.path.stat().st_mtime
            os.kill(self.pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        except PermissionError:
            pass
        return idle > max_age


def temporary_beside(path: Path, kind: str = "tmp") -> Path:
    """Return an unused name in the same directory: renaming from there to `path` never crosses file systems."""
    return path.with_name(f".{kind}-{path.name}-{os.getpid()}-{os.urandom(4).hex()}")


def sync_directory(folder: Path) -> None:
    """Flush the names in `folder` to the disk, so that they survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(folder: Path) -> None:
    """Create `folder` and its missing parents, flushing each name to the disk."""
    if not folder.is_dir():
        make_directory(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def publish_directory(temporary: Path, final: Path, replace: bool) -> None:
    """Make a finished directory appear at `final` by one rename.

    Args:
        replace: `final` exists and is to be replaced. The two are exchanged in one step where the system can do that
            (Linux on its usual file systems); the old one is then under the name `temporary`. Elsewhere the old one is
            first renamed aside, to where `CheckpointDirectory.clean` finds it if the process dies right then.
    """
    sync_directory(temporary)
    fault_point("before_rename")
    if not replace:
        os.rename(temporary, final)
    elif not _exchange(temporary, final):
        aside = temporary_beside(final, "old")
        os.rename(final, aside)
        try:
            os.rename(temporary, final)
        except OSError:
            os.rename(aside, final)
            raise
        sync_directory(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    fault_point("after_rename")
    sync_directory(final.parent)


def _temporary_paths(folder: Path) -> Iterator[TemporaryPath]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _LEFTOVER.fullmatch(path.name):
            yield TemporaryPath(path, match[1], match[2], int(match[3]))


def _write_failure(final: Path, temporary: Path, error: OSError) -> str:
    shutil.rmtree(temporary, ignore_errors=True)
    message = f"cannot write the checkpoint {final}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and final.parent.is_dir():
        message += f" ({shutil.disk_usage(final.parent).free / 1e6:.0f} MB are free there)"
    message += ". Earlier checkpoints are unchanged; "
    if temporary.exists():
        return message + f"partial files could not be removed and remain in {temporary}."
    return message + "the partial one was removed."


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False, with nothing changed, where the system cannot."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return int(rename(here, os.fsencode(one), here, os.fsencode(other), exchange)) == 0
