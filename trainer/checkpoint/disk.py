"""Write files and directories atomically on a local or mounted file system.

The order is always the same: write under a temporary name, flush the contents (fsync of each file, then of the
directory that names it), rename, flush the directory of the rename. A crash leaves at most a leftover,
recognized by its name:

    .tmp-<name>-<machine>-<pid>-<random>    being written: worthless once its process is gone
    .old-<name>-<machine>-<pid>-<random>    being replaced, where the system cannot exchange directories: may have to go
                                            back
    .del-<name>-<machine>-<pid>-<random>    being deleted: worthless
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from trainer.distributed.sendable import sendable
from trainer.errors import CheckpointError, ConfigError
from trainer.fault_tolerance.fault_points import fault_point

MANIFEST_FILE = "manifest.json"
"""The file, written last, that makes a directory a checkpoint."""

_LEFTOVER = re.compile(r"\.(tmp|old|del)-(.+?)(?:-(m[0-9a-f]{8}))?-(\d+)-[0-9a-f]{8}")
_NO_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
"""Errors of file systems that cannot flush (some of CIFS and FUSE), although the files are intact."""
_MAX_NAME = 200
"""Maximum bytes of a name that are repeated in the name of its temporary file, which may have 255."""
_log = logging.getLogger("trainer")
ALGORITHMS = {1: "sha256", 2: "xxh3_128"}
"""The checksum of each version of the format, by its name in the manifest.

Both find damage, and neither finds tampering: whoever changes a file can change the manifest too. XXH3 runs at the
speed of the memory, SHA-256 at a tenth of it or less: https://github.com/Cyan4973/xxHash.
"""
NEWEST = ALGORITHMS[max(ALGORITHMS)]


class Digest(Protocol):
    """A checksum in the making, as in hashlib and xxhash."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""


def new_digest(algorithm: str = NEWEST) -> Digest:
    """Return a digest that has seen no bytes."""
    if algorithm == "sha256":
        return hashlib.sha256()
    from xxhash import xxh3_128  # not with `import trainer`

    return xxh3_128()


@sendable
class FileEntry(NamedTuple):
    """Size in bytes and checksum (hexadecimal) of a file."""

    bytes: int
    checksum: str
    algorithm: str = NEWEST
    """One of `ALGORITHMS`."""


@sendable
class WriteError(CheckpointError):
    """The disk or the network did not take a checkpoint; the attempt has changed no earlier one."""


class ReadError(CheckpointError):
    """Raised when the disk or the network does not answer; the checkpoint is not considered damaged.

    Args:
        failure: a text that says what cannot be read, and why.
    """

    def __init__(self, failure: str) -> None:
        super().__init__(
            f"{failure}. It may be intact, so no older checkpoint is used in its place: try again, or give "
            "the path of another one."
        )
        self.failure = failure


_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_DAMAGE = frozenset(
    {errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EBADMSG)}
)
"""Further errors of a local file system that mean that a file is damaged or of another kind. Without EIO, which also
means that a server does not answer."""


def read_failure(path: object, error: OSError) -> CheckpointError:
    """Return the error to raise when `path` cannot be read: ReadError if a later attempt may succeed."""
    message = f"{path} cannot be read: {reason(error)}"
    if isinstance(error, _MISSING) or (isinstance(path, Path) and error.errno in _DAMAGE):
        return CheckpointError(message)
    return ReadError(message)


def reason(error: OSError | CheckpointError) -> str:
    """Return the reason of a failure of the storage, for the message of what failed with it."""
    if isinstance(error, ReadError):
        return error.failure
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there in the block replaces `path` at its end, or nothing changes."""
    temporary = temporary_path_for(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            flush_file(file.fileno(), path.parent)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        with suppress(OSError):  # an error of the block says more
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, contents: bytes) -> None:
    """Replace a file atomically, or create it. A link at `path` is replaced, never followed."""
    with atomic_file(path) as temporary, open(temporary, "xb") as file:
        file.write(contents)


def replace_notes(path: Path, contents: bytes) -> None:
    """Replace or create a file that people read and training does not need; a warning says if it cannot be written."""
    try:
        if not (path.is_file() and path.read_bytes() == contents):
            replace_file(path, contents)
    except OSError as error:
        _log.warning("cannot write %s (%s): training goes on without it.", path, reason(error))


class NotRegularError(OSError):
    """Raised for a link, a pipe, a device or a folder in place of a file."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file that another user may have created for reading; never wait for the writer of a pipe.

    Raises:
        NotRegularError: `path` is not a regular file.
    """
    wrong = NotRegularError(errno.EINVAL, "a symbolic link or not a regular file")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise wrong if error.errno in (errno.ELOOP, errno.ENXIO) else error from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise wrong
    return open(descriptor, "rb")


def complete_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without one that was cut off; none if there is no such file.

    For a link, a pipe or the like there are none, and a warning says that it will be replaced.
    """
    try:
        with open_regular(path) as file:
            *lines, _ = file.read().split(b"\n")
            return [line + b"\n" for line in lines]
    except FileNotFoundError:
        return []
    except NotRegularError:
        _log.warning("%s is a link, or not a regular file: replacing it.", path)
        return []


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may take a part of it at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def without_links(path: str, flags: int) -> int:
    """Open a file without following a link, in a folder where other users may write; an `opener` for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_chunks(file: Any, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write chunks to an open file, hashing them; return their size and checksum."""
    digest = new_digest()
    size = 0
    for chunk in chunks:
        file.write(chunk)
        digest.update(chunk)
        size += len(chunk)
        fault_point("in_file")
    return FileEntry(size, digest.hexdigest())


class LocalStorage:
    """Checkpoints in directories of a file system; see `Storage` for the contract."""

    @contextmanager
    def atomic_directory(self, final: Path, replace: bool) -> Iterator[Path]:
        temporary = temporary_path_for(final)
        try:
            make_directory(final.parent)
            temporary.mkdir()
            yield temporary
            publish_directory(temporary, final, replace)
        except OSError as error:
            raise WriteError(_write_failure(final, temporary, error)) from error
        finally:
            _discard(temporary)  # a partial one, or after an exchange the replaced one

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
        """Write and hash a new file, and flush its contents to the disk, but not yet its name."""
        with open(path, "xb") as file:
            entry = write_chunks(file, chunks)
            file.flush()
            flush_file(file.fileno(), path.parent)
        fault_point("after_file")
        return entry

    def replace_file(self, path: Path, contents: bytes) -> None:
        with atomic_file(path) as temporary:
            self.write_file(temporary, [contents])
            fault_point("before_pointer")
        fault_point("after_pointer")

    @contextmanager
    def open_file(self, path: Path) -> Iterator[tuple[BinaryIO, int]]:
        try:
            with open_regular(path) as file:
                yield file, os.fstat(file.fileno()).st_size
        except NotRegularError as error:
            raise CheckpointError(f"{path} is {error.strerror}: a checkpoint has only files") from None

    def entries(self, folder: Path) -> frozenset[tuple[str, int]]:
        try:
            with os.scandir(folder) as entries:
                return frozenset([(entry.name, entry.inode()) for entry in entries])
        except OSError:
            return frozenset()

    def modified(self, path: Path) -> float | None:
        return path.stat().st_mtime

    def path_in_use(self, path: Path) -> bool:
        return path.exists() or path.is_symlink()

    def remove_checkpoint(self, folder: Path) -> None:
        """Delete a checkpoint. Remains that cannot be deleted now are hidden from readers, and deleted by a later call.

        Of a link to a folder only the link is deleted.
        """
        if not (folder / MANIFEST_FILE).is_file():
            return
        if folder.is_symlink():
            _log.warning("%s is a link: what it points to, %s, is not deleted.", folder, os.path.realpath(folder))
            folder.unlink()
            return
        doomed = temporary_path_for(folder, "del")
        os.rename(folder, doomed)
        with suppress(OSError):  # it is gone for readers
            sync_directory(folder.parent)
        fault_point("in_removal")
        with suppress(OSError):  # the same
            for leftover in _temporary_paths(folder.parent):
                if leftover.kind == "del":
                    _discard(leftover.path)
        if os.path.lexists(doomed):
            _log.warning(
                "The old checkpoint %s could not be deleted: files of it remain in %s, which later "
                "deletions try again to remove.",
                folder,
                doomed,
            )

    def leftovers(self, folder: Path) -> list[Path]:
        return [leftover.path for leftover in _temporary_paths(folder)]

    def remove_leftovers(self, folder: Path, max_age: float) -> list[Path]:
        """Delete leftovers; move a checkpoint back into place whose replacement was interrupted between two renames."""
        removed = []
        for leftover in _temporary_paths(folder):
            if not leftover.is_dead(max_age):
                continue
            final = leftover.path.with_name(leftover.name)
            if leftover.kind == "old" and (leftover.path / MANIFEST_FILE).is_file() and not final.exists():
                _put_back(leftover.path, final)
                continue
            _discard(leftover.path)
            if not os.path.lexists(leftover.path):
                removed.append(leftover.path)
        return removed


class TemporaryPath(NamedTuple):
    """A temporary file or directory that a process left behind or is still using."""

    path: Path
    kind: str
    name: str
    """The name of the file or directory that it was to become, or was."""
    machine: str | None
    """The process's machine, as `this_machine` returns it; None in names of earlier versions: assumed to be ours."""
    pid: int

    def is_dead(self, max_age: float) -> bool:
        """Return True if the process is gone from this machine, or the leftover did not change in `max_age` seconds.

        Ages are measured with the clock of the file system, which may differ from this machine's.
        """
        if self.kind == "del":
            return True
        try:
            if self.machine in (None, this_machine()) and not _is_running(self.pid):
                return True
            return _time_of(self.path.parent) - _newest_change(self.path) > max_age
        except FileNotFoundError:
            return True
        except OSError:
            return False


def temporary_path_for(path: Path, kind: str = "tmp") -> Path:
    """Return an unused name in the same directory, so that a rename to `path` never crosses file systems.

    The name contains the name of `path`, cut to fit; in full for `kind` "old", which may be renamed back.
    """
    name = path.name if kind == "old" else os.fsdecode(os.fsencode(path.name)[:_MAX_NAME])
    return path.with_name(f".{kind}-{name}-{this_machine()}-{os.getpid()}-{os.urandom(4).hex()}")


@cache
def this_machine() -> str:
    """Return a name for the scope of a process number: the machine since its last boot, and the PID namespace."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return "m" + hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]


def sync_directory(folder: Path) -> None:
    """Flush the names in `folder` to the disk, so that they survive a power loss.

    Where the file system cannot do that, a warning says so once.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError as error:  # a folder that may be written to, but not listed
        _report_no_flush(folder, error)
        return
    try:
        flush_file(descriptor, folder)
    finally:
        os.close(descriptor)


def flush_file(descriptor: int, folder: Path) -> None:
    """Flush an open file, or the folder itself."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
        _report_no_flush(folder, error)


def _report_no_flush(folder: Path, error: OSError) -> None:
    mount = folder.absolute()
    while not mount.is_mount():
        mount = mount.parent
    _warn_no_flush(mount, error.strerror or str(error))


@cache
def _warn_no_flush(mount: Path, reason: str) -> None:
    """Warn once for each file system."""
    _log.warning(
        "the file system at %s cannot flush to the disk (%s): what is written there survives the end of a process, but "
        "a power cut may take the newest files.",
        mount,
        reason,
    )


def make_directory(folder: Path) -> None:
    """Create `folder` and its missing parents, flushing each name to the disk."""
    if not folder.is_dir():
        make_directory(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_directory(folder.parent)


def refuse_link(folder: Path) -> None:
    """Raise ConfigError if a folder of a run directory is a link: files would be written and deleted where it leads."""
    if folder.is_symlink():
        raise ConfigError(
            f"{folder} is a link to {os.path.realpath(folder)}: links in a run directory are not followed. Remove it, "
            "or give that folder as dirpath=."
        )


def publish_directory(temporary: Path, final: Path, replace: bool) -> None:
    """Make a finished directory appear at `final` by one rename.

    Args:
        replace: `final` exists and is to be replaced. The two are exchanged in one step where the system can do that
            (Linux on its usual file systems); the old one is then under the name `temporary`. Elsewhere the old one is
            first renamed aside, to where `CheckpointDirectory.clean` finds it if the process dies right then.
    """
    sync_directory(temporary)
    fault_point("before_rename")
    aside = None
    undo: Callable[[], object] = partial(os.rename, final, temporary)
    if not replace:
        os.rename(temporary, final)
    elif _exchange(temporary, final):
        undo = partial(_exchange, temporary, final)
    else:
        aside = temporary_path_for(final, "old")
        os.rename(final, aside)
        try:
            os.rename(temporary, final)
        except OSError:
            os.rename(aside, final)
            raise
    fault_point("after_rename")
    try:
        sync_directory(final.parent)
    except OSError as error:
        if _undone(undo):
            if aside is not None:
                os.rename(aside, final)
            raise
        _log.warning(
            "%s is complete, but its folder cannot be flushed to the disk (%s): a power cut may take it.",
            final,
            reason(error),
        )
    if aside is not None:
        _discard(aside)


def _undone(undo: Callable[[], object]) -> bool:
    """Undo a rename; return False if the file system refuses that, too."""
    try:
        return undo() is not False
    except OSError:
        return False


def _temporary_paths(folder: Path) -> Iterator[TemporaryPath]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if match := _LEFTOVER.fullmatch(path.name):
                yield TemporaryPath(path, match[1], match[2], match[3], int(match[4]))


def _put_back(aside: Path, final: Path) -> None:
    try:
        aside.rename(final)
        sync_directory(final.parent)
    except OSError as error:
        _log.error("%s is the checkpoint %s, and could not be renamed: %s", aside, final, error.strerror or error)
    else:
        _log.warning("The checkpoint %s was being replaced when its process died; the old one is back.", final)


def _discard(path: Path) -> None:
    """Delete a file or folder; if it cannot be deleted now (still open, immutable), rename it to a leftover.

    Never raises: a checkpoint that was committed before stays committed.
    """
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if os.path.lexists(path) and not path.name.startswith(".del-"):
        with suppress(OSError):
            os.rename(path, temporary_path_for(path, "del"))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _time_of(folder: Path) -> float:
    """Return the time of the file system's clock in seconds; this machine's time if nothing can be written there."""
    probe = temporary_path_for(folder / "clock")
    try:
        with open(probe, "xb"):
            return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink()


def _newest_change(path: Path) -> float:
    """Return the time of the latest change of a file or folder, or of anything in it."""
    newest = path.lstat().st_mtime
    for parent, folders, files in os.walk(path):
        for name in (*folders, *files):
            with suppress(OSError):
                newest = max(newest, os.lstat(os.path.join(parent, name)).st_mtime)
    return newest


def _write_failure(final: Path, temporary: Path, error: OSError) -> str:
    shutil.rmtree(temporary, ignore_errors=True)
    return f"cannot write the checkpoint {final}: {error.strerror or error}. Earlier checkpoints were left alone."


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False, with nothing changed, where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return int(rename(here, os.fsencode(one), here, os.fsencode(other), exchange)) == 0
