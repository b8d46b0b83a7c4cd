"""Where a checkpoint is, a folder on a disk or in an object store, and the few operations that differ between them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

from trainer.checkpoint import disk, remote
from trainer.checkpoint.disk import FileEntry
from trainer.checkpoint.remote import RemotePath
from trainer.errors import CheckpointError, ConfigError

StoragePath: TypeAlias = Path | RemotePath

_CHUNK = 16 << 20
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.:-]+)://(?P<rest>.*)", re.DOTALL)
_SQUEEZED_URL = re.compile(r"[a-z][a-z0-9+.:-]+:/[^/]")


def as_storage_path(path: str | StoragePath) -> StoragePath:
    """A path on this machine, or a URL such as "s3://bucket/run". "file:///data/run" is the path /data/run.

    Raises:
        ConfigError: a URL that fsspec cannot open; a `Path` that was made of a URL, which lost a slash by that.
    """
    if isinstance(path, RemotePath):
        return path
    url = _URL.fullmatch(str(path))
    if url is None:
        if isinstance(path, Path) and _SQUEEZED_URL.match(str(path)):
            raise ConfigError(f"{path!r} was a URL before it became a Path: give it as a text.")
        return Path(path)
    if url["scheme"] in ("file", "local"):
        return Path(url["rest"])
    remote.check_url(str(path))
    return RemotePath(str(path).rstrip("/"))


def atomic_directory(final: StoragePath, replace: bool) -> AbstractContextManager[StoragePath]:
    """The files written into the folder it gives appear at `final` as a whole; the one that makes it valid last.

    Raises:
        WriteError: they do not; what was there before is unchanged.
    """
    return (
        remote.atomic_directory(final, replace)
        if isinstance(final, RemotePath)
        else disk.atomic_directory(final, replace)
    )


def write_file(path: StoragePath, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file of such a folder, hashing on the way."""
    return remote.write_file(path, chunks) if isinstance(path, RemotePath) else disk.write_file(path, chunks)


def replace_file(path: StoragePath, contents: bytes) -> None:
    """Give a small file new contents: readers see the old ones or the new ones."""
    return remote.replace_file(path, contents) if isinstance(path, RemotePath) else disk.replace_file(path, contents)


def remove_folder(folder: StoragePath, mark: str) -> None:
    """Delete a folder that is valid by its file `mark`: for readers it disappears in one step."""
    return remote.remove_folder(folder, mark) if isinstance(folder, RemotePath) else disk.remove_folder(folder)


def path_in_use(path: StoragePath, mark: str) -> bool:
    """Whether something is there; what an interrupted write left in an object store is nothing."""
    if isinstance(path, RemotePath):
        return remote.path_in_use(path, mark)
    return path.exists() or path.is_symlink()


def open_file(path: StoragePath) -> AbstractContextManager[tuple[BinaryIO, int]]:
    """A regular file, open for reading, and its size in bytes."""
    return remote.open_file(path) if isinstance(path, RemotePath) else disk.open_file(path)


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
def open_entry(path: StoragePath, entry: FileEntry, hashing: bool) -> Iterator[HashedReader]:
    """Open a file for reading that must be exactly `entry`; when it was read to its end, its hash is checked.

    Raises:
        CheckpointError: it is missing, unreadable, not a regular file, or of another size; at the end of the block: of
            another hash.
    """
    try:
        with open_file(path) as (file, size):
            if size != entry.bytes:
                raise CheckpointError(f"{path} has {size} bytes, but {entry.bytes} were written: it is damaged")
            reader = HashedReader(file, hashing, str(path))
            yield reader
            if hashing and reader.hexdigest() != entry.sha256:
                raise CheckpointError(f"{path} is damaged: its checksum differs from that in the manifest")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def read_small_file(path: StoragePath, most: int) -> bytes:
    """The whole contents of a file of at most so many bytes.

    Raises:
        CheckpointError: it is larger, missing, unreadable, or no regular file.
    """
    try:
        with open_file(path) as (file, size):
            if size > most:
                raise CheckpointError(f"{path} has {size} bytes, more than it can have: it is damaged")
            return file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def check_entry(path: StoragePath, entry: FileEntry, hashing: bool) -> str | None:
    """What is wrong with a file, or None."""
    try:
        with open_entry(path, entry, hashing) as reader:
            for start in range(0, entry.bytes if hashing else 0, _CHUNK):
                reader.read(min(_CHUNK, entry.bytes - start))
    except CheckpointError as error:
        return str(error)
    return None
