"""List, find and delete the checkpoints of one run, and keep its pointers "last" and "best"."""

from __future__ import annotations

import logging
import re
from pathlib import PurePath
from typing import Any, Literal, TypeAlias

from trainer.checkpoint.deserialization import from_json, to_json
from trainer.checkpoint.disk import ReadError, WriteError, reason
from trainer.checkpoint.manifest import checkpoints_in, find_damage, is_committed, manifest_or_damage, read_manifest
from trainer.checkpoint.storage import PathT, StoragePath, as_storage_path, read_small_file, reading, storage_of
from trainer.errors import CheckpointError, ConfigError, did_you_mean, printable

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints in its run directory."""
Pointer = Literal["last", "best"]
POINTERS: tuple[Pointer, ...] = ("last", "best")

_Problems: TypeAlias = "list[str]"
_Names: TypeAlias = "list[str]"
_Paths: TypeAlias = "list[StoragePath]"  # inside the class, `list` is the method
_DAY = 24 * 3600.0
_MAX_POINTER = 1 << 16
_TRIES = 10
_log = logging.getLogger("trainer")


class CheckpointDirectory:
    """A directory of checkpoints with two small files that point to the last and to the best one.

    Several processes may read it while one writes. It need not exist.

    Args:
        folder: path, or URL of an object store (s3://...). Nothing there prevents two processes from writing at
            the same time.
    """

    def __init__(self, folder: str | StoragePath) -> None:
        self.folder = as_storage_path(folder)
        self._storage = storage_of(self.folder)

    def list(self) -> _Paths:
        """Return the committed checkpoints, by the step in their info (those without one first), then by name.

        One with a damaged manifest is skipped, with a logged warning that names it.
        """
        return [*self._infos()]

    def _infos(self) -> dict[StoragePath, dict[str, Any]]:
        """Return the infos of the checkpoints that `list` returns, in the same order."""
        infos = {}
        for path in checkpoints_in(self.folder):
            manifest = manifest_or_damage(path)
            if isinstance(manifest, CheckpointError):
                _log.warning("Skipping the checkpoint %s: %s", printable(path.name), manifest)
            else:
                infos[path] = manifest.info
        return dict(sorted(infos.items(), key=lambda item: (step_of(item[1]), item[0].name)))

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
        file = self._pointer_file(pointer)
        try:
            if target is not None:
                read_manifest(target)
            self._storage.replace_file(file, to_json({"checkpoint": target and target.name}) + b"\n")
        except (OSError, ReadError) as error:
            raise WriteError(f"cannot write {file}: {reason(error)}") from error

    def pointer(self, pointer: Pointer) -> StoragePath | None:
        """Return the checkpoint that `last` or `best` points to; None if the pointer is not set.

        Also None, with a logged warning, if the pointer is damaged or its checkpoint is gone.

        Raises:
            ReadError: the storage does not answer.
        """
        file = self._pointer_file(pointer)
        try:
            content = from_json(read_small_file(file, _MAX_POINTER), str(file))
            if content["checkpoint"] is None:
                return None
            target = self._child(content["checkpoint"])
            if is_committed(target):
                return target
        except ReadError:
            raise
        except (CheckpointError, KeyError, TypeError) as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                _log.warning("Ignoring the pointer %s: %s", file, error)
            return None
        _log.warning("Ignoring the pointer %s: there is no checkpoint %s", file, printable(target.name))
        return None

    def newest_valid(self, exclude: StoragePath | None = None) -> StoragePath | None:
        """Return the latest checkpoint by step with all its files intact; read and hash them.

        A damaged checkpoint is skipped with a warning. A checkpoint with weights that are not finite is returned only
        if no other is intact, with a warning; one with weights alone only if training cannot continue from another.

        Args:
            exclude: a checkpoint that was already checked.
        """
        infos = self._infos()

        def rank(path: StoragePath) -> tuple[bool, bool]:
            return bool(infos[path].get("nonfinite")), bool(infos[path].get("weights_only"))

        newest_first = [*reversed(infos)]
        newest_first.sort(key=rank)
        for path in newest_first:
            if path != exclude and self._is_intact(path):
                if infos[path].get("nonfinite"):
                    _log.warning(
                        "The weights or optimizer states of %s are not finite, and there is no other", path.name
                    )
                return path
        return None

    def corruption_report(self) -> _Problems:
        """Return the damage of all checkpoints here, if none is intact; empty if there never was one."""
        problems = [problem for path in checkpoints_in(self.folder) for problem in find_damage(path)]
        with reading(self.folder):
            dangling = [file for pointer in POINTERS if (file := self._pointer_file(pointer)).exists()]
        return problems or [f"{file} points to one that is gone or damaged" for file in dangling]

    def resolve(self, wanted: str | StoragePath) -> StoragePath:
        """Return the checkpoint named by "last", "best", a path, or a name in this directory.

        "last" falls back to the newest intact checkpoint, with a logged warning, if the one it points to is gone or
        damaged. If another process writes and deletes checkpoints here meanwhile, the search is repeated.

        Raises:
            CheckpointError: there is no such checkpoint; the message lists the existing ones.
            ReadError: the storage does not answer. "last" does not fall back to an older one then.
        """
        for _ in range(_TRIES):
            before = self._entries()
            try:
                return self._find(wanted, before)
            except ReadError:
                raise
            except CheckpointError:
                if self._entries() == before:
                    raise
        return self._find(wanted, None)

    def _find(self, wanted: str | StoragePath, before: frozenset[tuple[str, int]] | None) -> StoragePath:
        """Search once, as `resolve` does; raise CheckpointError also if "last" falls back while the entries change."""
        if str(wanted) == "last":
            target = self.pointer("last")
            if target is not None:
                target = self._committed_after(target)
                if self._is_intact(target):
                    return target
            if before is not None and self._entries() != before:
                raise CheckpointError(f"the checkpoints in {self.folder} have changed")
            found = self.newest_valid(exclude=target)
            if found:
                return found
            raise CheckpointError(f"there is no intact checkpoint in {self.folder}, so there is no 'last' one")
        given = as_storage_path(wanted)
        paths = [given, self.folder / str(wanted)]
        if str(wanted) == "best":
            best = self.pointer("best")
            paths = [best] if best else []
        for path in paths:
            with reading(path):
                is_there = path.exists()
            if is_there:
                read_manifest(path)
                return path
        names = [path.name for path in self.list()]
        raise CheckpointError(
            f"there is no checkpoint {wanted}.{did_you_mean(given.name, names)} In {self.folder} there are: "
            f"{', '.join(names) or 'none'}. 'last' is the newest one, 'best' the best by a monitored value."
        )

    def _entries(self) -> frozenset[tuple[str, int]]:
        with reading(self.folder):
            return self._storage.entries(self.folder)

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
            raise WriteError(f"cannot remove {target}: {reason(error)}") from error

    def clean(self, max_age: float = _DAY) -> _Paths:
        """Remove what interrupted writes and deletions left behind; return the removed paths.

        A leftover is removed if its process is gone from this machine, or if it was not touched for `max_age` seconds
        (in an object store only by age). A checkpoint that was being replaced when its process died is moved back.

        Raises:
            ReadError: the storage does not answer.
        """
        with reading(self.folder):
            return self._storage.remove_leftovers(self.folder, max_age)

    def _committed_after(self, target: StoragePath) -> StoragePath:
        """Return the newest of the checkpoints committed after `target` whose process could not update the pointer."""
        infos = self._infos()
        own = infos.pop(target, {})  # nothing is known of a damaged one
        # After a full checkpoint, one with weights alone lacks what could not be stored.
        candidates = {
            path: info
            for path, info in infos.items()
            if info.get("weights_only") == own.get("weights_only") and not info.get("nonfinite")
        }
        while True:
            # The name may also be an older checkpoint's, which was replaced.
            followers = [
                path
                for path, info in candidates.items()
                if info.get("follows") == target.name and step_of(info) >= step_of(own)
            ]
            newest = next((path for path in reversed(followers) if self._is_intact(path)), None)
            if newest is None:
                return target
            target, own = newest, candidates.pop(newest)

    def _is_intact(self, path: StoragePath) -> bool:
        damage = find_damage(path)
        if damage:
            _log.warning("Skipping the damaged checkpoint %s: %s", printable(path.name), "; ".join(damage))
        return not damage

    def _child(self, name: str | StoragePath) -> StoragePath:
        """Return the path of a checkpoint in this directory from its name or path."""
        text = str(name)
        try:
            path = self.folder / text if len(PurePath(text).parts) == 1 else as_storage_path(name)
        except ConfigError as error:
            raise CheckpointError(f"{text!r} is not the name of a checkpoint in {self.folder}: {error}") from None
        if path.parent.absolute() != self.folder.absolute() or not path.name or path.name.startswith("."):
            raise CheckpointError(f"{text!r} is not the name of a checkpoint in {self.folder}")
        return self.folder / path.name

    def _pointer_file(self, pointer: Pointer) -> StoragePath:
        return self.folder / f"{pointer}.json"


def versions(root: PathT) -> list[PathT]:
    """Return the run directories below `root`, oldest first."""
    with reading(root):
        entries = list(root.iterdir()) if root.is_dir() else []
    numbered = [(int(match[1]), path) for path in entries if (match := re.fullmatch(r"version_(\d+)", path.name))]
    return [path for _, path in sorted(numbered)]


def locate(path: str | StoragePath) -> StoragePath:
    """Find a checkpoint by its path, which may end in a pointer: `checkpoints/last`, `checkpoints/best`.

    A run directory stands for its last checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint; the message lists the existing ones.
    """
    given = as_storage_path(path)
    with reading(given):
        wanted = given.name if given.name in POINTERS and not given.exists() else given
        if (given / CHECKPOINTS).is_dir():
            return CheckpointDirectory(given / CHECKPOINTS).resolve("last")
    return CheckpointDirectory(given.parent).resolve(wanted)


def step_of(info: dict[str, Any]) -> float:
    """Return the step in a checkpoint's info; -1 if it is missing or not a number."""
    step = info.get("step")
    return step if isinstance(step, (int, float)) and step == step else -1
