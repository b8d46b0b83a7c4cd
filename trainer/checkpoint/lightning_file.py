"""One file in Lightning's shape: write it from the folder of a checkpoint, and read such a file as a folder.

The file has Lightning's entries, from which Lightning itself continues, and under `OWN` everything else of the folder,
so that a training continues here from the file alone as it does from the folder. All of it is what
`torch.load(weights_only=True)` reads, unless a hook has added values that it does not read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader, IOBase
from pathlib import Path
from pickle import PicklingError
from typing import Any, NamedTuple, TypeVar

import torch

from trainer.checkpoint.deserialization import from_json, to_json
from trainer.checkpoint.directory import locate
from trainer.checkpoint.disk import (
    FileEntry,
    LocalStorage,
    WriteError,
    atomic_file,
    make_directory,
    new_digest,
    reason,
    temporary_path_for,
)
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.hook_checkpoint import ADDED, HYPERPARAMETERS, add_objects, is_data, with_objects
from trainer.checkpoint.manifest import FILE_RECORD, read_manifest
from trainer.checkpoint.storage import StoragePath, check_entry, kept_storage_path, read_small_file
from trainer.checkpoint.writing import serialize_state
from trainer.distributed.process_group import SingleProcess
from trainer.errors import CheckpointError, ConfigError
from trainer.fault_tolerance.fault_points import fault_point
from trainer.names.states import LIGHTNING_VERSION, runs_as_lightning

log = logging.getLogger("trainer")

SUFFIX = ".ckpt"
OWN = "trainer_checkpoint"
"""The entry with the parts of the folder that Lightning's entries lack."""
OF_LIGHTNING = {
    *("state_dict", "hparams_name", "datamodule_hparams_name", "datamodule_hyper_parameters", "epoch", "global_step"),
    *("loops", "optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "pytorch-lightning_version", OWN),
}
"""The other entries are added by hooks, but for the module's hyperparameters."""
_READER = "trainer.cli.checkpoint.from_lightning"
"""The program that reads a file with the restricted unpickler and writes it as a folder."""

Given = TypeVar("Given", bound="str | StoragePath")
_MAX_RECORD = 1000
_written: set[FileEntry] = set()
"""The files that this run has written while it runs as Lightning, and their copies: objects in them are read again."""
Save = Callable[[dict[str, Any], Path], None]
"""Writes the entries of a file, as `save_file` does."""
Load = Callable[[Path], dict[str, Any]]


class FilesBeside(NamedTuple):
    """Functions that write and remove the files beside the folders of committed checkpoints."""

    writer: Callable[[], Callable[[Path], None]]
    """Returns the function that writes the file of the checkpoint that is being saved."""
    remove: Callable[[StoragePath], None]


def writes_file(single_file: bool | None, place: StoragePath | None, by_plugin: bool = False) -> bool:
    """Whether a single file is written for a checkpoint: by default in a process that runs as Lightning, on a disk.

    Args:
        by_plugin: whether a CheckpointIO was given, which is another reason to write one.

    Raises:
        ConfigError: a file is asked for at a URL.
    """
    is_url = place is not None and not isinstance(place, Path)
    if single_file and is_url:
        raise ConfigError(f"single_file=True: {place} is a URL, and a single file is written on a disk only.")
    return (by_plugin or runs_as_lightning()) and not is_url if single_file is None else single_file


# -- writing -----------------------------------------------------------------------------------------------------------


def lightning_entries(folder: StoragePath, data_name: str = "", callbacks: Collection[str] = ()) -> dict[str, Any]:
    """Return the content of a file in Lightning's shape: the full state of a committed checkpoint, on the CPU.

    Args:
        folder: the checkpoint, written under any strategy.
        data_name: the name of the data module's class, under which Lightning keeps its state.
        callbacks: the keys of the callbacks whose states Lightning understands: the user's own.
    """
    state, info = read_checkpoint(folder), read_manifest(folder).info
    progress, kept = state["progress"], state["hyperparameters"]
    entries = {
        "epoch": progress["epoch"] - int(progress["batch"] == 0 and progress["epoch"] > 0),
        "global_step": progress["step"],
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": state["model"],
        "loops": _loops(progress, max(1, len(state["optimizers"]))),
        "hparams_name": _name_of_all(kept, "module"),
        "hyper_parameters": kept["module"],
    }
    if not info.get("weights_only"):
        entries["callbacks"] = {key: one for key, one in state["callbacks"].items() if key in callbacks}
        entries["optimizer_states"] = [_by_position(one) for one in state["optimizers"]]
        entries["lr_schedulers"] = state["schedulers"]
    if state["scaler"]:
        entries["MixedPrecision"] = state["scaler"]
    if kept["data"]:
        entries["datamodule_hparams_name"] = _name_of_all(kept, "data")
        entries["datamodule_hyper_parameters"] = kept["data"]
    if state["data"]:
        entries[data_name or "data"] = state["data"]
    keys = serialize_state({key: value for key, value in state.items() if key != "model"})
    own = {key: {"data": one.data, "tensors": one.tensors} for key, one in keys.items()}
    return {**_readable(entries | state.get(ADDED, {})), OWN: {"info": info, "entries": own}}


def _readable(value: Any) -> Any:
    """Return nested data with dicts in place of defaultdicts, which no restricted unpickler of torch's reads."""
    if type(value) in (dict, defaultdict):
        return {key: _readable(one) for key, one in value.items()}
    return type(value)(map(_readable, value)) if type(value) in (list, tuple) else value


def _name_of_all(kept: Mapping[str, Any], owner: str) -> str:
    """Return Lightning's name for how the hyperparameters are passed: all in one argument, or each by its name."""
    inside = kept.get("arguments", {}).get(owner)
    return inside if isinstance(inside, str) else "kwargs"


def _by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch has it, with numbers in place of the parameters' names."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    values = {number[name]: one for name, one in state["state"].items()}
    return {"state": {**values, **state.get("common", {})}, "param_groups": groups, **state.get("extra", {})}


def _loops(progress: Mapping[str, Any], optimizers: int) -> dict[str, Any]:
    """Return the counters of Lightning's loops for a training that continues with the next batch, or epoch.

    Args:
        optimizers: their number. In manual optimization Lightning counts each one's steps.
    """
    steps, in_epoch = progress["step"], progress["batch"] > 0 and not progress["epoch_ended"]
    epochs = progress["epoch"] + int(progress["epoch_ended"])
    batches = progress["batches_before"] + progress["batch"]
    begun = {"ready": epochs + in_epoch, "started": epochs + in_epoch, "processed": epochs, "completed": epochs}
    step, evaluated = _counted(steps, ("ready", "completed")), _batches(0, 0, False)
    zeroed = _counted(steps, ("ready", "started", "completed"))
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
        "epoch_loop.batch_progress": _batches(batches, progress["batch"] or batches, not in_epoch),
        "epoch_loop.scheduler_progress": _counted(0, ("ready", "completed")),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": step, "zero_grad": zeroed}},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": _counted(steps * optimizers, ("ready", "completed")),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": evaluated,
        "epoch_progress": {"total": begun, "current": begun},
    }
    evaluation = {"state_dict": {}, "batch_progress": evaluated}
    return {"fit_loop": fit, **dict.fromkeys(("validate_loop", "test_loop", "predict_loop"), evaluation)}


def _counted(number: int, stages: tuple[str, ...]) -> dict[str, dict[str, int]]:
    return {"total": dict.fromkeys(stages, number), "current": dict.fromkeys(stages, number)}


def _batches(total: int, current: int, is_last: bool) -> dict[str, Any]:
    stages = ("ready", "completed", "started", "processed")
    both = {"total": dict.fromkeys(stages, total), "current": dict.fromkeys(stages, current)}
    return {**both, "is_last_batch": is_last}


def save_file(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file that `torch.load` reads; it appears, or replaces another, in one step, and is on the disk then.

    Raises:
        WriteError: the disk is full, or refuses. What was at `path` is unchanged.
    """
    try:
        make_directory(path.parent)
        with atomic_file(path) as temporary:
            with open(temporary, "xb") as file:
                torch.save(checkpoint, file)
            if runs_as_lightning():
                _written.add(_entry_of(temporary))
            fault_point("after_file")
    except (OSError, RuntimeError) as error:  # torch raises the latter when the disk is full
        cause = reason(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise WriteError(f"cannot write {path}: {cause}") from error


def save_with_objects(save: Save, checkpoint: dict[str, Any], path: Path, objects: Mapping[str, Any]) -> None:
    """Write a file with objects, or without them if they cannot be pickled.

    Raises:
        WriteError: as in `save_file`.
    """
    try:
        save(with_objects(checkpoint, objects), path)
    except (PicklingError, AttributeError, TypeError) as error:
        if not objects:
            raise
        log.warning("%s does not contain %s, because one of them cannot be pickled: %s", path, [*objects], error)
        save(checkpoint, path)


def write_beside(folder: Path, checkpoint: dict[str, Any], save: Save = save_file) -> None:
    """Write the file beside the folder of a committed checkpoint, and its checksum into the folder.

    Raises:
        WriteError: the file cannot be written; the folder stays complete.
    """
    file = folder.with_name(file_of(folder).name)
    save(checkpoint, file)
    if not file.is_file():  # a plugin has it elsewhere
        return
    try:
        LocalStorage().replace_file(folder / FILE_RECORD, to_json(_entry_of(file)._asdict()) + b"\n")
    except OSError as error:
        raise WriteError(f"cannot write {folder / FILE_RECORD}: {reason(error)}") from error


def file_of(folder: StoragePath) -> StoragePath:
    """Return the place of the file beside a checkpoint's folder."""
    return folder.parent / f"{folder.name}{SUFFIX}"


def folder_beside(file: StoragePath) -> StoragePath:
    """Return the folder of the checkpoint that a file was written of; without one the path itself."""
    folder = file.parent / file.name.removesuffix(SUFFIX)
    return folder if is_beside(folder) else file


def is_beside(folder: StoragePath) -> bool:
    """Whether the file that was written of this checkpoint is there."""
    return isinstance(folder, Path) and (folder / FILE_RECORD).is_file() and file_of(folder).is_file()


def remove_beside(folder: StoragePath) -> None:
    """Delete the file that was written of this checkpoint, if it is there.

    Raises:
        WriteError: the system refuses.
    """
    if is_beside(folder):
        try:
            os.unlink(str(file_of(folder)))
        except OSError as error:
            raise WriteError(f"cannot remove {file_of(folder)}: {reason(error)}") from error


def link_last(folder: StoragePath) -> None:
    """Make `last.ckpt`, if it is not a file itself, a link to the file beside a folder.

    Raises:
        OSError: the system refuses.
    """
    link = folder.parent / f"last{SUFFIX}"
    if isinstance(link, Path) and (link.is_symlink() or not link.exists()):
        with atomic_file(link) as temporary:
            temporary.symlink_to(file_of(folder).name)


def _entry_of(file: Path) -> FileEntry:
    with open(file, "rb") as opened:
        return _digest_of(opened)


def _digest_of(opened: BufferedReader) -> FileEntry:
    new: Any = new_digest  # typeshed asks for more of a digest than is needed
    return FileEntry(os.fstat(opened.fileno()).st_size, hashlib.file_digest(opened, new).hexdigest())


# -- reading -----------------------------------------------------------------------------------------------------------


def read_located(
    path: str | StoragePath | IOBase, keys: Collection[str] | None = None, trusted: bool = False
) -> dict[str, Any]:
    """Return the state of a checkpoint, as `read_checkpoint`: of a folder, of a pointer such as `.../best`, or a file,
    which may be open, or in memory.

    Args:
        trusted: see `objects_in`.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    if isinstance(path, IOBase):
        with tempfile.TemporaryDirectory() as near:
            copy = Path(near, f"checkpoint{SUFFIX}")
            copy.write_bytes(path.read())
            return read_located(copy, keys, trusted)
    file = file_at(path)
    with as_folder(path, trusted=trusted) as folder:
        state = read_checkpoint(locate(folder), keys)
    if file is not None and (objects := objects_in(file, trusted)):
        add_objects(state, objects)
    return state


def objects_in(file: Path, trusted: bool) -> dict[str, Any]:
    """Return what a file has beside Lightning's own entries, with the module's hyperparameters, objects among them.

    Only in a process that runs as Lightning, and of a file that this process has written, or the caller trusts; of any
    other file if its objects are of classes that torch has been told are safe.

    Args:
        trusted: whether the caller has given weights_only=False.
    """
    read = _with_objects(file, trusted) or {}
    return {name: value for name, value in read.items() if name not in OF_LIGHTNING}


def share_written(processes: SingleProcess) -> None:
    """Let all processes read the objects in the files that rank 0 has written. Collective."""
    if runs_as_lightning():
        _written.update(processes.broadcast_object(_written))


def _with_objects(file: Path, trusted: bool) -> dict[str, Any] | None:
    """Return all entries of a file whose objects may be read; None of another one."""
    if not runs_as_lightning():
        return None
    with open(file, "rb") as opened:  # once: another file may take its place
        restricted = not trusted and _digest_of(opened) not in _written
        if restricted and not any(_is_of_the_program(one) for one in torch.serialization.get_safe_globals()):
            return None
        opened.seek(0)
        try:
            read: dict[str, Any] = torch.load(opened, map_location="cpu", weights_only=restricted)
        except Exception:  # of any kind, from a damaged file; the separate process says what is wrong
            if not restricted:
                raise
            return None
        return read


def _is_of_the_program(allowed: Any) -> bool:
    """Whether a class that torch has been told is safe is not torch's own."""
    kind = allowed[0] if isinstance(allowed, tuple) else allowed
    return not kind.__module__.startswith("torch.")


def _data_of(read: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a file without objects."""
    hyperparameters = read.get(HYPERPARAMETERS) or {}
    read[HYPERPARAMETERS] = {name: value for name, value in hyperparameters.items() if is_data(value)}
    return {name: value for name, value in read.items() if name in OF_LIGHTNING or is_data(value)}


def file_at(path: str | StoragePath) -> Path | None:
    """Return the path of a file on this machine; None if something else is there."""
    place = kept_storage_path(path)
    return place if isinstance(place, Path) and place.is_file() else None


@contextmanager
def as_folder(path: Given, load: Load | None = None, trusted: bool = False) -> Iterator[Given | Path]:
    """Give the folder of a checkpoint for a file; a path that is not a file is given unchanged.

    The folder beside a file is given if the file is unchanged since it was written of that folder. Of any other file,
    such as one that Lightning has written, a folder is made, and deleted at the end of the block.

    Args:
        load: returns the entries of a file that `torch.load` need not be able to read.
        trusted: see `objects_in`.

    Raises:
        CheckpointError: the file is damaged, is not a checkpoint, or would run code.
    """
    file = file_at(path)
    if file is None:
        yield path
        return
    file = file.resolve()
    if _was_written_of(file, beside := file.with_name(file.name.removesuffix(SUFFIX))):
        yield beside
        return
    read = _with_objects(file, trusted) if load is None else load(file)
    with _folder_near(file) as near:
        if read is not None:
            file = near / f"read{SUFFIX}"
            save_file(_data_of(read), file)
        import_file(file, folder := near / "checkpoint")
        yield folder


def _was_written_of(file: Path, folder: StoragePath) -> bool:
    """Whether a file is what `write_beside` wrote of this folder."""
    try:
        found = from_json(read_small_file(folder / FILE_RECORD, _MAX_RECORD), str(folder / FILE_RECORD))
        return check_entry(file, FileEntry(**found), hashing=True) is None
    except (CheckpointError, TypeError, KeyError):
        return False


@contextmanager
def _folder_near(file: Path) -> Iterator[Path]:
    """Give a new folder for the block: on the storage of a file, which other processes can read, or a temporary one."""
    near = temporary_path_for(file)
    try:
        near.mkdir()
    except OSError:
        near = Path(tempfile.mkdtemp())
    try:
        yield near
    finally:
        shutil.rmtree(near, ignore_errors=True)


def import_file(file: Path, out: Path, overwrite: bool = False) -> str:
    """Write a file of Lightning's as a checkpoint, in a separate process; return what was taken, and what was not.

    Raises:
        CheckpointError: the file is damaged, is not a checkpoint of Lightning, or would run code.
    """
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    child = subprocess.run(
        [sys.executable, "-P", "-m", _READER, str(file), str(out), str(int(overwrite))],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        errors="replace",
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"the process that read it ended with {child.returncode}"]
        raise CheckpointError(f"{file} cannot be read: {lines[-1]}")
    return child.stdout
