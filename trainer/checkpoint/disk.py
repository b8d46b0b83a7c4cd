"""Files and folders that are wholly there or not there, whatever happens while they are written.

The order is always the same: write under a temporary name, flush the contents (fsync of each file, then of the folder
that names it), rename, flush the folder in which the rename happened. A crash leaves at most a leftover, known by its
name:

    .tmp-<name>-<pid>-<random>       being written or deleted: worthless once its process is gone
    .old-<name>-<pid>-<random>       being replaced, where the system cannot exchange two folders: may have to go back
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import secrets
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

_CHUNK = 16 << 20
_LEFTOVER = re.compile(r"\.(tmp|old)-(.+)-(\d+)-[0-9a-f]{8}")


@dataclass(frozen=True)
class FileEntry:
    """What a file must be: its size in bytes and the SHA-256 of its contents, in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Leftover:
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
    return path.with_name(f".{kind}-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def leftovers(folder: Path) -> Iterator[Leftover]:
    """The temporary files and folders in `folder`, of living processes too."""
    for path in sorted(folder.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match:
            yield Leftover(path, match[1], match[2], int(match[3]))


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
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def replace_file(path: Path, contents: bytes) -> None:
    """Give a small file new contents: readers see the old ones or the new ones."""
    temporary = temporary_beside(path)
    try:
        write_file(temporary, [contents])
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish_folder(temporary: Path, final: Path, replace: bool) -> None:
    """Make a finished folder appear at `final` by one rename.

    Args:
        replace: `final` exists and is to be replaced. The two are exchanged in one step where the system can do that
            (Linux on its usual file systems); the old one is then under the name `temporary`. Elsewhere the old one is
            first renamed aside, to where `CheckpointStore.clean` finds it if the process dies right then.
    """
    sync_folder(temporary)
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
    sync_folder(final.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder that others may be about to open: it disappears in one step, then its contents go."""
    doomed = temporary_beside(folder)
    os.rename(folder, doomed)
    sync_folder(folder.parent)
    shutil.rmtree(doomed)


class HashedReader:
    """Reads a file from its start and hashes what it hands out, so that what is checked is what is used."""

    def __init__(self, file: BinaryIO, hashing: bool, where: str) -> None:
        self._file = file
        self._digest = hashlib.sha256() if hashing else None
        self._where = where

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes.

        Raises:
            CheckpointError: the file ends before.
        """
        data = self._file.read(size)
        self._check(len(data), size)
        if self._digest:
            self._digest.update(data)
        return data

    def read_into(self, view: memoryview) -> None:
        """Fill `view`.

        Raises:
            CheckpointError: the file ends before.
        """
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            self._check(self._file.readinto(part), len(part))  # type: ignore[attr-defined]  # a BufferedReader has it
            if self._digest:
                self._digest.update(part)

    def hexdigest(self) -> str | None:
        """SHA-256 of all that was read; None when not hashing."""
        return self._digest.hexdigest() if self._digest else None

    def _check(self, got: int, wanted: int) -> None:
        if got != wanted:
            raise CheckpointError(f"{self._where} ended {wanted - got} bytes too early while it was read")


@contextmanager
def open_entry(path: Path, entry: FileEntry, hashing: bool) -> Iterator[HashedReader]:
    """Open a file for reading that must be exactly `entry`; when it was read to its end, its hash is checked.

    Raises:
        CheckpointError: it is missing, unreadable, not a regular file, or of another size; at the end of the block: of
            another hash.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is a symbolic link or no regular file: a checkpoint consists of files only")
        if status.st_size != entry.bytes:
            raise CheckpointError(f"{path} has {status.st_size} bytes, but {entry.bytes} were written: it is damaged")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            reader = HashedReader(file, hashing, str(path))
            yield reader
            if hashing and reader.hexdigest() != entry.sha256:
                raise CheckpointError(f"{path} is damaged: its checksum differs from that in the manifest")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_entry(path: Path, entry: FileEntry, hashing: bool) -> str | None:
    """What is wrong with a file, or None."""
    try:
        with open_entry(path, entry, hashing) as reader:
            for start in range(0, entry.bytes if hashing else 0, _CHUNK):
                reader.read(min(_CHUNK, entry.bytes - start))
    except CheckpointError as error:
        return str(error)
    return None


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
