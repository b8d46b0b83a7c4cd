"""Find the checkpoints for a path on the command line: a checkpoint, a run, or a folder of either."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.directory import CHECKPOINTS, POINTERS, CheckpointDirectory, step_of, versions
from trainer.checkpoint.disk import MANIFEST_FILE
from trainer.checkpoint.manifest import DATA_FILE, checkpoints_in, find_damage, is_committed, manifest_or_damage
from trainer.checkpoint.storage import StoragePath, as_storage_path, reading, storage_of
from trainer.cli.runs.find import by_numbers, run_directories
from trainer.errors import CheckpointError, ConfigError, did_you_mean


@dataclass(frozen=True)
class CheckpointSummary:
    """One checkpoint of a listing."""

    path: StoragePath
    info: dict[str, Any]
    """The manifest's `info`; empty when the manifest cannot be read."""
    bytes: int
    written: float | None
    """Seconds since 1970."""
    pointers: list[str]
    """The pointers, "last" and "best", that name this checkpoint."""
    damage: list[str]
    """Problems that were found."""


def checkpoint_folders(path: str) -> list[StoragePath]:
    """Return the folders of checkpoints at a path: of one run, or of all runs below it, at any depth, in their order.

    In an object store, of the runs directly below it.

    Raises:
        CheckpointError: the path does not exist or holds no checkpoint.
    """
    given = as_storage_path(path)
    if checkpoints_in(given) or _half_written(given):
        return [given]
    with reading(given):
        runs = sorted(run_directories(given), key=by_numbers) if isinstance(given, Path) else versions(given)
        folders = [run / CHECKPOINTS for run in dict.fromkeys([*runs, given]) if (run / CHECKPOINTS).is_dir()]
    if isinstance(given, Path) and given.is_file():
        raise CheckpointError(
            f"{path} is a file. Give the folder beside it, or `trainer checkpoint import {path} OUT`."
        )
    if not folders:
        raise CheckpointError(
            f"there is no checkpoint {path}, and none in it. Give a checkpoint, a run directory (with a folder "
            f"{CHECKPOINTS!r}), or a folder of runs, such as their default_root_dir."
        )
    return folders


def newest_of(folders: list[StoragePath]) -> StoragePath:
    """Return the folder of the run that has written a checkpoint last; of several at one time the last in their order.

    A run without a checkpoint is older than any with one.
    """
    times = {folder: max(map(_time_of, checkpoints_in(folder)), default=-1.0) for folder in folders}
    return max(reversed(folders), key=lambda folder: times[folder])


def _time_of(checkpoint: StoragePath) -> float:
    """Return the time of a checkpoint's capture, or else of its write; -1: unknown."""
    manifest = manifest_or_damage(checkpoint)
    captured = None if isinstance(manifest, CheckpointError) else manifest.info.get("captured")
    if type(captured) is int and 0 <= captured < 2**63:
        return captured / 1e9
    return written_at(checkpoint) or -1.0


def listing(folder: StoragePath, contents: bool) -> list[CheckpointSummary]:
    """Return all checkpoints of a folder, sorted by step, including damaged ones.

    Args:
        contents: compare checksums of the files, too, and not only their sizes.
    """
    pointed: dict[str, StoragePath | None] = {name: CheckpointDirectory(folder).pointer(name) for name in POINTERS}
    paths = (*checkpoints_in(folder), *_half_written(folder))
    found = [summarize(path, [name for name in pointed if pointed[name] == path], contents) for path in paths]
    return sorted(found, key=lambda one: (step_of(one.info), one.path.name))


def summarize(path: StoragePath, pointers: list[str], contents: bool) -> CheckpointSummary:
    """Describe one checkpoint, which may be damaged."""
    damage, manifest = find_damage(path, contents), manifest_or_damage(path)
    if isinstance(manifest, CheckpointError):
        return CheckpointSummary(path, {}, 0, None, pointers, damage)
    size = sum(entry.bytes for entry in manifest.files.values())
    return CheckpointSummary(path, manifest.info, size, written_at(path), pointers, damage)


def is_one(path: str) -> bool:
    """Whether a path is a single checkpoint, or a pointer to one, such as `checkpoints/last`, which is not a folder."""
    given = as_storage_path(path)
    with reading(given):
        return is_committed(given) or (given.name in POINTERS and not given.exists())


def choose(path: str, wanted: str | None) -> StoragePath:
    """Return the checkpoint at `path`, or the one named `wanted` ("last", "best" or a folder's name) of a run.

    The path may end in a pointer, as `checkpoints/last`. Without a monitor the best one is the last. The target of
    "last" is returned even if it is damaged.

    Raises:
        ConfigError: `wanted` was given, and `path` is itself a checkpoint.
        CheckpointError: there is no such checkpoint.
    """
    given = as_storage_path(path)
    if is_one(path):
        if wanted is not None:
            raise ConfigError(f"{path} is itself a checkpoint: leave out --ckpt {wanted}, or give its run directory.")
        if is_committed(given):
            return given
        path, wanted = str(given.parent), given.name
    folder = newest_of(checkpoint_folders(path))
    store, wanted = CheckpointDirectory(folder), wanted or "last"
    there = {one.name: one for one in checkpoints_in(folder)}
    if wanted in POINTERS:
        target = store.pointer(wanted) or store.pointer("last") or next(reversed(store.list()), None)
    else:
        target = there.get(wanted)
    if target is None:
        guess = did_you_mean(wanted, [*there, *POINTERS])
        raise CheckpointError(
            f"there is no checkpoint {wanted!r} in {folder}.{guess} There are: {', '.join(there) or 'none'}."
        )
    return target


def leftover_names(folder: StoragePath) -> list[str]:
    """Return the names of temporary folders: of interrupted writes, and of writes in progress."""
    with reading(folder):
        return [path.name for path in storage_of(folder).leftovers(folder)]


def written_at(path: StoragePath) -> float | None:
    """Return the time of a checkpoint's commit, in seconds since 1970; None without a manifest."""
    try:
        return storage_of(path).modified(path / MANIFEST_FILE)
    except OSError:
        return None


def _half_written(folder: StoragePath) -> list[StoragePath]:
    """Return the folders that hold files of a checkpoint, but no manifest."""
    with reading(folder):
        inside: list[StoragePath] = [*folder.iterdir()] if folder.is_dir() else []
        folders = [path for path in inside if path.is_dir() and not (path.name.startswith(".") or is_committed(path))]
        return [
            path for path in folders if any(one.name.endswith((".safetensors", DATA_FILE)) for one in path.iterdir())
        ]
