"""Checkpoints in an object store: there is no rename there, so a folder is a checkpoint once its last file exists.

Files are written in place, one after the other, and the one that makes the folder valid last. A folder without it is
what an interrupted write left, or one that is being written: readers pass over it. Deleting begins with that file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer.checkpoint.disk import FileEntry, WriteError
from trainer.errors import CheckpointError, ConfigError
from trainer.fault_tolerance.fault_points import fault_point

_SUFFIXES = (".json", ".safetensors")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL that fsspec understands, such as s3://bucket/run; with the methods of `pathlib.Path` that are needed here.

    Credentials and options are those of fsspec's own configuration. An error of the network is an OSError.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}{'' if self.url.endswith('/') else '/'}{name}")

    @property
    def name(self) -> str:
        """What stands after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL up to the last slash; that of the whole store is its own."""
        above = self.url.rpartition("/")[0]
        return RemotePath(f"{above}/" if above.endswith("/") else above)

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it."""
        with self._open_store() as (store, path):
            return bool(store.exists(path))

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        with self._open_store() as (store, path):
            return bool(store.isfile(path))

    def is_dir(self) -> bool:
        """Whether there are objects below this name."""
        with self._open_store() as (store, path):
            return bool(store.isdir(path))

    def is_symlink(self) -> bool:
        """An object store has no links."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """What is directly below, by name; nothing where nothing is."""
        with self._open_store() as (store, path):
            try:
                found = store.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                found = []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found}
        yield from (self / name for name in sorted(names - {""}))

    def read_bytes(self) -> bytes:
        """The contents of a small object."""
        with self._open_store() as (store, path):
            return bytes(store.cat_file(path))

    def modified(self) -> float | None:
        """When it was written, in seconds since 1970; None where the store does not tell."""
        with suppress(NotImplementedError), self._open_store() as (store, path):
            return float(store.modified(path).timestamp())
        return None

    @contextmanager
    def _open_store(self) -> Iterator[tuple[Any, str]]:
        """fsspec's file system and the path in it; errors of any client library come out as OSError."""
        store, path = _store(self.url)
        try:
            yield store, path
        except (OSError, CheckpointError, NotImplementedError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def check_url(url: str) -> None:
    """Find out whether fsspec can reach such places at all; opens no connection.

    Raises:
        ConfigError: the scheme is unknown, or its package is not installed.
    """
    _store(url)


def _store(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(f"{url!r} is a URL, which needs the package fsspec. Install it: pip install fsspec") from None
    try:
        # Listings that are remembered do not show what other processes write.
        store, path = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url!r}: fsspec cannot open it: {error}") from None
    return store, str(path)


@contextmanager
def atomic_directory(final: RemotePath, replace: bool) -> Iterator[RemotePath]:
    """`final` itself: files are written in place, and the last one makes the folder valid.

    Raises:
        WriteError: the store refuses; what is there has no manifest. Or `replace`: nothing can be replaced in one step.
    """
    if replace:
        raise WriteError(
            f"{final} exists, and an object store cannot replace it in one step: give another name, or delete it."
        )
    try:
        _clear(final)
        with final._open_store() as (store, path), suppress(OSError, NotImplementedError):
            store.makedirs(path, exist_ok=True)  # where folders have to be made; else no matter
        yield final
    except OSError as error:
        raise WriteError(
            f"cannot write the checkpoint {final}: {error.strerror or error}. Earlier checkpoints are unchanged; what "
            "was written of this one has no manifest and counts for nothing."
        ) from error


def write_file(path: RemotePath, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write an object, hashing on the way. Where it exists it gets these contents."""
    digest = hashlib.sha256()
    size = 0
    with path._open_store() as (store, place):
        with store.open(place, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                fault_point("in_file")
        written = int(store.size(place))
    if written != size:
        raise OSError(f"{path} has {written} bytes after {size} were written")
    fault_point("after_file")
    return FileEntry(size, digest.hexdigest())


def replace_file(path: RemotePath, contents: bytes) -> None:
    """Give a small object new contents: readers see the old ones or the new ones."""
    fault_point("before_pointer")
    with path._open_store() as (store, place):
        store.pipe_file(place, contents)
    fault_point("after_pointer")


def remove_folder(folder: RemotePath, mark: str) -> None:
    """Delete what is below; the object `mark` first, without which the rest counts for nothing."""
    with (folder / mark)._open_store() as (store, place):
        store.rm_file(place)
    fault_point("in_removal")
    with folder._open_store() as (store, place):
        store.rm(place, recursive=True)


@contextmanager
def open_file(path: RemotePath) -> Iterator[tuple[BinaryIO, int]]:
    """An object, open for reading, and its size in bytes."""
    with path._open_store() as (store, place), store.open(place, "rb") as file:
        yield file, int(store.size(place))


def is_leftover(folder: RemotePath, mark: str) -> bool:
    """Whether it looks like a checkpoint that was not finished: such files, and not the one that makes it valid."""
    names = [entry.name for entry in folder.iterdir()]
    return bool(names) and mark not in names and all(name.endswith(_SUFFIXES) for name in names)


def path_in_use(folder: RemotePath, mark: str) -> bool:
    """Whether something is there that a new checkpoint would harm."""
    return folder.is_file() or (any(folder.iterdir()) and not is_leftover(folder, mark))


def remove_leftovers(folder: RemotePath, mark: str, max_age: float) -> list[RemotePath]:
    """Delete the unfinished checkpoints below, to which nothing was added for `max_age` seconds; returns them.

    Where the store does not tell times, nothing is deleted.
    """
    removed = []
    for child in folder.iterdir():
        if child.name.endswith(_SUFFIXES) or not is_leftover(child, mark):
            continue
        times = [entry.modified() for entry in child.iterdir()]
        if all(written is not None and time.time() - written > max_age for written in times):
            with child._open_store() as (store, place):
                store.rm(place, recursive=True)
            removed.append(child)
    return removed


def _clear(final: RemotePath) -> None:
    """Delete what an interrupted write left at this very name."""
    for entry in final.iterdir():
        with entry._open_store() as (store, place):
            store.rm_file(place)
