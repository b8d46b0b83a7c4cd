"""Store checkpoints in a local directory or an object store, and read their files with checks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar

from trainer.arguments import URL, kept_path, local_path
from trainer.checkpoint.disk import Digest, FileEntry, LocalStorage, ReadError, new_digest, read_failure
from trainer.checkpoint.remote import RemotePath, RemoteStorage, check_url
from trainer.errors import CheckpointError, ConfigError

StoragePath: TypeAlias = Path | RemotePath
PathT = TypeVar("PathT", Path, RemotePath)

_CHUNK = 16 << 20


def as_storage_path(path: str | StoragePath, argument: str = "") -> StoragePath:
    """Parse a path on this machine or a URL such as "s3://bucket/run". "file:///data/run" is the path /data/run.

    `~` is the home folder, as in `local_path`.

    Args:
        argument: the name of the argument whose value the path is, for messages.

    Raises:
        ConfigError: there is no such user, fsspec cannot open the URL, or the `Path` was made from a URL and has lost a
            slash.
    """
    if isinstance(path, RemotePath):
        return path
    url = URL.fullmatch(str(path))
    if url is None or url["scheme"].lower() in ("file", "local"):
        return local_path(path, argument)
    given = f"{argument}={path!r}".removeprefix("=")
    if not url["rest"].startswith("/"):
        right = str(path).replace(":/", "://", 1)
        raise ConfigError(f"{given} is not a URL, perhaps because a Path was made of one: give the text {right!r}.")
    check_url(str(path), given)
    return RemotePath(f"{url['scheme']}://{url['rest'][1:].rstrip('/')}")


def real_path(path: StoragePath) -> StoragePath:
    """Return the real path of a place on this machine, without links; a URL unchanged."""
    return path.resolve() if isinstance(path, Path) else path


def checkpoint_may_exist(ckpt_path: Any) -> bool:
    """Return True if `ckpt_path` exists, or may exist: `.../last` and `.../best` are resolved later."""
    if ckpt_path in (None, "last", "best"):
        return True
    path = as_storage_path(ckpt_path, "ckpt_path")
    return path.exists() or (path.name in ("last", "best") and path.parent.exists())


def kept_storage_path(path: str | StoragePath, argument: str = "") -> StoragePath:
    """Return `as_storage_path`, on this machine as `kept_path`."""
    found = as_storage_path(path, argument)
    return kept_path(found) if isinstance(found, Path) else found


def require_writable(folder: StoragePath, given: str) -> None:
    """Write a small object into the folder of an object store, and delete it again.

    Raises:
        ConfigError: the store does not take it.
    """
    if not isinstance(folder, RemotePath):
        return
    probe = folder / f".probe-{os.urandom(4).hex()}.json"
    try:
        probe.call(lambda store, key: store.open(key, "wb").close())
    except (OSError, NotImplementedError) as error:
        why = str(error) or "this kind of URL can only be read"
        raise ConfigError(f"{given} cannot be written: {why}. Give a folder, or the URL of a store.") from error
    with suppress(OSError):
        probe.delete()


class Storage(Protocol[PathT]):
    """The operations that differ between a file system and an object store."""

    def atomic_directory(self, final: PathT, replace: bool) -> AbstractContextManager[PathT]:
        """Give a directory whose contents appear at `final` at the end of the block, or not at all.

        Args:
            replace: there is a checkpoint at `final`, which is to be replaced.

        Raises:
            WriteError: the disk is full, or the storage refuses; what was at `final` is unchanged.
        """

    def write_file(self, path: PathT, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Write a new file into such a directory, hashing it; `chunks` is iterated again if the write is repeated."""

    def replace_file(self, path: PathT, contents: bytes) -> None:
        """Replace a small file atomically: readers see the old contents or the new ones."""

    def open_file(self, path: PathT) -> AbstractContextManager[tuple[BinaryIO, int]]:
        """Open a regular file for reading; give the file and its size in bytes.

        Raises:
            CheckpointError: it is a symbolic link or otherwise not a regular file.
            OSError: it is missing or unreadable.
        """

    def entries(self, folder: PathT) -> frozenset[tuple[str, int]]:
        """Return the entries of a folder; they change when one is added, removed or (on a disk) replaced.

        Raises:
            OSError: an object store does not answer; what a disk cannot list has no entries.
        """

    def modified(self, path: PathT) -> float | None:
        """Return the time of a file's last write in seconds since 1970; None where the storage does not report it.

        Raises:
            OSError: the file is missing or unreadable.
        """

    def path_in_use(self, path: PathT) -> bool:
        """Return True if something is there that a new checkpoint would harm."""

    def remove_checkpoint(self, folder: PathT) -> None:
        """Delete a committed checkpoint: for readers it disappears in one step.

        Without a manifest there is no checkpoint: on a disk nothing is deleted, in an object store the files that an
        interrupted removal left.
        """

    def leftovers(self, folder: PathT) -> list[PathT]:
        """Return what interrupted writes left in `folder`, and what is being written now."""

    def remove_leftovers(self, folder: PathT, max_age: float) -> list[PathT]:
        """Delete leftovers of dead processes, or untouched for `max_age` seconds; return the deleted paths."""


_LOCAL: Storage[Path] = LocalStorage()
_REMOTE: Storage[RemotePath] = RemoteStorage()


def storage_of(path: StoragePath) -> Storage[Any]:
    """Return the storage of a path."""
    return _REMOTE if isinstance(path, RemotePath) else _LOCAL


class _NoDigest:
    """Takes the place of a checksum that nobody asks for."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str:
        return ""


class HashedReader:
    """Read a file from its start and hash the bytes it returns, so that the bytes checked are the bytes used.

    Args:
        algorithm: one of `ALGORITHMS`; None: do not hash.
    """

    def __init__(self, file: BinaryIO, algorithm: str | None, where: str) -> None:
        self._file = file
        self._digest: Digest = new_digest(algorithm) if algorithm else _NoDigest()
        self._where = where

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes.

        Raises:
            CheckpointError: the file ends too early.
        """
        data = self._file.read(size)
        self._check(len(data), size)
        self._digest.update(data)
        return data

    def read_into(self, view: memoryview) -> None:
        """Fill `view`.

        Raises:
            CheckpointError: the file ends too early.
        """
        for start in range(0, len(view), _CHUNK):
            part = view[start : start + _CHUNK]
            self._check(self._file.readinto(part), len(part))  # type: ignore[attr-defined]  # a BufferedReader has it
            self._digest.update(part)

    def hexdigest(self) -> str:
        """Return the checksum of all bytes read so far."""
        return self._digest.hexdigest()

    def _check(self, got: int, wanted: int) -> None:
        if got != wanted:
            raise CheckpointError(f"{self._where} ended {wanted - got} bytes too early while it was read")


@contextmanager
def reading(path: StoragePath) -> Iterator[None]:
    """Raise an OSError of the block as a CheckpointError: as ReadError if the storage did not answer."""
    try:
        yield
    except OSError as error:
        raise read_failure(path, error) from error


@contextmanager
def open_entry(path: StoragePath, entry: FileEntry, hashing: bool) -> Iterator[HashedReader]:
    """Open a file for reading that must match `entry`; at the end of the block, check its hash.

    Raises:
        CheckpointError: it is missing, unreadable, not a regular file, or differs in size or, at the end, in hash.
    """
    try:
        with storage_of(path).open_file(path) as (file, size):
            if size != entry.bytes:
                raise CheckpointError(f"{path} has {size} bytes, but {entry.bytes} were written: it is damaged")
            reader = HashedReader(file, entry.algorithm if hashing else None, str(path))
            yield reader
            if hashing and reader.hexdigest() != entry.checksum:
                raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest's")
    except OSError as error:
        raise read_failure(path, error) from error


def read_small_file(path: StoragePath, max_size: int) -> bytes:
    """Return the contents of a file of at most `max_size` bytes.

    Raises:
        CheckpointError: it is larger, missing, unreadable, or not a regular file.
    """
    with reading(path), storage_of(path).open_file(path) as (file, size):
        if size > max_size:
            raise CheckpointError(f"{path} has {size} bytes, more than the limit of {max_size}: it is damaged")
        return file.read(size)


def check_entry(path: StoragePath, entry: FileEntry, hashing: bool) -> str | None:
    """Return a description of the damage to a file, or None.

    Raises:
        ReadError: the storage does not answer.
    """
    try:
        with open_entry(path, entry, hashing) as reader:
            if hashing:
                buffer = memoryview(bytearray(min(_CHUNK, entry.bytes)))
                for start in range(0, entry.bytes, _CHUNK):
                    reader.read_into(buffer[: entry.bytes - start])
    except ReadError:
        raise
    except CheckpointError as error:
        return str(error)
    return None
