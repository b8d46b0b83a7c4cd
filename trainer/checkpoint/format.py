"""A checkpoint is a folder: tensors in safetensors, the rest in JSON, and a manifest that makes it valid.

    <name>/<key>.safetensors    one for each top-level key with tensors; in model.safetensors, the state_dict's keys
    <name>/checkpoint.json      everything that is not a tensor, with references to the tensors (see tree.py)
    <name>/manifest.json        format, version, a small "info" for listings, and size and SHA-256 of every other file

Reading one runs no code: nothing is unpickled or imported, and whatever does not fit is a CheckpointError.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.disk import (
    FileEntry,
    check_entry,
    make_folder,
    open_entry,
    publish_folder,
    temporary_beside,
    write_file,
)
from trainer.checkpoint.tensorfile import file_chunks, read_tensors
from trainer.checkpoint.tree import TensorInfo, from_json, join, split, to_json
from trainer.errors import CheckpointError, did_you_mean

FORMAT = "exact-trainer checkpoint"
VERSION = 1
DATA_FILE = "checkpoint.json"
MANIFEST_FILE = "manifest.json"

_MAX_MANIFEST = 16 << 20
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")
_FILE = re.compile(rf"{re.escape(DATA_FILE)}|{_KEY.pattern}\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint says about itself."""

    info: dict[str, Any]
    """What `write_checkpoint` was given as `info`."""
    files: dict[str, FileEntry]


def write_checkpoint(
    path: str | Path, state: Mapping[str, Any], *, info: Mapping[str, Any] | None = None, overwrite: bool = False
) -> None:
    """Write `state` as a checkpoint that is at `path` as a whole and on the disk when this returns.

    Tensors are written from where they are, one at a time; those on another device pass through the CPU. Entries of the
    same top-level key that are the same memory (tied weights) are stored once.

    Args:
        path: the folder to create; missing parents are created.
        state: nested data: None, bool, int, float, str, list, tuple, dict, torch.Tensor. Top-level keys name files.
        info: small data without tensors, for listings: {"step": 1000, "epoch": 2, "metrics": {...}}.
        overwrite: replace the checkpoint that is at `path`. Until the new one is complete the old one stays.

    Raises:
        CheckpointError: something in `state` or `info` cannot be stored (names each field); `path` exists; the disk is
            full or refuses. No partial checkpoint is left, and what was at `path` is unchanged.
    """
    final = Path(path)
    data, groups = _split_state(state)
    encoded_info, _ = split(dict(info or {}), "info", allow_tensors=False)
    replace = _check_destination(final, overwrite)
    temporary = temporary_beside(final)
    try:
        make_folder(final.parent)
        temporary.mkdir()
        _write_files(temporary, data, groups, encoded_info)
        publish_folder(temporary, final, replace)
    except OSError as error:
        raise CheckpointError(_write_failure(final, temporary, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # a partial one, or after an exchange the one that was replaced


def read_checkpoint(path: str | Path, keys: Collection[str] | None = None, verify: bool = True) -> dict[str, Any]:
    """What was given to `write_checkpoint`, tensors on the CPU.

    Args:
        path: the checkpoint's folder.
        keys: read only these top-level keys; the files of the others are not opened.
        verify: check the hashes of the files that are read, while reading them. Sizes and structure are always checked.

    Raises:
        CheckpointError: there is no valid checkpoint; names the file that is wrong. Or it has no such key.
    """
    folder = _existing(Path(path))
    manifest = read_manifest(folder)
    data = _read_data(folder, manifest, verify)
    for key in keys or ():
        if key not in data:
            raise CheckpointError(f"{folder} has no {key!r}.{did_you_mean(key, data)} It has: {', '.join(data)}.")
    return {
        key: _read_key(folder, manifest, key, content, verify)
        for key, content in data.items()
        if keys is None or key in keys
    }


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What `read_checkpoint` returns, with a `TensorInfo` (name, dtype, shape) for each tensor. Opens no tensor file.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    folder = _existing(Path(path))
    data = _read_data(folder, read_manifest(folder), verify=True)
    return {key: join(content, lambda info: info, _place(folder, key)) for key, content in data.items()}


def read_manifest(path: str | Path) -> Manifest:
    """Its `info` and its list of files, without opening these.

    Raises:
        CheckpointError: `path` is not a committed checkpoint, or its manifest is damaged.
    """
    folder = _existing(Path(path))
    place = str(folder / MANIFEST_FILE)
    try:
        size = (folder / MANIFEST_FILE).lstat().st_size
    except OSError as error:
        raise CheckpointError(f"{place} cannot be read: {error.strerror}") from error
    if size > _MAX_MANIFEST:
        raise CheckpointError(f"{place} has {size} bytes: it is no manifest")
    with open_entry(folder / MANIFEST_FILE, FileEntry(size, ""), hashing=False) as reader:
        text = reader.read(size)
    body = from_json(text, place)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{place} is damaged, or is not that of a checkpoint of this package")
    version = body.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{folder} was written by a newer version of exact-trainer (format {version}; this one reads up to "
            f"{VERSION}). Upgrade with: pip install --upgrade exact-trainer"
        )
    body.pop("seal", None)
    if text != _sealed(body):
        raise CheckpointError(f"{place} is damaged: its checksum is not that of its contents")
    return _parse_manifest(body, place)


def verify_checkpoint(path: str | Path) -> list[str]:
    """Everything that is wrong with a checkpoint, in words that name the file; empty when it is whole.

    Reads all its files: missing and damaged ones, and ones that do not belong to it.
    """
    problems = find_damage(path)
    folder = Path(path)
    try:
        known = {*read_manifest(folder).files, MANIFEST_FILE}
    except CheckpointError:
        return problems
    strays = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    return problems + [f"{folder / name} is not in the manifest" for name in strays]


def find_damage(path: str | Path, contents: bool = True) -> list[str]:
    """As `verify_checkpoint`, but a file too many is no damage.

    Args:
        contents: False: check only that the files are there and have their size; opens none but the manifest.
    """
    folder = Path(path)
    try:
        files = read_manifest(folder).files
    except CheckpointError as error:
        return [str(error)]
    checks = (check_entry(folder / name, entry, contents) for name, entry in files.items())
    return [problem for problem in checks if problem]


def is_committed(path: Path) -> bool:
    """Whether it is a folder with a manifest: a checkpoint that was completely written, perhaps damaged since."""
    return (path / MANIFEST_FILE).is_file()


def checkpoints_in(folder: Path) -> list[Path]:
    """The committed checkpoints in a folder, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and is_committed(path))


# -- writing ----------------------------------------------------------------------------------------------------------


def _split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """JSON-ready data by top-level key, and tensors by top-level key and name."""
    data: dict[str, Any] = {}
    groups: dict[str, dict[str, torch.Tensor]] = {}
    problems = []
    for key, value in state.items():
        if not isinstance(key, str) or not _KEY.fullmatch(key) or key.lower() in (other.lower() for other in data):
            raise CheckpointError(
                f"{key!r} cannot be a top-level key of a checkpoint: it names a file, so it must begin with a letter, "
                "have only letters, digits, '_' and '-', and differ from the others in more than upper and lower case"
            )
        try:
            data[key], groups[key] = split(value, key)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(problems))
    return data, groups


def _check_destination(final: Path, overwrite: bool) -> bool:
    """Whether there is a checkpoint to replace."""
    if not final.name or final.name.startswith("."):
        raise CheckpointError(f"{str(final)!r} is no name for a checkpoint: give one that does not begin with '.'")
    if not final.exists() and not final.is_symlink():
        return False
    if not overwrite:
        raise CheckpointError(f"{final} exists. Give another name, or overwrite=True to replace it.")
    if final.is_symlink() or not is_committed(final):
        raise CheckpointError(f"{final} exists and is not a checkpoint, so it is not overwritten. Give another name.")
    return True


def _write_files(folder: Path, data: dict[str, Any], groups: dict[str, dict[str, torch.Tensor]], info: Any) -> None:
    files: dict[str, FileEntry] = {}
    for key, tensors in groups.items():
        if tensors:
            name = f"{key}.safetensors"
            files[name] = write_file(folder / name, file_chunks(tensors))
    files[DATA_FILE] = write_file(folder / DATA_FILE, [to_json(data)])
    entries = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in files.items()}
    manifest = {"format": FORMAT, "version": VERSION, "info": info, "files": entries}
    write_file(folder / MANIFEST_FILE, [_sealed(manifest)])


def _sealed(body: dict[str, Any]) -> bytes:
    """The manifest's text, with a checksum of its own: one changed bit anywhere in it is noticed."""
    seal = hashlib.sha256(json.dumps(body, indent=2).encode("ascii")).hexdigest()
    return (json.dumps({**body, "seal": seal}, indent=2) + "\n").encode("ascii")


def _write_failure(final: Path, temporary: Path, error: OSError) -> str:
    shutil.rmtree(temporary, ignore_errors=True)
    message = f"cannot write the checkpoint {final}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and final.parent.is_dir():
        message += f" ({shutil.disk_usage(final.parent).free / 1e6:.0f} MB are free there)"
    message += ". Earlier checkpoints are unchanged; "
    if temporary.exists():
        return message + f"partial files could not be removed and remain in {temporary}."
    return message + "the partial one was removed."


# -- reading ----------------------------------------------------------------------------------------------------------


def _existing(folder: Path) -> Path:
    """`folder`, if a committed checkpoint is there; else the error that says what is there, or beside it."""
    if is_committed(folder):
        return folder
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file; this trainer reads checkpoint folders (safetensors and JSON). For the weights in "
            "a file of another library: module.load_state_dict(torch.load(path, weights_only=True)['state_dict'])"
        )
    if folder.is_dir():
        inside = [path.name for path in checkpoints_in(folder)]
        if inside:
            raise CheckpointError(f"{folder} is not itself a checkpoint; give one of those in it: {', '.join(inside)}")
        raise CheckpointError(
            f"{folder} has no {MANIFEST_FILE}: it is not a checkpoint, or one that was not committed (wholly written)"
        )
    beside = [path.name for path in checkpoints_in(folder.parent)]
    there = f"There are: {', '.join(beside)}." if beside else f"There are no checkpoints in {folder.parent}."
    raise CheckpointError(f"there is no checkpoint {folder}.{did_you_mean(folder.name, beside)} {there}")


def _parse_manifest(body: dict[str, Any], place: str) -> Manifest:
    if body.keys() != {"format", "version", "info", "files"} or type(body["version"]) is not int:
        raise CheckpointError(f"{place} does not have the entries of a manifest")
    info, files = body["info"], body["files"]
    if not isinstance(info, dict) or not isinstance(files, dict) or DATA_FILE not in files:
        raise CheckpointError(f"{place} does not have the entries of a manifest")
    for name, entry in files.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{place} names a file that no checkpoint has: {name!r}")
        if (
            not isinstance(entry, dict)
            or entry.keys() != {"bytes", "sha256"}
            or type(entry["bytes"]) is not int
            or not isinstance(entry["sha256"], str)
        ):
            raise CheckpointError(f"{place}: the entry of {name!r} is malformed")

    def refuse(tensor: TensorInfo) -> None:
        raise CheckpointError(f"{place}: its info refers to a tensor")

    return Manifest(join(info, refuse, place), {name: FileEntry(**entry) for name, entry in files.items()})


def _read_data(folder: Path, manifest: Manifest, verify: bool) -> dict[str, Any]:
    entry = manifest.files[DATA_FILE]
    with open_entry(folder / DATA_FILE, entry, verify) as reader:
        text = reader.read(entry.bytes)
    data = from_json(text, str(folder / DATA_FILE))
    if not isinstance(data, dict):
        raise CheckpointError(f"{folder / DATA_FILE} is not that of a checkpoint")
    return data


def _read_key(folder: Path, manifest: Manifest, key: str, content: Any, verify: bool) -> Any:
    place = _place(folder, key)
    expected: dict[str, TensorInfo] = {}

    def note(info: TensorInfo) -> None:
        if expected.setdefault(info.name, info) != info:
            raise CheckpointError(f"{place} refers to the tensor {info.name!r} in two different ways")

    plain = join(content, note, place)
    name = f"{key}.safetensors"
    entry = manifest.files.get(name)
    if entry is None:
        if expected:
            raise CheckpointError(f"{place} refers to tensors, but the manifest has no {name}")
        return plain
    with open_entry(folder / name, entry, verify) as reader:
        tensors = read_tensors(reader, entry.bytes, expected, str(folder / name))
    return join(content, lambda info: tensors[info.name], place)


def _place(folder: Path, key: str) -> str:
    return f"{folder / DATA_FILE}, {key!r}"
