"""List, find and delete the checkpoints of one run, and keep its pointers "last" and "best"."""

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
    """A directory of checkpoints with two small files that point to the last and to the best one.

    Several processes may read it while one writes. It need not exist.

    Args:
        folder: path, or URL of an object store (s3://...), in which nothing prevents two processes from writing at
            the same time.
    """

    def __init__(self, folder: str | StoragePath) -> None:
        self.folder = as_storage_path(folder)
        self._storage = storage_of(self.folder)

    def list(self) -> _Paths:
        """Return the committed checkpoints, by the step in their info (those without one first), then by name.

        One with a damaged manifest is skipped, with a logged warning that names it.
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
        """Return the `info` that was given when this checkpoint was written.

        Raises:
            CheckpointError: there is no such checkpoint, or its manifest is damaged.
        """
        return read_manifest(self._child(name)).info

    def set_pointer(self, pointer: Pointer, name: str | StoragePath | None) -> None:
        """Make `last` or `best` point to a committed checkpoint, or to none, atomically.

        Raises:
            CheckpointError: there is no such checkpoint.
            WriteError: the pointer cannot be written; the old one stays.
        """
        target = None if name is None else self._child(name)
        if target is not None:
            read_manifest(target)
        file = self._pointer_file(pointer)
        try:
            self._storage.replace_file(file, to_json({"checkpoint": target and target.name}) + b"\n")
        except OSError as error:
            raise WriteError(f"cannot write {file}: {error.strerror or error}") from error

    def pointer(self, pointer: Pointer) -> StoragePath | None:
        """Return the checkpoint that `last` or `best` points to; None if the pointer is not set.

        Also None, with a logged warning, if the pointer cannot be read or its checkpoint is gone.
        """
        file = self._pointer_file(pointer)
        try:
            content = from_json(file.read_bytes(), str(file))
            if content["checkpoint"] is None:
                return None
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

    def newest_valid(self, exclude: StoragePath | None = None) -> StoragePath | None:
        """Return the latest checkpoint by step with all its files intact; read and hash them.

        Damaged ones are skipped with a logged warning. `exclude`: a checkpoint that was already checked.
        """
        others = (path for path in reversed(self.list()) if exclude is None or path.name != exclude.name)
        return next((path for path in others if self._is_intact(path)), None)

    def corruption_report(self) -> _Problems:
        """Return the damage of all checkpoints here, if none is intact; empty if there never was one."""
        problems = [problem for path in checkpoints_in(self.folder) for problem in find_damage(path)]
        dangling = [file for pointer in POINTERS if (file := self._pointer_file(pointer)).exists()]
        return problems or [f"{file} points to one that is gone or damaged" for file in dangling]

    def resolve(self, wanted: str | StoragePath) -> StoragePath:
        """Return the checkpoint named by "last", "best", a path, or a name in this directory.

        "last" falls back to the newest intact checkpoint, with a logged warning, if the one it points to is gone or
        damaged.

        Raises:
            CheckpointError: there is none; lists the existing ones.
        """
        if str(wanted) == "last":
            target = self._committed_after(self.pointer("last"))
            found = target if target and self._is_intact(target) else self.newest_valid(exclude=target)
            if found:
                return found
            raise CheckpointError(f"there is no intact checkpoint in {self.folder}, so there is no 'last' one")
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
            "'last' and 'best' work too."
        )

    def remove(self, name: str | StoragePath) -> None:
        """Delete a checkpoint: for readers it disappears in one step.

        Raises:
            CheckpointError: it does not exist, or is the only intact one.
            WriteError: the system refuses.
        """
        target = self._child(name)
        if not is_committed(target):
            names = [path.name for path in self.list()]
            raise CheckpointError(f"there is no checkpoint {target}.{did_you_mean(target.name, names)}")
        others = (path for path in self.list() if path != target)
        if not find_damage(target, contents=False) and all(find_damage(path, contents=False) for path in others):
            raise CheckpointError(f"{target} is the only intact checkpoint in {self.folder}, so it is not removed")
        try:
            self._storage.remove_checkpoint(target)
        except OSError as error:
            raise WriteError(f"cannot remove {target}: {error.strerror or error}") from error

    def clean(self, max_age: float = _DAY) -> _Paths:
        """Remove what interrupted writes and deletions left behind; return the removed paths.

        A leftover is removed if its process is gone from this machine, or if it was not touched for `max_age` seconds
        (in an object store only by age). A checkpoint that was being replaced when its process died is moved back.
        """
        return self._storage.remove_leftovers(self.folder, max_age)

    def _committed_after(self, target: StoragePath | None) -> StoragePath | None:
        """Return the checkpoint committed after `target` by a process that died before it could update the pointer."""
        if target is None:
            return None
        try:
            own = read_manifest(target).info.get("step", -1)
        except CheckpointError:  # damaged
            own = -1
        infos = [(path, read_manifest(path).info) for path in self.list() if path.name != target.name]
        # A name can be that of an older checkpoint, too, which was replaced.
        newer = (path for path, info in infos if info.get("follows") == target.name and info.get("step", -1) >= own)
        return next((path for path in newer if self._is_intact(path)), target)

    def _is_intact(self, path: StoragePath) -> bool:
        damage = find_damage(path)
        if damage:
            _log.warning("Skipping the damaged checkpoint %s: %s", path.name, "; ".join(damage))
        return not damage

    def _child(self, name: str | StoragePath) -> StoragePath:
        """Return the path of a checkpoint in this directory from its name or path."""
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
    """Find a checkpoint by its path, which may end in a pointer: `checkpoints/last`, `checkpoints/best`.

    Raises:
        CheckpointError: there is none; lists the existing ones.
    """
    given = as_storage_path(path)
    wanted = given.name if given.name in POINTERS and not given.exists() else given
    return CheckpointDirectory(given.parent).resolve(wanted)
