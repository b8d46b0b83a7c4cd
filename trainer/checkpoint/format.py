"""A checkpoint is a folder: tensors in safetensors, the rest in JSON, and a manifest that makes it valid.

    <name>/<key>.safetensors    one for each top-level key with tensors; in model.safetensors, the state_dict's keys
    <name>/checkpoint.json      everything that is not a tensor, with references to the tensors (see tree.py)
    <name>/manifest.json        format, version, a small "info" for listings, and size and SHA-256 of every other file

Reading one runs no code: nothing is unpickled or imported, and whatever does not fit is a CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.checkpoint.disk import FileEntry, WriteFile
from trainer.checkpoint.place import Place, check_entry, new_folder, occupied, open_entry, place_of, read_small_file
from trainer.checkpoint.tensorfile import file_chunks, read_tensors
from trainer.checkpoint.tree import TensorInfo, from_json, join, split, to_json
from trainer.errors import CheckpointError, did_you_mean
from trainer.runtime.faults import fault_point

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


@dataclass(frozen=True)
class Prepared:
    """A state that can be stored: encoded, and its tensors, which are still where they were."""

    data: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]
    """By top-level key and name."""
    info: Any


def write_checkpoint(
    path: str | Place, state: Mapping[str, Any], *, info: Mapping[str, Any] | None = None, overwrite: bool = False
) -> None:
    """Write `state` as a checkpoint that is at `path` as a whole and on the disk when this returns.

    Tensors are written from where they are, one at a time; those on another device pass through the CPU. Entries of the
    same top-level key that are the same memory (tied weights) are stored once.

    Args:
        path: the folder to create, or its URL (s3://...); missing parents are created.
        state: nested data: None, bool, int, float, str, list, tuple, dict, torch.Tensor. Top-level keys name files.
        info: small data without tensors, for listings: {"step": 1000, "epoch": 2, "metrics": {...}}.
        overwrite: replace the checkpoint that is at `path`. Until the new one is complete the old one stays. Not on a
            remote place.

    Raises:
        CheckpointError: something in `state` or `info` cannot be stored (names each field); `path` exists. WriteError:
            the disk is full or refuses. No partial checkpoint is left, and what was at `path` is unchanged.
    """
    write_prepared(path, prepare(state, info), overwrite)


def prepare(state: Mapping[str, Any], info: Mapping[str, Any] | None = None) -> Prepared:
    """Encode what `write_checkpoint` is given; later changes to it, but for the contents of tensors, have no effect.

    Raises:
        CheckpointError: something cannot be stored; names each field.
    """
    data, tensors = _split_state(state)
    return Prepared(data, tensors, split(dict(info or {}), "info", allow_tensors=False)[0])


def write_prepared(path: str | Place, prepared: Prepared, overwrite: bool = False) -> None:
    """The second half of `write_checkpoint`."""
    final = place_of(path)
    with new_folder(final, _check_destination(final, overwrite)) as write:
        _write_files(write, prepared)


def read_checkpoint(path: str | Place, keys: Collection[str] | None = None, verify: bool = True) -> dict[str, Any]:
    """What was given to `write_checkpoint`, tensors on the CPU.

    Args:
        path: the checkpoint's folder.
        keys: read only these top-level keys; the files of the others are not opened.
        verify: check the hashes of the files that are read, while reading them. Sizes and structure are always checked.

    Raises:
        CheckpointError: there is no valid checkpoint; names the file that is wrong. Or it has no such key.
    """
    folder = _existing(place_of(path))
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


def read_metadata(path: str | Place) -> dict[str, Any]:
    """What `read_checkpoint` returns, with a `TensorInfo` (name, dtype, shape) for each tensor. Opens no tensor file.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    folder = _existing(place_of(path))
    data = _read_data(folder, read_manifest(folder), verify=True)
    return {key: join(content, lambda info: info, _place(folder, key)) for key, content in data.items()}


def read_manifest(path: str | Place) -> Manifest:
    """Its `info` and its list of files, without opening these.

    Raises:
        CheckpointError: `path` is not a committed checkpoint, or its manifest is damaged.
    """
    folder = _existing(place_of(path))
    place = str(folder / MANIFEST_FILE)
    text = read_small_file(folder / MANIFEST_FILE, _MAX_MANIFEST)
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


def verify_checkpoint(path: str | Place) -> list[str]:
    """Everything that is wrong with a checkpoint, in words that name the file; empty when it is whole.

    Reads all its files: missing and damaged ones, and ones that do not belong to it.
    """
    problems = find_damage(path)
    folder = place_of(path)
    try:
        known = {*read_manifest(folder).files, MANIFEST_FILE}
    except CheckpointError:
        return problems
    strays = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    return problems + [f"{folder / name} is not in the manifest" for name in strays]


def find_damage(path: str | Place, contents: bool = True) -> list[str]:
    """As `verify_checkpoint`, but a file too many is no damage.

    Args:
        contents: False: check only that the files are there and have their size; opens none but the manifest.
    """
    folder = place_of(path)
    try:
        files = read_manifest(folder).files
    except CheckpointError as error:
        return [str(error)]
    checks = (check_entry(folder / name, entry, contents) for name, entry in files.items())
    return [problem for problem in checks if problem]


def is_committed(path: Place) -> bool:
    """Whether it is a folder with a manifest: a checkpoint that was completely written, perhaps damaged since."""
    return (path / MANIFEST_FILE).is_file()


def checkpoints_in(folder: Place) -> list[Place]:
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


def _check_destination(final: Place, overwrite: bool) -> bool:
    """Whether there is a checkpoint to replace."""
    if not final.name or final.name.startswith("."):
        raise CheckpointError(f"{str(final)!r} is no name for a checkpoint: give one that does not begin with '.'")
    if not occupied(final, MANIFEST_FILE):
        return False
    if not overwrite:
        raise CheckpointError(f"{final} exists. Give another name, or overwrite=True to replace it.")
    if final.is_symlink() or not is_committed(final):
        raise CheckpointError(f"{final} exists and is not a checkpoint, so it is not overwritten. Give another name.")
    return True


def _write_files(write: WriteFile, prepared: Prepared) -> None:
    files: dict[str, FileEntry] = {}
    for key, tensors in prepared.tensors.items():
        if tensors:
            name = f"{key}.safetensors"
            files[name] = write(name, file_chunks(tensors))
    files[DATA_FILE] = write(DATA_FILE, [to_json(prepared.data)])
    entries = {name: {"bytes": entry.bytes, "sha256": entry.sha256} for name, entry in files.items()}
    manifest = {"format": FORMAT, "version": VERSION, "info": prepared.info, "files": entries}
    fault_point("before_manifest")
    write(MANIFEST_FILE, [_sealed(manifest)])


def _sealed(body: dict[str, Any]) -> bytes:
    """The manifest's text, with a checksum of its own: one changed bit anywhere in it is noticed."""
    seal = hashlib.sha256(json.dumps(body, indent=2).encode("ascii")).hexdigest()
    return (json.dumps({**body, "seal": seal}, indent=2) + "\n").encode("ascii")


# -- reading ----------------------------------------------------------------------------------------------------------


def _existing(folder: Place) -> Place:
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


def _read_data(folder: Place, manifest: Manifest, verify: bool) -> dict[str, Any]:
    entry = manifest.files[DATA_FILE]
    with open_entry(folder / DATA_FILE, entry, verify) as reader:
        text = reader.read(entry.bytes)
    data = from_json(text, str(folder / DATA_FILE))
    if not isinstance(data, dict):
        raise CheckpointError(f"{folder / DATA_FILE} is not that of a checkpoint")
    return data


def _read_key(folder: Place, manifest: Manifest, key: str, content: Any, verify: bool) -> Any:
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


def _place(folder: Place, key: str) -> str:
    return f"{folder / DATA_FILE}, {key!r}"
