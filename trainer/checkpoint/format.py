"""The checkpoint format and its readers: a directory of safetensors and JSON files, valid once it has a manifest.

    <name>/<key>.safetensors    one for each top-level key with tensors; model.safetensors has the state_dict's keys
    <name>/<key>.00001.safetensors    the elements of sharded tensors that process 1 holds, each flattened
    <name>/checkpoint.json      everything that is not a tensor, with references to the tensors (see serialization.py)
    <name>/manifest.json        format, version, a small "info" for listings, and size and checksum of every other file

Reading a checkpoint runs no code: nothing is unpickled or imported, and anything unexpected is a CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from trainer.checkpoint.checksums import ALGORITHMS
from trainer.checkpoint.disk import MANIFEST_FILE, FileEntry, ReadError
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.safetensors_io import find_tensors, flat_bytes, read_tensors, size_of
from trainer.checkpoint.serialization import TensorInfo, deserialize, from_json
from trainer.checkpoint.shards import FlatSlice, StoredTensor
from trainer.checkpoint.storage import (
    StoragePath,
    as_storage_path,
    check_entry,
    open_entry,
    read_small_file,
    reading,
    storage_of,
)
from trainer.errors import CheckpointError, did_you_mean

FORMAT = "exact-trainer checkpoint"
VERSION = max(ALGORITHMS)
"""Since 2 the files have another checksum; 1 is still read."""
DATA_FILE = "checkpoint.json"

_MAX_MANIFEST = 16 << 20
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")
"""Valid top-level keys."""
_FILE = re.compile(rf"{re.escape(DATA_FILE)}|{KEY.pattern}(\.[0-9]{{5,}})?\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """The manifest of a committed checkpoint."""

    info: dict[str, Any]
    """The `info` that was given to `write_checkpoint`."""
    files: dict[str, FileEntry]


def read_checkpoint(
    path: str | StoragePath, keys: Collection[str] | None = None, verify: bool = True
) -> dict[str, Any]:
    """Return the state that was given to `write_checkpoint`, with its tensors on the CPU.

    Args:
        path: the checkpoint's directory.
        keys: read only these top-level keys, without opening the files of the others.
        verify: check the hashes of the files while reading them. Sizes and structure are always checked.

    Raises:
        CheckpointError: there is no valid checkpoint (names the file that is wrong), or it has no such key.
    """
    folder = _require_committed(as_storage_path(path))
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


def open_checkpoint(
    path: str | StoragePath, lazy: Collection[str] | None, verify: bool, process_group: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """Read a checkpoint, but return `StoredTensor`s, to be read on demand, for the top-level keys `lazy`.

    Args:
        lazy: None: all of them.
        verify: check the hashes of all files first; the processes of the group, which all call this, share the work.

    Raises:
        CheckpointError: as `read_checkpoint`; with `verify`, on all processes.
    """
    folder = _require_committed(as_storage_path(path))
    manifest = read_manifest(folder)
    if verify:
        own = list(manifest.files.items())[process_group.rank :: process_group.world_size]
        found = [problem for name, entry in own if (problem := check_entry(folder / name, entry, True))]
        problems = [problem for of_one in process_group.all_gather_object(found) for problem in of_one]
        if problems:
            raise CheckpointError("\n".join(problems))
    return {
        key: _open_key(folder, manifest, key, content)
        if lazy is None or key in lazy
        else _read_key(folder, manifest, key, content, False)
        for key, content in _read_data(folder, manifest, verify).items()
    }


def read_metadata(path: str | StoragePath) -> dict[str, Any]:
    """Return the state with a `TensorInfo` (name, dtype, shape) for each tensor, without opening a tensor file.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    folder = _require_committed(as_storage_path(path))
    data = _read_data(folder, read_manifest(folder), verify=True)
    return {key: deserialize(content, lambda info: info, _location(folder, key)) for key, content in data.items()}


def read_manifest(path: str | StoragePath) -> Manifest:
    """Return the `info` and the list of files of a checkpoint, without opening the files.

    Raises:
        CheckpointError: `path` is not a committed checkpoint, or its manifest is damaged.
    """
    folder = _require_committed(as_storage_path(path))
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
    return _parse_manifest(body, where)


def verify_checkpoint(path: str | StoragePath) -> list[str]:
    """Read all files of a checkpoint; return a message for each that is missing, damaged, or not in the manifest."""
    problems = find_damage(path)
    folder = as_storage_path(path)
    try:
        known = {*read_manifest(folder).files, MANIFEST_FILE}
    except CheckpointError:
        return problems
    with reading(folder):
        strays = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    return problems + [f"{folder / name} is not in the manifest" for name in strays]


def find_damage(path: str | StoragePath, contents: bool = True) -> list[str]:
    """Return a message for each missing or damaged file of a checkpoint.

    Args:
        contents: if False, check only that the files exist and have their size; open only the manifest.

    Raises:
        ReadError: the storage does not answer.
    """
    folder = as_storage_path(path)
    try:
        files = read_manifest(folder).files
    except ReadError:
        raise
    except CheckpointError as error:
        return [str(error)]
    checks = (check_entry(folder / name, entry, contents) for name, entry in files.items())
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
    """Encode the manifest with a checksum of its own, so that a single changed bit is noticed."""
    seal = hashlib.sha256(json.dumps(body, indent=2).encode("ascii")).hexdigest()
    return (json.dumps({**body, "seal": seal}, indent=2) + "\n").encode("ascii")


# -- reading ----------------------------------------------------------------------------------------------------------


def _require_committed(folder: StoragePath) -> StoragePath:
    """Return `folder` if a committed checkpoint is there; else raise an error that says what is there or next to it."""
    if is_committed(folder):
        return folder
    with reading(folder):
        is_file, is_dir = folder.is_file(), folder.is_dir()
    if is_file:
        raise CheckpointError(
            f"{folder} is a file; this trainer reads checkpoint folders (safetensors and JSON). For the weights in "
            "a file of another library: module.load_state_dict(torch.load(path, weights_only=True)['state_dict'])"
        )
    if is_dir:
        inside = [path.name for path in checkpoints_in(folder)]
        if inside:
            raise CheckpointError(f"{folder} is not itself a checkpoint; give one of those in it: {', '.join(inside)}")
        raise CheckpointError(
            f"{folder} has no {MANIFEST_FILE}: it is not a checkpoint, or was not committed (its write was interrupted)"
        )
    siblings = [path.name for path in checkpoints_in(folder.parent)]
    there = f"There are: {', '.join(siblings)}." if siblings else f"There are no checkpoints in {folder.parent}."
    raise CheckpointError(f"there is no checkpoint {folder}.{did_you_mean(folder.name, siblings)} {there}")


def _parse_manifest(body: dict[str, Any], where: str) -> Manifest:
    if body.keys() != {"format", "version", "info", "files"} or type(body["version"]) is not int:
        raise CheckpointError(f"{where} does not have the entries of a manifest")
    info, files, algorithm = body["info"], body["files"], ALGORITHMS.get(body["version"])
    if algorithm is None:
        raise CheckpointError(f"{where}: there is no format {body['version']}; it is damaged")
    if not isinstance(info, dict) or not isinstance(files, dict) or DATA_FILE not in files:
        raise CheckpointError(f"{where} does not have the entries of a manifest")
    for name, entry in files.items():
        if not _FILE.fullmatch(name):
            raise CheckpointError(f"{where} names a file that is not part of the format: {name!r:.100}")
        if (
            not isinstance(entry, dict)
            or entry.keys() != {"bytes", algorithm}
            or type(entry["bytes"]) is not int
            or not 0 <= entry["bytes"] < 2**63
            or not isinstance(entry[algorithm], str)
        ):
            raise CheckpointError(f"{where}: the entry of {name!r:.100} is malformed")

    def refuse(tensor: TensorInfo) -> None:
        raise CheckpointError(f"{where}: its info refers to a tensor")

    info = deserialize(info, refuse, where)
    if not isinstance(info, dict):
        raise CheckpointError(f"{where} does not have the entries of a manifest")
    return Manifest(
        info, {name: FileEntry(entry["bytes"], entry[algorithm], algorithm) for name, entry in files.items()}
    )


def _read_data(folder: StoragePath, manifest: Manifest, verify: bool) -> dict[str, Any]:
    entry = manifest.files[DATA_FILE]
    with open_entry(folder / DATA_FILE, entry, verify) as reader:
        text = reader.read(entry.bytes)
    data = from_json(text, str(folder / DATA_FILE))
    if not isinstance(data, dict):
        raise CheckpointError(f"{folder / DATA_FILE} does not hold the data of a checkpoint")
    return data


def _read_key(folder: StoragePath, manifest: Manifest, key: str, content: Any, verify: bool) -> Any:
    infos = _infos(folder, key, content)
    files = _files_of(folder, manifest, infos, key)
    sharded = [info for info in infos.values() if info.parts]
    if sharded:  # before their memory is allocated: of others only that of one file at a time is
        _check_sizes(folder, manifest, files)
    tensors = {info.name: torch.zeros(info.shape, dtype=info.dtype) for info in sharded}
    for name, (expected, extents) in files.items():
        entry = manifest.files[name]
        with open_entry(folder / name, entry, verify) as reader:
            for tensor_name, tensor in read_tensors(reader, entry.bytes, expected, str(folder / name)):
                if tensor_name in extents:
                    extent = extents[tensor_name]
                    extent.view_in(tensors[tensor_name]).copy_(tensor.view(extent.count, extent.length))
                else:
                    tensors[tensor_name] = tensor
    return deserialize(content, lambda info: tensors[info.name], _location(folder, key))


def _open_key(folder: StoragePath, manifest: Manifest, key: str, content: Any) -> Any:
    infos = _infos(folder, key, content)
    parts: dict[str, list[FilePart]] = {name: [] for name in infos}
    for name, (expected, extents) in _files_of(folder, manifest, infos, key).items():
        entry = manifest.files[name]
        with open_entry(folder / name, entry, hashing=False) as reader:
            positions = find_tensors(reader, entry.bytes, expected, str(folder / name))
        for tensor_name, offset in positions.items():
            extent = extents.get(tensor_name, FlatSlice(0, math.prod(infos[tensor_name].shape)))
            parts[tensor_name].append(FilePart(folder / name, offset, extent))
    tensors = {info.name: FileTensor(info.name, info.shape, info.dtype, parts[info.name]) for info in infos.values()}
    return deserialize(content, lambda info: tensors[info.name], _location(folder, key))


def _infos(folder: StoragePath, key: str, content: Any) -> dict[str, TensorInfo]:
    """Return the tensors of a top-level key by name."""
    infos: dict[str, TensorInfo] = {}

    def note(info: TensorInfo) -> None:
        if infos.setdefault(info.name, info) != info:
            raise CheckpointError(
                f"{_location(folder, key)} refers to the tensor {info.name!r:.100} in two different ways"
            )

    deserialize(content, note, _location(folder, key))
    return infos


def _files_of(
    folder: StoragePath, manifest: Manifest, infos: dict[str, TensorInfo], key: str
) -> dict[str, tuple[dict[str, TensorInfo], dict[str, FlatSlice]]]:
    """Return for each file the tensors expected in its header, and the elements of sharded tensors in it."""
    files: dict[str, tuple[dict[str, TensorInfo], dict[str, FlatSlice]]] = {
        name: ({}, {}) for name in manifest.files if name.partition(".")[0] == key and name != DATA_FILE
    }
    for info in infos.values():
        if not info.parts:
            files.setdefault(f"{key}.safetensors", ({}, {}))[0][info.name] = info
        for number, extent in info.parts:
            expected, extents = files.setdefault(part_file(key, number), ({}, {}))
            expected[info.name] = TensorInfo(info.name, info.dtype, (extent.numel,))
            extents[info.name] = extent
    missing = next((name for name in files if name not in manifest.files), None)
    if missing is not None:
        raise CheckpointError(f"{_location(folder, key)} refers to tensors, but the manifest has no {missing:.150}")
    return files


def _check_sizes(
    folder: StoragePath, manifest: Manifest, files: Mapping[str, tuple[dict[str, TensorInfo], Any]]
) -> None:
    """Check that the files are there, and large enough for the tensors in them."""
    for name, (expected, _) in files.items():
        problem = check_entry(folder / name, manifest.files[name], hashing=False)
        if problem is None and sum(size_of(i.dtype, i.shape) for i in expected.values()) > manifest.files[name].bytes:
            problem = f"{folder / name} is too short for its tensors: it is damaged"
        if problem is not None:
            raise CheckpointError(problem)


def part_file(key: str, rank: int) -> str:
    """Return the name of the file with process `rank`'s elements of the sharded tensors of a top-level key."""
    return f"{key}.{rank:05}.safetensors"


def _location(folder: StoragePath, key: str) -> str:
    return f"{folder / DATA_FILE}, {key!r:.100}"


@dataclass(frozen=True)
class FilePart:
    """A file with some of a tensor's elements."""

    path: StoragePath
    offset: int
    """Position of the first element in the file, in bytes."""
    extent: FlatSlice
    """The elements in this file."""

    def overlaps(self, wanted: FlatSlice) -> Iterator[tuple[int, int, int]]:
        """Yield the common runs of elements: (offset among its own elements, offset among `wanted`, length)."""
        own = self.extent
        stride = max(own.stride, 1)
        for number, (first, end) in enumerate(wanted.runs()):
            # The first own run that ends after `first`, and the first one that begins at or after `end`.
            low = max(0, (first - own.start - own.length) // stride + 1)
            high = min(own.count, -(-(end - own.start) // stride))
            for run in range(low, high) if own.count > 1 else range(1):
                start = own.start + run * own.stride
                begin, stop = max(first, start), min(end, start + own.length)
                if begin < stop:
                    yield run * own.length + begin - start, number * wanted.length + begin - first, stop - begin


class FileTensor(StoredTensor):
    """A tensor whose elements are in one or more safetensors files."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, parts: list[FilePart]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._parts = parts

    def __repr__(self) -> str:
        return f"FileTensor({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    @classmethod
    def joined(cls, name: str, shape: tuple[int, ...], pieces: Sequence[FileTensor]) -> FileTensor:
        """Return a tensor of this shape whose elements are those of complete tensors, one after the other."""
        parts, start = [], 0
        for piece in pieces:
            (part,) = piece._parts
            parts.append(FilePart(part.path, part.offset, FlatSlice(start, part.extent.numel)))
            start += part.extent.numel
        return cls(name, shape, pieces[0].dtype, parts)

    def read(self, extent: FlatSlice | None = None) -> torch.Tensor:
        wanted = FlatSlice(0, math.prod(self.shape)) if extent is None else extent
        result = torch.zeros(wanted.numel, dtype=self.dtype)
        memory, size = flat_bytes(result).numpy().data, self.dtype.itemsize
        for part in self._parts:
            runs = list(part.overlaps(wanted))
            with _open(part.path) if runs else nullcontext() as file:
                for source, target, length in runs:
                    _read_into(file, part, source * size, memory[target * size : (target + length) * size])
        return result if extent is not None else result.reshape(self.shape)


@contextmanager
def _open(path: StoragePath) -> Iterator[BinaryIO]:
    with reading(path), storage_of(path).open_file(path) as (file, _):
        yield file


def _read_into(file: Any, part: FilePart, offset: int, view: memoryview) -> None:
    with reading(part.path):
        file.seek(part.offset + offset)
        got = file.readinto(view)
    if got != len(view):
        raise CheckpointError(f"{part.path} ended {len(view) - got} bytes too early while it was read")
