"""Write checkpoints to an object store, which has no rename: a directory is a checkpoint once its manifest exists.

Files are written in place, one after the other, the manifest last. A directory without a manifest is an interrupted
write or one in progress, and readers skip it. Deleting starts with the manifest. The files of a checkpoint that
replaces another are in a folder in it, which the new manifest names. An operation that fails is tried again, as
`PAUSES` says. tenacity was tried: it saves no line, and draws its pauses from the generator of the user's program; of
fsspec's stores some try again, each in its own way, and most do not. Stores have to show at once what was written, as
Amazon's (since 2020), Google's and Microsoft's do.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, TypeVar

from trainer.checkpoint.disk import MANIFEST_FILE, FileEntry, WriteError, reason, write_chunks
from trainer.errors import CheckpointError, ConfigError
from trainer.fault_tolerance.fault_points import fault_point

_JITTER = random.SystemRandom()
"""Not the generator of the user's program, whose numbers would be others after a try that failed."""
PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds to wait before each further attempt of a failed operation; randomly prolonged to up to twice as long."""

_SUFFIXES = (".json", ".safetensors")
NEW = ".new-"
"""Begins the name of the folder, in a checkpoint that was replaced, with the files of the new one."""
_ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors that are an answer of the store, so that another attempt is useless."""
T = TypeVar("T")
log = logging.getLogger("trainer")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL that fsspec can open, such as s3://bucket/run, with the methods of `pathlib.Path` that are needed here.

    Credentials and options come from fsspec's own configuration. Network errors are raised as OSError, after the
    last try.
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

    def is_absolute(self) -> bool:
        """Return True: a URL does not depend on the current folder."""
        return True

    def absolute(self) -> RemotePath:
        """Return the URL itself."""
        return self

    def exists(self) -> bool:
        """Return True if there is an object of this name, or one below it."""
        return bool(self.call(lambda store, path: store.exists(path)))

    def is_file(self) -> bool:
        """Return True if there is an object of this name."""
        return bool(self.call(lambda store, path: store.isfile(path)))

    def is_dir(self) -> bool:
        """Return True if there are objects below this name."""
        return bool(self.call(lambda store, path: store.isdir(path)))

    def is_symlink(self) -> bool:
        """Return False: an object store has no links."""
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the direct children, sorted by name; none if there is nothing."""
        found: list[object] = []
        with suppress(FileNotFoundError, NotADirectoryError):
            found = self.call(_children)
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found}
        yield from (self / name for name in sorted(names - {""}))

    def read_bytes(self) -> bytes:
        """Return the contents of a small object."""
        return bytes(self.call(lambda store, path: store.cat_file(path)))

    def modified(self) -> float | None:
        """Return the time of the last write in seconds since 1970; None where the store does not report it."""
        with suppress(NotImplementedError):
            return float(self.call(lambda store, path: store.modified(path)).timestamp())
        return None

    def call(self, operation: Callable[[Any, str], T]) -> T:
        """Return `operation(store, path)` with fsspec's file system and the path in it; try again while it fails.

        Raises:
            OSError: the last try failed, or the store has answered that there is no such object, or no permission.
        """
        for pause in PAUSES:
            try:
                return self._call_once(operation)
            except _ANSWERS:
                raise
            except OSError as error:
                log.info("%s: %s; trying again", self, error)
                time.sleep(pause * _JITTER.uniform(1, 2))
        return self._call_once(operation)

    def _call_once(self, operation: Callable[[Any, str], T]) -> T:
        with self._open_store() as (store, path):
            return operation(store, path)

    def delete(self, recursive: bool = False) -> None:
        """Delete an object, or with `recursive` everything below this name; does nothing if there is nothing."""
        with suppress(FileNotFoundError):
            self.call(lambda store, path: store.rm(path, recursive=True) if recursive else store.rm_file(path))

    @contextmanager
    def _open_store(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's file system and the path in it; raise errors of any client library as OSError."""
        store, path = _store(self.url, repr(self.url))
        try:
            yield store, path
        except (CheckpointError, NotImplementedError, *_ANSWERS):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


def check_url(url: str, given: str) -> None:
    """Check that fsspec supports this kind of URL; some kinds, such as ftp, are connected to.

    Args:
        given: the URL as messages name it.

    Raises:
        ConfigError: the scheme is unknown, its package is not installed, or the server does not answer.
    """
    try:
        _store(url, given)
    except OSError as error:
        raise ConfigError(f"{given} cannot be reached: {error}") from error


def _store(url: str, given: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ConfigError(f"{given} is a URL, which needs the package fsspec. Install it: pip install fsspec") from None
    try:
        # Cached listings would not show the files that other processes write.
        store, path = url_to_fs(url, use_listings_cache=False)
    except OSError:
        raise
    except Exception as error:  # a scheme that is unknown or not installed, or a URL without what it needs
        raise ConfigError(f"{given}: fsspec cannot open it: {error}") from None
    return store, str(path)


class RemoteStorage:
    """Checkpoints in an object store; see `Storage` for the contract."""

    @contextmanager
    def atomic_directory(self, final: RemotePath, replace: bool) -> Iterator[RemotePath]:
        """Yield `final` itself: files are written in place, and the manifest makes the directory valid.

        To replace a checkpoint, yield a folder in it; its manifest is the new one of `final` at the end of the block.

        Raises:
            WriteError: the storage does not answer.
        """
        folder = final / f"{NEW}{os.urandom(4).hex()}" if replace else final
        try:
            if not replace:
                for entry in final.iterdir():  # an interrupted write of the same name
                    entry.delete(recursive=True)
            with folder._open_store() as (store, path), suppress(OSError, NotImplementedError):
                store.makedirs(path, exist_ok=True)  # for stores that have directories
            yield folder
            if replace:
                self.replace_file(final / MANIFEST_FILE, (folder / MANIFEST_FILE).read_bytes())
                for entry in final.iterdir():
                    if entry.name not in (folder.name, MANIFEST_FILE):
                        entry.delete(recursive=True)
        except NotImplementedError:
            raise WriteError(f"cannot write the checkpoint {final}: this kind of URL can only be read.") from None
        except OSError as error:
            raise WriteError(
                f"cannot write the checkpoint {final}: {reason(error)}. Earlier checkpoints were left alone; "
                "files without a manifest are ignored."
            ) from error

    def write_file(self, path: RemotePath, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Write an object, replacing one of the same name; return its size in bytes and its checksum.

        Raises:
            OSError: the last attempt failed.
        """

        def write(store: Any, key: str) -> FileEntry:
            with store.open(key, "wb") as file:
                entry = write_chunks(file, chunks)
            written = store.size(key)
            if written != entry.bytes:
                raise OSError(f"{path} has {written} bytes after {entry.bytes} were written")
            return entry

        entry = path.call(write)
        fault_point("after_file")
        return entry

    def replace_file(self, path: RemotePath, contents: bytes) -> None:
        fault_point("before_pointer")
        path.call(lambda store, key: store.pipe_file(key, contents))
        fault_point("after_pointer")

    @contextmanager
    def open_file(self, path: RemotePath) -> Iterator[tuple[BinaryIO, int]]:
        file: Any = _RemoteFile(path)
        try:
            yield file, file.size
        finally:
            file.close()

    def entries(self, folder: RemotePath) -> frozenset[tuple[str, int]]:
        return frozenset((path.name, 0) for path in folder.iterdir())

    def modified(self, path: RemotePath) -> float | None:
        return path.modified()

    def path_in_use(self, path: RemotePath) -> bool:
        """Return False also for the files of an interrupted write: a new checkpoint may overwrite them."""
        return path.is_file() or (path / MANIFEST_FILE).is_file() or (any(path.iterdir()) and not _is_unfinished(path))

    def remove_checkpoint(self, folder: RemotePath) -> None:
        """Delete the manifest first: without it the other files are ignored."""
        (folder / MANIFEST_FILE).delete()
        fault_point("in_removal")
        folder.delete(recursive=True)

    def leftovers(self, folder: RemotePath) -> list[RemotePath]:
        return [child for child in folder.iterdir() if not child.name.endswith(_SUFFIXES) and _is_unfinished(child)]

    def remove_leftovers(self, folder: RemotePath, max_age: float) -> list[RemotePath]:
        """Go by age alone, and delete nothing where the store reports no times."""
        leftovers = self.leftovers(folder)
        now = _time_of(folder) if leftovers else None
        if now is None:
            return []
        removed = [child for child in leftovers if _newest_write(child) < now - max_age]
        for child in removed:
            child.delete(recursive=True)
        return removed


class _RemoteFile:
    """An object open for reading. A read that fails or ends early is repeated from the same position."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._file: Any = None
        self._position = 0
        self.size = path.call(lambda store, key: int(store.size(key)))

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        """Return `size` bytes; fewer only at the end of the object."""
        missing = min(size, max(0, self.size - self._position))
        parts = []
        while missing:
            parts.append(self._path.call(lambda store, key: self._read_some(store, key, missing)))  # noqa: B023
            self._position += len(parts[-1])
            missing -= len(parts[-1])
        return b"".join(parts)

    def readinto(self, view: memoryview) -> int:
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(Exception):  # nothing is written
                file.close()

    def _read_some(self, store: Any, key: str, size: int) -> bytes:
        """Return up to `size` bytes from the current position, at least one."""
        try:
            if self._file is None:
                self._file = store.open(key, "rb")
            if self._file.tell() != self._position:
                self._file.seek(self._position)
            data: bytes = self._file.read(size)
            if not data:
                raise OSError(f"the connection ended {size} bytes too early")
        except BaseException:
            self.close()
            raise
        return data


def _time_of(folder: RemotePath) -> float | None:
    """Return the time of the store's clock, which may differ from this machine's; None if the store gives none."""
    probe = folder / f".clock-{os.urandom(4).hex()}.json"
    try:
        probe.call(lambda store, key: store.pipe_file(key, b""))
        return probe.modified()
    finally:
        probe.delete()


def _newest_write(folder: RemotePath) -> float:
    """Return the time of the last write in a folder; infinity where the store reports no times."""
    inside = (entry.iterdir() if entry.name.startswith(NEW) else (entry,) for entry in folder.iterdir())
    return max((entry.modified() or math.inf for entry in chain.from_iterable(inside)), default=0.0)


def _children(store: Any, path: str) -> list[object]:
    """List a directory without the marker of the directory itself, an object that some tools make."""
    return [entry for entry in store.ls(path, detail=False) if str(entry).strip("/") != path.strip("/")]


def _is_unfinished(folder: RemotePath) -> bool:
    """Return True for a directory with files of a checkpoint but no manifest."""
    names = {entry.name for entry in folder.iterdir()}
    foreign = [name for name in names if not name.endswith(_SUFFIXES) and not name.startswith(NEW)]
    # A list may lack an object that is there, and what is unfinished is overwritten or deleted.
    return bool(names) and not foreign and not (folder / MANIFEST_FILE).exists()
