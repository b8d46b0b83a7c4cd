"""The checkpoints of one run: which there are, which is the last and the best, and which may go."""

from __future__ import annotations

import logging
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.format import checkpoints_in, find_damage, is_committed, read_manifest
from trainer.checkpoint.remote import RemotePath
from trainer.checkpoint.serialization import from_json, to_json
from trainer.checkpoint.storage import StoragePath, as_storage_path, storage_of
from trainer.errors import CheckpointError, did_you_mean

Pointer = Literal["last", "best"]
POINTERS: tuple[Pointer, ...] = ("last", "best")

_Problems: TypeAlias = "list[str]"
_Paths: TypeAlias = "list[StoragePath]"  # inside the class, `list` is the method
_DAY = 24 * 3600.0
_log = logging.getLogger("trainer")


class CheckpointDirectory:
    """A folder of checkpoints, and two small files beside them that point to the last and to the best one.

    Several processes may read it while one writes. It need not exist.

    Args:
        folder: where the checkpoints of a run are: a path, or a URL of an object store (s3://...). There nothing keeps
            two processes from writing at one time.
    """

    def __init__(self, folder: str | StoragePath) -> None:
        self.folder = as_storage_path(folder)
        self._storage = storage_of(self.folder)

    def list(self) -> _Paths:
        """The committed checkpoints, by the step in their info (those without one first), then by name.

        One whose manifest is damaged is left out, with a logged warning that names it.
        """
        found = []
        for path in checkpoints_in(self.folder):
            try:
                step = read_manifest(path).info.get("step")
            except CheckpointError as error:
                _log.warning("Skipping the checkpoint %s: %s", path.name, error)
                continue
            found.append((step if isinstance(step, (int, float)) else -1, path.name, path))
        return [path for _, _, path in sorted(found)]

    def info(self, name: str | StoragePath) -> dict[str, Any]:
        """What was given as `info` when this checkpoint was written.

        Raises:
            CheckpointError: there is no such checkpoint, or its manifest is damaged.
        """
        return read_manifest(self._child(name)).info

    def set_pointer(self, pointer: Pointer, name: str | StoragePath) -> None:
        """Make `last` or `best` point to a committed checkpoint, atomically.

        Raises:
            CheckpointError: there is no such checkpoint. WriteError: the pointer cannot be written; the old one stays.
        """
        target = self._child(name)
        read_manifest(target)
        file = self._pointer_file(pointer)
        try:
            self._storage.replace_file(file, to_json({"checkpoint": target.name}) + b"\n")
        except OSError as error:
            raise WriteError(f"cannot write {file}: {error.strerror or error}") from error

    def pointer(self, pointer: Pointer) -> StoragePath | None:
        """The checkpoint that `last` or `best` points to; None when it is not set.

        None, with a logged warning, when it cannot be read or its checkpoint is gone.
        """
        file = self._pointer_file(pointer)
        try:
            content = from_json(file.read_bytes(), str(file))
            target = self._child(content["checkpoint"])
        except FileNotFoundError:
            return None
        except (OSError, CheckpointError, KeyError, TypeError) as error:
            _log.warning("Ignoring the pointer %s: %s", file, error)
            return None
        if is_committed(target):
            return target
        _log.warning("Ignoring the pointer %s: there is no checkpoint %s", file, target.name)
        return None

    def newest_valid(self, but: StoragePath | None = None) -> StoragePath | None:
        """The latest checkpoint by step whose files are all as they were written; reads them whole.

        Damaged ones that are passed over are named in a logged warning. `but`: not this one, which was looked at.
        """
        others = (path for path in reversed(self.list()) if but is None or path.name != but.name)
        return next((path for path in others if self._is_whole(path)), None)

    def corruption_report(self) -> _Problems:
        """What is wrong with the checkpoints here, when none is whole; empty when there never was one."""
        problems = [problem for path in checkpoints_in(self.folder) for problem in find_damage(path)]
        pointed = [file for pointer in POINTERS if (file := self._pointer_file(pointer)).exists()]
        return problems or [f"{file} points to one that is gone or not whole" for file in pointed]

    def resolve(self, wanted: str | StoragePath) -> StoragePath:
        """The checkpoint meant by "last", "best", a path, or a name in this folder.

        "last" falls back to the newest whole checkpoint when the one it points to is gone or damaged; logs a warning.

        Raises:
            CheckpointError: there is none; says which there are.
        """
        if str(wanted) == "last":
            target = self._followed(self.pointer("last"))
            found = target if target and self._is_whole(target) else self.newest_valid(but=target)
            if found:
                return found
            raise CheckpointError(f"there is no whole checkpoint in {self.folder}, so there is no 'last' one")
        names = [path.name for path in self.list()]
        if str(wanted) == "best":
            best = self.pointer("best")
            if best:
                return best
            there = ", ".join(names) or "none"
            raise CheckpointError(f"no checkpoint is recorded as 'best' in {self.folder}. There are: {there}.")
        given = as_storage_path(wanted)
        for path in (given,) if isinstance(given, RemotePath) else (given, self.folder / str(wanted)):
            if path.exists():
                read_manifest(path)
                return path
        guess = did_you_mean(given.name, [*names, *POINTERS])
        raise CheckpointError(
            f"there is no checkpoint {wanted}.{guess} In {self.folder} there are: {', '.join(names) or 'none'}. "
            "'last' and 'best' are understood too."
        )

    def remove(self, name: str | StoragePath) -> None:
        """Delete a checkpoint: for readers it disappears in one step.

        Raises:
            CheckpointError: it does not exist, or is the only one with all its files. WriteError: the system refuses.
        """
        target = self._child(name)
        if not is_committed(target):
            names = [path.name for path in self.list()]
            raise CheckpointError(f"there is no checkpoint {target}.{did_you_mean(target.name, names)}")
        others = (path for path in self.list() if path != target)
        if not find_damage(target, contents=False) and all(find_damage(path, contents=False) for path in others):
            raise CheckpointError(f"{target} is the only whole checkpoint in {self.folder}, so it is not removed")
        try:
            self._storage.remove_checkpoint(target)
        except OSError as error:
            raise WriteError(f"cannot remove {target}: {error.strerror or error}") from error

    def clean(self, max_age: float = _DAY) -> _Paths:
        """Remove what interrupted writes and deletions left; returns what was removed.

        A leftover goes when its process is gone from this machine, or when it was not touched for `max_age` seconds. A
        checkpoint that was being replaced when the process died goes back to its place. In an object store nobody can
        tell whose process is gone: there only the age counts.
        """
        return self._storage.remove_leftovers(self.folder, max_age)

    def _followed(self, target: StoragePath | None) -> StoragePath | None:
        """The checkpoint that was committed after `target` by a process that died before it could point to it."""
        if target is None:
            return None
        newer = (path for path in self.list() if read_manifest(path).info.get("follows") == target.name)
        return next((path for path in newer if path.name != target.name and self._is_whole(path)), target)

    def _is_whole(self, path: StoragePath) -> bool:
        damage = find_damage(path)
        if damage:
            _log.warning("Passing over the checkpoint %s: %s", path.name, "; ".join(damage))
        return not damage

    def _child(self, name: str | StoragePath) -> StoragePath:
        """The place of a checkpoint of this folder, given by its name or its path."""
        text = str(name)
        path = self.folder / text if len(PurePath(text).parts) == 1 else as_storage_path(name)
        if path.parent.absolute() != self.folder.absolute() or not path.name or path.name.startswith("."):
            raise CheckpointError(f"{text!r} is not the name of a checkpoint in {self.folder}")
        return self.folder / path.name

    def _pointer_file(self, pointer: Pointer) -> StoragePath:
        if pointer not in POINTERS:
            raise CheckpointError(f"unknown pointer {pointer!r}; there are: {', '.join(POINTERS)}")
        return self.folder / f"{pointer}.json"


def locate(path: str | StoragePath) -> StoragePath:
    """A checkpoint by its path, where the last part may be a pointer: `checkpoints/last`, `checkpoints/best`.

    Raises:
        CheckpointError: there is none; says which there are.
    """
    given = as_storage_path(path)
    wanted = given.name if given.name in POINTERS and not given.exists() else given
    return CheckpointDirectory(given.parent).resolve(wanted)
