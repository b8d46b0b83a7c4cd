"""The manifest of a checkpoint: what a listing shows and a verification compares. Does not import torch.

The format of checkpoints stands in format.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from trainer.checkpoint.deserialization import TensorInfo, are_sizes, deserialize, from_json
from trainer.checkpoint.disk import ALGORITHMS, MANIFEST_FILE, FileEntry, ReadError
from trainer.checkpoint.remote import NEW
from trainer.checkpoint.storage import StoragePath, as_storage_path, check_entry, open_entry, read_small_file, reading
from trainer.errors import CheckpointError, did_you_mean

FORMAT = "exact-trainer checkpoint"
VERSION = max(ALGORITHMS)
"""Since 2 the files have another checksum; 1 is still read."""
DATA_FILE = "checkpoint.json"
FILE_RECORD = "file.json"
"""The checksum of the single file beside the folder, if one was written; not in the manifest."""

_MAX_MANIFEST = 16 << 20
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")
"""Valid top-level keys."""
_INNER = re.compile(rf"{re.escape(NEW)}[0-9a-f]{{8}}")
"""The folder of the files in a checkpoint that was replaced in an object store."""
_FILE = re.compile(rf"{re.escape(DATA_FILE)}|{KEY.pattern}(\.[0-9]{{5,}})?\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """The manifest of a committed checkpoint."""

    info: dict[str, Any]
    """The `info` that was given to `write_checkpoint`."""
    files: dict[str, FileEntry]
    folder: StoragePath
    """The folder of the files: the checkpoint's, or one in it."""


def read_manifest(path: str | StoragePath) -> Manifest:
    """Return the `info` and the list of files of a checkpoint, without opening the files.

    Raises:
        CheckpointError: `path` is not a committed checkpoint, or its manifest is damaged.
    """
    folder = require_committed(as_storage_path(path))
    where = str(folder / MANIFEST_FILE)
    text = read_small_file(folder / MANIFEST_FILE, _MAX_MANIFEST)
    body = from_json(text, where)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{where} is damaged, or is not the manifest of a checkpoint of this package")
    version = body.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{folder} was written by a newer version of this package (format {version}; this one reads up to "
            f"{VERSION}). Update this package: git pull in its checkout, then pip install ."
        )
    body.pop("seal", None)
    try:
        intact = text == with_checksum(body)
    except RecursionError:
        intact = False
    if not intact:
        raise CheckpointError(f"{where} is damaged: its checksum does not match its contents")
    return _parse_manifest(body, where, folder)


def manifest_or_damage(path: str | StoragePath) -> Manifest | CheckpointError:
    """Return the manifest of a checkpoint, or the error that says how it is damaged.

    Raises:
        ReadError: the storage does not answer.
    """
    try:
        return read_manifest(path)
    except ReadError:
        raise
    except CheckpointError as error:
        return error


def verify_checkpoint(path: str | StoragePath) -> list[str]:
    """Read all files of a checkpoint; return a message for each that is missing, damaged, or not in the manifest."""
    problems = find_damage(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return problems
    folder, known = manifest.folder, {*manifest.files, MANIFEST_FILE, FILE_RECORD}
    with reading(folder):  # without what an interrupted replacement left
        names = sorted(entry.name for entry in folder.iterdir() if not _INNER.fullmatch(entry.name))
    strays = [name for name in names if name not in known]
    return problems + [f"{folder / name} is not in the manifest" for name in strays]


def find_damage(path: str | StoragePath, contents: bool = True) -> list[str]:
    """Return a message for each missing or damaged file of a checkpoint.

    Args:
        contents: if False, check only that the files exist and have their size; open only the manifest.

    Raises:
        ReadError: the storage does not answer.
    """
    manifest = manifest_or_damage(path)
    if isinstance(manifest, CheckpointError):
        return [str(manifest)]
    checks = (check_entry(manifest.folder / name, entry, contents) for name, entry in manifest.files.items())
    return [problem for problem in checks if problem]


def is_committed(path: StoragePath) -> bool:
    """Return True if there is a manifest: the checkpoint was completely written, though perhaps damaged since.

    Raises:
        ReadError: the storage does not answer.
    """
    with reading(path):
        return (path / MANIFEST_FILE).is_file()


def checkpoints_in(folder: StoragePath) -> list[StoragePath]:
    """Return the committed checkpoints in a directory, sorted by name."""
    with reading(folder):
        inside: list[StoragePath] = [*folder.iterdir()] if folder.is_dir() else []
    return sorted(path for path in inside if not path.name.startswith(".") and is_committed(path))


def with_checksum(body: dict[str, Any]) -> bytes:
    """Encode the manifest with its own checksum, so that a single changed bit is noticed."""
    seal = hashlib.sha256(json.dumps(body, indent=2).encode("ascii")).hexdigest()
    return (json.dumps({**body, "seal": seal}, indent=2) + "\n").encode("ascii")


def read_metadata(path: str | StoragePath) -> dict[str, Any]:
    """Return the state with a `TensorInfo` (name, dtype, shape) for each tensor, without opening a tensor file.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    manifest = read_manifest(path)
    folder, data = manifest.folder, read_data(manifest, verify=True)
    return {key: deserialize(content, lambda info: info, location(folder, key)) for key, content in data.items()}


def require_committed(folder: StoragePath) -> StoragePath:
    """Return `folder` if a committed checkpoint is there; else raise an error that says what is in or next to it."""
    if is_committed(folder):
        return folder
    with reading(folder):
        is_file, place = folder.is_file(), folder if folder.is_dir() else folder.parent
    if is_file:
        raise CheckpointError(
            f"{folder} is a file, and a folder is needed here. `trainer checkpoint import` makes one of a file of "
            "Lightning's; ckpt_path= and load_from_checkpoint take such a file itself, if it is on this machine."
        )
    names = [path.name for path in checkpoints_in(place)]
    raise CheckpointError(
        f"{folder} is not a checkpoint, or its writing was interrupted: it has no {MANIFEST_FILE}."
        f"{did_you_mean(folder.name, names)} Give a folder in a run's checkpoints/, or the run directory for the last "
        f"one. In {place} there are: {', '.join(names) or 'none'}."
    )


def _parse_manifest(body: dict[str, Any], where: str, folder: StoragePath) -> Manifest:
    malformed = f"{where} does not have the entries of a manifest"
    inner, version, files = body.pop("folder", None), body.get("version"), body.get("files")
    if inner is not None and not _INNER.fullmatch(str(inner)):
        raise CheckpointError(malformed)
    if type(version) is not int or version not in ALGORITHMS or body.keys() != {"format", "version", "info", "files"}:
        raise CheckpointError(malformed)
    if not isinstance(files, dict) or DATA_FILE not in files:
        raise CheckpointError(malformed)
    algorithm, entries = ALGORITHMS[version], {}
    for name, entry in files.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{where} names a file that is not part of the format: {name!r:.100}")
        is_entry = isinstance(entry, dict) and are_sizes([entry.get("bytes")]) and isinstance(entry.get(algorithm), str)
        if not is_entry:
            raise CheckpointError(f"{where}: the entry of {name!r:.100} is malformed")
        entries[name] = FileEntry(entry["bytes"], entry[algorithm], algorithm)

    def refuse(tensor: TensorInfo) -> None:
        raise CheckpointError(f"{where}: its info refers to a tensor")

    info = deserialize(body["info"], refuse, where)
    if not isinstance(info, dict):
        raise CheckpointError(malformed)
    return Manifest(info, entries, folder if inner is None else folder / inner)


def read_data(manifest: Manifest, verify: bool) -> dict[str, Any]:
    folder, entry = manifest.folder, manifest.files[DATA_FILE]
    with open_entry(folder / DATA_FILE, entry, verify) as reader:
        text = reader.read(entry.bytes)
    data = from_json(text, str(folder / DATA_FILE))
    if not isinstance(data, dict):
        raise CheckpointError(f"{folder / DATA_FILE} does not hold the data of a checkpoint")
    return data


def location(folder: StoragePath, key: str) -> str:
    return f"{folder / DATA_FILE}, {key!r:.100}"
