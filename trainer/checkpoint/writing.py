"""Writing a checkpoint, by one process or by all of them together; `format` says what it looks like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from trainer.checkpoint.disk import MANIFEST_FILE, FileEntry, WriteError
from trainer.checkpoint.format import (
    DATA_FILE,
    FORMAT,
    KEY,
    VERSION,
    is_committed,
    part_file,
    with_checksum,
)
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.safetensors_io import file_chunks
from trainer.checkpoint.serialization import Split, split, to_json
from trainer.checkpoint.shards import EMPTY_SLICE
from trainer.checkpoint.storage import StoragePath, as_storage_path, storage_of
from trainer.errors import CheckpointError
from trainer.fault_tolerance.fault_points import fault_point


@dataclass(frozen=True)
class SavePlan:
    """A state that can be stored, or this process's part of it; its tensors are still where they were."""

    data: dict[str, Any]
    """Encoded, with references to the tensors of all processes. Complete on rank 0."""
    files: dict[str, dict[str, torch.Tensor]]
    """What this process writes: tensors by file and name."""
    info: Any


def write_checkpoint(
    path: str | StoragePath,
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    peers: ProcessGroup = SINGLE_PROCESS,
) -> None:
    """Write `state` as a checkpoint that is at `path` as a whole and on the disk when this returns.

    Tensors are written from where they are, one at a time; those on another device pass through the CPU. Entries of the
    same top-level key that are the same memory (tied weights) are stored once.

    Args:
        path: the folder to create, or its URL (s3://...); missing parents are created.
        state: nested data: None, bool, int, float, str, list, tuple, dict, torch.Tensor, and `Shard` where a tensor is
            divided among processes. Top-level keys name files.
        info: small data without tensors, for listings: {"step": 1000, "epoch": 2, "metrics": {...}}.
        overwrite: replace the checkpoint that is at `path`. Until the new one is complete the old one stays. Not on a
            remote place.
        peers: the processes that write it together, each its shards and rank 0 everything else; all call this, with
            the same structure, and see the same folder at `path`.

    Raises:
        CheckpointError: something in `state` or `info` cannot be stored (names each field); `path` exists. WriteError:
            the disk is full or refuses. No partial checkpoint is left, and what was at `path` is unchanged. With
            several `peers` all of them raise.
    """
    write_prepared(path, prepare(state, info, peers), overwrite, peers)


def prepare(
    state: Mapping[str, Any], info: Mapping[str, Any] | None = None, peers: ProcessGroup = SINGLE_PROCESS
) -> SavePlan:
    """Encode what `write_checkpoint` is given; later changes to it, but for the contents of tensors, have no effect.

    Raises:
        CheckpointError: something cannot be stored; names each field. The processes do not have all of a tensor.
    """
    try:
        keys, problem = _split_state(state), None
        plain = split(dict(info or {}), "info", allow_tensors=False).data
    except CheckpointError as error:
        keys, plain, problem = {}, None, error
    if peers.world_size > 1:
        problem = next((other for other in peers.gather_objects(problem) if other is not None), None)
    if problem is not None:
        raise problem
    if peers.world_size > 1 or any(content.shards for content in keys.values()):
        problem = _name_parts(keys, peers)
        if problem is not None:
            raise problem
    files = {f"{key}.safetensors": content.tensors for key, content in keys.items() if peers.rank == 0}
    for key, content in keys.items():
        own = {name: shard.local.reshape(-1) for name, shard in content.shards.items() if shard.extent.numel}
        files[part_file(key, peers.rank)] = own
    files = {name: tensors for name, tensors in files.items() if tensors}
    return SavePlan({key: content.data for key, content in keys.items()}, files, plain)


def write_prepared(
    path: str | StoragePath, prepared: SavePlan, overwrite: bool = False, peers: ProcessGroup = SINGLE_PROCESS
) -> None:
    """The second half of `write_checkpoint`."""
    final = as_storage_path(path)
    if peers.world_size > 1:
        _write_together(final, prepared, overwrite, peers)
        return
    with storage_of(final).atomic_directory(final, _check_destination(final, overwrite)) as folder:
        _write_index(folder, prepared, _write_tensors(folder, prepared))


def _split_state(state: Mapping[str, Any]) -> dict[str, Split]:
    """By top-level key."""
    keys: dict[str, Split] = {}
    problems = []
    for key, value in state.items():
        if not isinstance(key, str) or not KEY.fullmatch(key) or key.lower() in (other.lower() for other in keys):
            raise CheckpointError(
                f"{key!r} cannot be a top-level key of a checkpoint: it names a file, so it must begin with a letter, "
                "have only letters, digits, '_' and '-', and differ from the others in more than upper and lower case"
            )
        try:
            keys[key] = split(value, key)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    return keys


def _name_parts(keys: dict[str, Split], peers: ProcessGroup) -> CheckpointError | None:
    """On rank 0, enter in the data who has which elements of the divided tensors; say, on all, what nobody has."""
    own = {
        key: {name: shard.extent for name, shard in content.shards.items()}
        for key, content in keys.items()
        if content.shards
    }
    of_all = peers.gather_objects(own)
    for key, content in keys.items():
        for name, shard in content.shards.items():
            extents = [of_one.get(key, {}).get(name, EMPTY_SLICE) for of_one in of_all]
            there, numel = sum(extent.numel for extent in extents), math.prod(shard.shape)
            if there != numel:
                return CheckpointError(
                    f"cannot store {key}[{name!r}]: the {len(of_all)} processes have {there} of its {numel} elements, "
                    "so they do not hold the same state. Save on every process, at the same step, outside any "
                    "`if rank == 0`."
                )
            content.parts[name].extend([rank, *astuple(extent)] for rank, extent in enumerate(extents) if extent.numel)
    return None


def _check_destination(final: StoragePath, overwrite: bool) -> bool:
    """Whether there is a checkpoint to replace.

    Raises:
        CheckpointError: nothing may be written there.
    """
    if not final.name or final.name.startswith("."):
        raise CheckpointError(f"{str(final)!r} is no name for a checkpoint: give one that does not begin with '.'")
    if not storage_of(final).path_in_use(final):
        return False
    if not overwrite:
        raise CheckpointError(f"{final} exists. Give another name, or overwrite=True to replace it.")
    if final.is_symlink() or not is_committed(final):
        raise CheckpointError(f"{final} exists and is not a checkpoint, so it is not overwritten. Give another name.")
    return True


_NOWHERE: StoragePath | None = None


def _write_together(final: StoragePath, prepared: SavePlan, overwrite: bool, peers: ProcessGroup) -> None:
    """Rank 0 makes the folder, all write their tensors into it, and when all have done so rank 0 commits it."""
    problem: Exception | None = None
    try:
        if peers.rank == 0:
            _commit_together(final, prepared, overwrite, peers)
        else:
            _write_as_follower(prepared, peers)
    except CheckpointError as error:
        problem = error
    problem = peers.broadcast_object(problem)
    if problem is not None:
        raise problem


def _commit_together(final: StoragePath, prepared: SavePlan, overwrite: bool, peers: ProcessGroup) -> None:
    told = False
    try:
        with storage_of(final).atomic_directory(final, _check_destination(final, overwrite)) as folder:
            peers.broadcast_object(folder)
            told = True
            _write_index(folder, prepared, _all_entries(folder, prepared, peers))
    except CheckpointError:
        if not told:
            peers.broadcast_object(_NOWHERE)
        raise


def _write_as_follower(prepared: SavePlan, peers: ProcessGroup) -> None:
    folder = peers.broadcast_object(_NOWHERE)
    if folder is not None:
        _all_entries(folder, prepared, peers)


def _all_entries(folder: StoragePath, prepared: SavePlan, peers: ProcessGroup) -> dict[str, FileEntry]:
    """Write this process's files; returns those of all processes.

    Raises:
        CheckpointError: one of them could not.
    """
    own: dict[str, FileEntry] | CheckpointError
    try:
        own = _write_tensors(folder, prepared)
    except CheckpointError as error:
        own = error
    except OSError as error:
        there = "" if folder.exists() else ". Every process has to see the same folder, on a disk that they share"
        own = WriteError(f"rank {peers.rank} cannot write into {folder}: {error.strerror or error}{there}")
    entries: dict[str, FileEntry] = {}
    for of_one in peers.gather_objects(own):
        if isinstance(of_one, CheckpointError):
            raise of_one
        entries.update(of_one)
    return entries


def _write_tensors(folder: StoragePath, prepared: SavePlan) -> dict[str, FileEntry]:
    write_file = storage_of(folder).write_file
    return {name: write_file(folder / name, file_chunks(tensors)) for name, tensors in prepared.files.items()}


def _write_index(folder: StoragePath, prepared: SavePlan, files: dict[str, FileEntry]) -> None:
    write_file = storage_of(folder).write_file
    files = {**files, DATA_FILE: write_file(folder / DATA_FILE, [to_json(prepared.data)])}
    entries = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in files.items()}
    manifest = {"format": FORMAT, "version": VERSION, "info": prepared.info, "files": entries}
    fault_point("before_manifest")
    write_file(folder / MANIFEST_FILE, [with_checksum(manifest)])
