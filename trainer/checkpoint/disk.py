"""Files and folders that are wholly there or not there, whatever happens while they are written.

The order is always the same: write under a temporary name, flush the contents (fsync of each file, then of the folder
that names it), rename, flush the folder in which the rename happened. A crash leaves at most a leftover, known by its
name:

    .tmp-<name>-<pid>-<random>       being written or deleted: worthless once its process is gone
    .old-<name>-<pid>-<random>       being replaced, where the system cannot exchange two folders: may have to go back
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
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

_LEFTOVER = re.compile(r"\.(tmp|old)-(.+)-(\d+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class FileEntry:
    """What a file must be: its size in bytes and the SHA-256 of its contents, in hexadecimal."""

    bytes: int
    sha256: str


class WriteError(CheckpointError):
    """The disk or the network did not take a checkpoint; those before it are unchanged."""


@dataclass(frozen=True)
class TemporaryPath:
    """A temporary file or folder that a process left, or is using."""

    path: Path
    kind: str
    name: str
    """The name of what it was to become, or was."""
    pid: int

    def is_dead(self, max_age: float) -> bool:
        """Its process is gone from this machine, or nothing touched it for `max_age` seconds."""
        try:
            idle = time.time() - self.path.stat().st_mtime
            os.kill(self.pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        except PermissionError:
            pass
        return idle > max_age


def temporary_beside(path: Path, kind: str = "tmp") -> Path:
    """A name in the same folder that nobody has: renaming from there to `path` never crosses file systems."""
    return path.with_name(f".{kind}-{path.name}-{os.getpid()}-{os.urandom(4).hex()}")


def leftovers(folder: Path) -> Iterator[TemporaryPath]:
    """The temporary files and folders in `folder`, of living processes too."""
    for path in sorted(folder.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match:
            yield TemporaryPath(path, match[1], match[2], int(match[3]))


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create it and its parents, durably, where they are missing."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file, hashing on the way, and flush its contents to the disk (but not yet its name)."""
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


def replace_file(path: Path, contents: bytes) -> None:
    """Give a small file new contents: readers see the old ones or the new ones."""
    temporary = temporary_beside(path)
    try:
        write_file(temporary, [contents])
        fault_point("before_pointer")
        os.replace(temporary, path)
        sync_folder(path.parent)
        fault_point("after_pointer")
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(final: Path, replace: bool) -> Iterator[Path]:
    """A temporary folder: what is written into it in the block appears at `final` at its end, or not at all.

    Args:
        replace: there is a folder at `final`, which is to be replaced.

    Raises:
        WriteError: the disk is full or refuses. What was at `final` is unchanged.
    """
    temporary = temporary_beside(final)
    try:
        make_folder(final.parent)
        temporary.mkdir()
        yield temporary
        publish_folder(temporary, final, replace)
    except OSError as error:
        raise WriteError(_write_failure(final, temporary, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a partial one, or after an exchange the one that was replaced


def publish_folder(temporary: Path, final: Path, replace: bool) -> None:
    """Make a finished folder appear at `final` by one rename.

    Args:
        replace: `final` exists and is to be replaced. The two are exchanged in one step where the system can do that
            (Linux on its usual file systems); the old one is then under the name `temporary`. Elsewhere the old one is
            first renamed aside, to where `CheckpointDirectory.clean` finds it if the process dies right then.
    """
    sync_folder(temporary)
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
        sync_folder(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    fault_point("after_rename")
    sync_folder(final.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder that others may be about to open: it disappears in one step, then its contents go."""
    doomed = temporary_beside(folder)
    os.rename(folder, doomed)
    sync_folder(folder.parent)
    fault_point("in_removal")
    shutil.rmtree(doomed)


@contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file, open for reading, and its size in bytes.

    Raises:
        CheckpointError: it is a symbolic link or something else that is not a regular file.
        OSError: it is missing or unreadable.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is a symbolic link or no regular file: a checkpoint consists of files only")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        yield file, status.st_size


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
    """Swap two names in one step; False where the system cannot (then nothing happened)."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return int(rename(here, os.fsencode(one), here, os.fsencode(other), exchange)) == 0
