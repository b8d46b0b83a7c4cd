"""Write checkpoints to an object store, which has no rename: a directory is a checkpoint once its manifest exists.

Files are written in place, one after the other, the manifest last. A directory without a manifest is an interrupted
write or one in progress, and readers skip it. Deleting starts with the manifest.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainer.checkpoint.disk import MANIFEST_FILE, FileEntry, WriteError
from trainer.errors import CheckpointError, ConfigError
from trainer.fault_tolerance.fault_points import fault_point

_SUFFIXES = (".json", ".safetensors")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL that fsspec can open, such as s3://bucket/run, with the methods of `pathlib.Path` that are needed here.

    Credentials and options come from fsspec's own configuration. Network errors are raised as OSError.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}{'' if self.url.endswith('/') else '/'}{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The URL up to the last slash; the root of the store is its own parent."""
        above = self.url.rpartition("/")[0]
        return RemotePath(f"{above}/" if above.endswith("/") else above)

    def absolute(self) -> RemotePath:
        """Return the URL itself."""
        return self

    def exists(self) -> bool:
        """Return True if there is an object of this name, or one below it."""
        with self._open_store() as (store, path):
            return bool(store.exists(path))

    def is_file(self) -> bool:
        """Return True if there is an object of this name."""
        with self._open_store() as (store, path):
            return bool(store.isfile(path))

    def is_dir(self) -> bool:
        """Return True if there are objects below this name."""
        with self._open_store() as (store, path):
            return bool(store.isdir(path))

    def is_symlink(self) -> bool:
        """Return False: an object store has no links."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the direct children, sorted by name; none if there is nothing."""
        with self._open_store() as (store, path):
            try:
                found = store.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                found = []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found}
        yield from (self / name for name in sorted(names - {""}))

    def read_bytes(self) -> bytes:
        """Return the contents of a small object."""
        with self._open_store() as (store, path):
            return bytes(store.cat_file(path))

    def modified(self) -> float | None:
        """Return the time of the last write in seconds since 1970; None where the store does not report it."""
        with suppress(NotImplementedError), self._open_store() as (store, path):
            return float(store.modified(path).timestamp())
        return None

    @contextmanager
    def _open_store(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's file system and the path in it; raise errors of any client library as OSError."""
        store, path = _store(self.url)
        try:
            yield store, path
        except (OSError, CheckpointError, NotImplementedError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


def check_url(url: str) -> None:
    """Check that fsspec supports this kind of URL; open no connection.

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
        # Cached listings would not show the files that other processes write.
        store, path = url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{url!r}: fsspec cannot open it: {error}") from None
    return store, str(path)


class RemoteStorage:
    """Checkpoints in an object store; see `Storage` for the contract."""

    @contextmanager
    def atomic_directory(self, final: RemotePath, replace: bool) -> Iterator[RemotePath]:
        """Yield `final` itself: files are written in place, and the manifest makes the directory valid."""
        if replace:
            raise WriteError(
                f"{final} exists, and an object store cannot replace it in one step: give another name, or delete it."
            )
        try:
            for entry in final.iterdir():  # an interrupted write of the same name
                with entry._open_store() as (store, path):
                    store.rm_file(path)
            with final._open_store() as (store, path), suppress(OSError, NotImplementedError):
                store.makedirs(path, exist_ok=True)  # for stores that have directories
            yield final
        except OSError as error:
            raise WriteError(
                f"cannot write the checkpoint {final}: {error.strerror or error}. Earlier checkpoints are unchanged; "
                "the files written so far have no manifest and are ignored."
            ) from error

    def write_file(self, path: RemotePath, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Overwrite an object of this name."""
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

    def replace_file(self, path: RemotePath, contents: bytes) -> None:
        fault_point("before_pointer")
        with path._open_store() as (store, place):
            store.pipe_file(place, contents)
        fault_point("after_pointer")

    @contextmanager
    def open_file(self, path: RemotePath) -> Iterator[tuple[BinaryIO, int]]:
        with path._open_store() as (store, place), store.open(place, "rb") as file:
            yield file, int(store.size(place))

    def path_in_use(self, path: RemotePath) -> bool:
        """Return False also for the files of an interrupted write: a new checkpoint may overwrite them."""
        return path.is_file() or (any(path.iterdir()) and not _is_unfinished(path))

    def remove_checkpoint(self, folder: RemotePath) -> None:
        """Delete the manifest first: without it the other files are ignored."""
        with (folder / MANIFEST_FILE)._open_store() as (store, place):
            store.rm_file(place)
        fault_point("in_removal")
        with folder._open_store() as (store, place):
            store.rm(place, recursive=True)

    def leftovers(self, folder: RemotePath) -> list[RemotePath]:
        return [child for child in folder.iterdir() if not child.name.endswith(_SUFFIXES) and _is_unfinished(child)]

    def remove_leftovers(self, folder: RemotePath, max_age: float) -> list[RemotePath]:
        """Go by age alone, and delete nothing where the store reports no times."""
        removed = []
        for child in self.leftovers(folder):
            times = [entry.modified() for entry in child.iterdir()]
            if all(written is not None and time.time() - written > max_age for written in times):
                with child._open_store() as (store, place):
                    store.rm(place, recursive=True)
                removed.append(child)
        return removed


def _is_unfinished(folder: RemotePath) -> bool:
    """Return True for a directory with files of a checkpoint but no manifest."""
    names = [entry.name for entry in folder.iterdir()]
    return bool(names) and MANIFEST_FILE not in names and all(name.endswith(_SUFFIXES) for name in names)
