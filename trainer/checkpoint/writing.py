"""Write a checkpoint, from one process or from several together; the layout is described in `format`."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from trainer.checkpoint.deserialization import to_json
from trainer.checkpoint.disk import MANIFEST_FILE, FileEntry, ReadError, WriteError, reason
from trainer.checkpoint.flat_slice import EMPTY_SLICE
from trainer.checkpoint.format import part_file
from trainer.checkpoint.manifest import DATA_FILE, FORMAT, KEY, VERSION, checkpoints_in, is_committed, with_checksum
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.safetensors_io import TensorFile
from trainer.checkpoint.serialization import Refused, Serialized, UnstorableError, serialize, unstorable
from trainer.checkpoint.storage import StoragePath, as_storage_path, read_small_file, storage_of
from trainer.errors import CheckpointError
from trainer.fault_tolerance.fault_points import fault_point

log = logging.getLogger("trainer")

_LARGE = 16 << 20
"""Bytes of a checkpoint; a larger one's files are written in parallel."""


@dataclass(frozen=True)
class SavePlan:
    """A serialized state, or this process's part of it; its tensors have not been copied."""

    data: dict[str, Any]
    """Ready for JSON, with references to the tensors of all processes. Complete on rank 0."""
    files: dict[str, dict[str, torch.Tensor]]
    """The files that this process writes: tensors by file name and tensor name."""
    info: Any


def write_checkpoint(
    path: str | StoragePath,
    state: Mapping[str, Any],
    *,
    info: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> None:
    """Write `state` as a checkpoint that is complete and on the disk when this returns.

    Tensors are written one at a time without a copy; those on another device pass through the CPU. Entries of the same
    top-level key that share memory (tied weights) are stored once.

    Args:
        path: the directory to create, or its URL (s3://...); missing parents are created.
        state: nested data: None, bool, int, float, str, list, tuple, dict, torch.Tensor, and `Shard` for a sharded
            tensor. Top-level keys become file names.
        info: small data without tensors, for listings: {"step": 1000, "epoch": 2, "metrics": {...}}.
        overwrite: replace the checkpoint that is at `path`. The old one stays until the new one is complete.
        process_group: the processes that write the checkpoint together, each its shards and rank 0 everything else.
            All of them call this with the same structure, and see the same directory at `path`.

    Raises:
        CheckpointError: something in `state` or `info` cannot be stored (names each field), or `path` exists.
        WriteError: the disk is full, or the storage refuses. No partial checkpoint is left, and what was at `path` is
            unchanged. All processes of the group raise the same error. If the last operation failed, and the storage
            does not answer, the checkpoint may be complete nevertheless, as the message says.
    """
    write_plan(path, plan_save(state, info, process_group), overwrite, process_group)


def plan_save(
    state: Mapping[str, Any], info: Mapping[str, Any] | None = None, process_group: ProcessGroup = SINGLE_PROCESS
) -> SavePlan:
    """Serialize the arguments of `write_checkpoint`; later changes to them have no effect, except inside tensors.

    Raises:
        UnstorableError: something cannot be stored (names each field).
        CheckpointError: parts of a sharded tensor are missing.
    """
    keys: dict[str, Serialized] = {}
    plain: Any = None
    problem: CheckpointError | None = None
    try:
        keys = serialize_state(state)
        plain = serialize(dict(info or {}), "info", allow_tensors=False).data
    except CheckpointError as error:
        problem = error
    problem = _first_of_all(problem, process_group) or _collect_parts(keys, process_group)
    if problem is not None:
        raise problem
    files: dict[str, dict[str, torch.Tensor]] = {}
    for key, content in keys.items():
        if content.tensors and process_group.rank == 0:
            files[f"{key}.safetensors"] = content.tensors
        for name, shard in content.shards.items():
            if shard.extent.numel:
                files.setdefault(part_file(key, process_group.rank), {})[name] = shard.local.reshape(-1)
    return SavePlan({key: content.data for key, content in keys.items()}, files, plain)


def _first_of_all(problem: CheckpointError | None, process_group: ProcessGroup) -> CheckpointError | None:
    """Return the first error of all processes; of values that cannot be stored, one error that names all."""
    refused = [*problem.refused] if isinstance(problem, UnstorableError) else []
    everywhere = process_group.all_gather_object((None if refused else problem, refused))
    every: Refused = []
    for error, names in everywhere:
        if error is not None:
            return error
        every += names
    return unstorable([*dict.fromkeys(every)]) if every else None


def serialize_state(state: Mapping[str, Any]) -> dict[str, Serialized]:
    """Serialize each top-level key separately.

    Raises:
        UnstorableError: something cannot be stored; names each field.
    """
    keys: dict[str, Serialized] = {}
    refused = Refused()
    for key, value in state.items():
        assert KEY.fullmatch(key), "a top-level key names a file"
        try:
            keys[key] = serialize(value, key)
        except UnstorableError as error:
            refused += error.refused
    if refused:
        raise unstorable(refused)
    return keys


def _collect_parts(keys: dict[str, Serialized], process_group: ProcessGroup) -> CheckpointError | None:
    """Enter into the data which process has which elements of the sharded tensors; return an error if some are missing.

    The data are complete on all processes afterwards, and the error is the same on all.
    """
    own = {
        key: {name: shard.extent for name, shard in content.shards.items()}
        for key, content in keys.items()
        if content.shards
    }
    gathered = process_group.all_gather_object(own)
    for key, content in keys.items():
        for name, shard in content.shards.items():
            extents = [of_rank.get(key, {}).get(name, EMPTY_SLICE) for of_rank in gathered]
            held, numel = sum(extent.numel for extent in extents), math.prod(shard.shape)
            if held != numel:
                return CheckpointError(
                    f"cannot store {key}[{name!r}]: the {len(gathered)} processes hold {held} of its {numel} elements. "
                    "Save on every process, at the same step, outside any `if rank == 0`."
                )
            content.parts[name].extend([rank, *astuple(extent)] for rank, extent in enumerate(extents) if extent.numel)
    return None


def write_plan(
    path: str | StoragePath, plan: SavePlan, overwrite: bool = False, process_group: ProcessGroup = SINGLE_PROCESS
) -> None:
    """Write a planned checkpoint: the second half of `write_checkpoint`.

    Rank 0 makes the directory, all processes write their tensors into it, and when all are done rank 0 commits it.
    """
    problem: CheckpointError | None = None
    try:
        if process_group.rank == 0:
            _write_as_leader(as_storage_path(path), plan, overwrite, process_group)
        else:
            name: str | None = process_group.broadcast_object(None)
            if name is not None:  # under this process's path: another machine may have mounted the disk elsewhere
                _write_files(as_storage_path(path).parent / name, plan, process_group)
    except CheckpointError as error:
        problem = error
    problem = process_group.broadcast_object(problem)
    if problem is not None:
        raise problem


def _write_as_leader(final: StoragePath, plan: SavePlan, overwrite: bool, process_group: ProcessGroup) -> None:
    announced, index = False, None
    try:
        with storage_of(final).atomic_directory(final, _check_destination(final, overwrite)) as folder:
            announced = True
            inner = folder.name if folder.parent == final else None
            process_group.broadcast_object(f"{final.name}/{inner}" if inner else folder.name)
            index = _index(folder, plan, _write_files(folder, plan, process_group), inner)
            fault_point("before_manifest")
            storage_of(folder).write_file(folder / MANIFEST_FILE, [index])
    except CheckpointError as error:
        if not announced:
            process_group.broadcast_object(None)
        if index is None or not _is_there(final, index, error):
            raise
        log.warning("%s is complete, although the storage reported an error after its commit: %s", final, error)


def _is_there(final: StoragePath, index: bytes, error: CheckpointError) -> bool:
    """Whether the checkpoint with this manifest is at `final`, though its last operation failed.

    Raises:
        WriteError: the storage does not answer.
    """
    try:
        return is_committed(final) and read_small_file(final / MANIFEST_FILE, len(index)) == index
    except ReadError:
        raise WriteError(f"{error} Whether it is complete nevertheless could not be verified.") from error
    except CheckpointError:  # another manifest, or a part of this one
        return False


def _check_destination(final: StoragePath, overwrite: bool) -> bool:
    """Return True if there is a checkpoint to replace.

    Raises:
        CheckpointError: nothing may be written there.
        WriteError: the storage does not answer.
    """
    if not final.name or final.name.startswith(".") or "\0" in str(final):
        raise CheckpointError(f"{str(final)!r} is not a name for a checkpoint: give one that does not begin with '.'")
    try:
        if not storage_of(final).path_in_use(final):
            return False
        is_checkpoint = overwrite and not final.is_symlink() and is_committed(final)
        inside = checkpoints_in(final) if is_checkpoint else []
    except (OSError, ReadError) as error:
        raise WriteError(f"cannot write the checkpoint {final}: {reason(error)}") from error
    if not is_checkpoint:
        raise CheckpointError(f"{final} exists: give another name, or delete it. Only a checkpoint can be overwritten.")
    if inside:
        raise CheckpointError(f"{final} is not replaced: the checkpoint {inside[0]} in it would be deleted. Move that.")
    return True


def _write_files(folder: StoragePath, plan: SavePlan, process_group: ProcessGroup) -> dict[str, FileEntry]:
    """Write this process's files; return the entries of the files of all processes.

    Raises:
        CheckpointError: a process could not write its files.
    """
    write_file = storage_of(folder).write_file
    own: dict[str, FileEntry] | CheckpointError
    try:
        own = _write_together(plan.files, lambda name, tensors: write_file(folder / name, TensorFile(tensors)))
    except CheckpointError as error:
        own = error
    except OSError as error:
        if process_group.world_size == 1:
            raise
        own = WriteError(
            f"rank {process_group.rank} cannot write into {folder}: {reason(error)}. All processes write into this "
            "directory, so it has to be on storage that they share."
        )
    entries: dict[str, FileEntry] = {}
    for of_rank in process_group.all_gather_object(own):
        if isinstance(of_rank, CheckpointError):
            raise of_rank
        entries.update(of_rank)
    return entries


def _write_together(
    files: dict[str, dict[str, torch.Tensor]], write: Callable[[str, dict[str, torch.Tensor]], FileEntry]
) -> dict[str, FileEntry]:
    """Write the files, each in its own thread if they are large, and return their entries.

    Tensors of a device are read in this thread, whose current stream has computed them.
    """
    tensors = [tensor for of_file in files.values() for tensor in of_file.values()]
    small = sum(tensor.nbytes for tensor in tensors) < _LARGE
    if small or len(files) == 1 or any(tensor.device.type != "cpu" for tensor in tensors):
        return {name: write(name, of_file) for name, of_file in files.items()}
    entries: dict[str, FileEntry] = {}
    errors: list[BaseException] = []

    def run(name: str, of_file: dict[str, torch.Tensor]) -> None:
        try:
            entries[name] = write(name, of_file)
        except BaseException as error:
            errors.append(error)

    # No pool: a pool takes no work while Python ends, when a save in the background may still be going on.
    threads = [threading.Thread(target=run, args=item, name=f"write-{item[0]}") for item in files.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return entries


def _index(folder: StoragePath, plan: SavePlan, files: dict[str, FileEntry], inner: str | None) -> bytes:
    """Write the data; return the manifest, the last file to write. `inner`: the folder's name in the checkpoint."""
    files = {**files, DATA_FILE: storage_of(folder).write_file(folder / DATA_FILE, [to_json(plan.data)])}
    entries = {name: {"bytes": entry.bytes, entry.algorithm: entry.checksum} for name, entry in files.items()}
    place = {"folder": inner} if inner else {}
    return with_checksum({"format": FORMAT, "version": VERSION, "info": plan.info, "files": entries, **place})
