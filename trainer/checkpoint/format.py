"""A checkpoint is a folder: tensors in safetensors, the rest in JSON, and a manifest that makes it valid.

    <name>/<key>.safetensors    one for each top-level key with tensors; in model.safetensors, the state_dict's keys
    <name>/<key>.00001.safetensors    process 1's elements of tensors that are divided among processes, each flattened
    <name>/checkpoint.json      everything that is not a tensor, with references to the tensors (see tree.py)
    <name>/manifest.json        format, version, a small "info" for listings, and size and SHA-256 of every other file

Reading one runs no code: nothing is unpickled or imported, and whatever does not fit is a CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from trainer.checkpoint.disk import MANIFEST_FILE, FileEntry
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.safetensors_io import find_tensors, flat_bytes, read_tensors
from trainer.checkpoint.serialization import TensorInfo, from_json, join
from trainer.checkpoint.shards import FlatSlice, StoredTensor
from trainer.checkpoint.storage import (
    StoragePath,
    as_storage_path,
    check_entry,
    open_entry,
    read_small_file,
    storage_of,
)
from trainer.errors import CheckpointError, did_you_mean

FORMAT = "exact-trainer checkpoint"
VERSION = 1
DATA_FILE = "checkpoint.json"

_MAX_MANIFEST = 16 << 20
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,99}")
"""What a top-level key may be."""
_FILE = re.compile(rf"{re.escape(DATA_FILE)}|{KEY.pattern}(\.[0-9]{{5,}})?\.safetensors")


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint says about itself."""

    info: dict[str, Any]
    """What `write_checkpoint` was given as `info`."""
    files: dict[str, FileEntry]


def read_checkpoint(
    path: str | StoragePath, keys: Collection[str] | None = None, verify: bool = True
) -> dict[str, Any]:
    """What was given to `write_checkpoint`, tensors on the CPU.

    Args:
        path: the checkpoint's folder.
        keys: read only these top-level keys; the files of the others are not opened.
        verify: check the hashes of the files that are read, while reading them. Sizes and structure are always checked.

    Raises:
        CheckpointError: there is no valid checkpoint; names the file that is wrong. Or it has no such key.
    """
    folder = _existing(as_storage_path(path))
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
    path: str | StoragePath, lazy: Collection[str], verify: bool, peers: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """As `read_checkpoint`, but the tensors of the top-level keys `lazy` are `StoredTensor`s, which are read later.

    Args:
        verify: check the hashes of all files first, divided among the `peers`, who all call this.

    Raises:
        CheckpointError: on all of them.
    """
    folder = _existing(as_storage_path(path))
    manifest = read_manifest(folder)
    if verify:
        own = list(manifest.files.items())[peers.rank :: peers.world_size]
        found = [problem for name, entry in own if (problem := check_entry(folder / name, entry, True))]
        problems = [problem for of_one in peers.gather_objects(found) for problem in of_one]
        if problems:
            raise CheckpointError("\n".join(problems))
    return {
        key: _open_key(folder, manifest, key, content)
        if key in lazy
        else _read_key(folder, manifest, key, content, False)
        for key, content in _read_data(folder, manifest, verify).items()
    }


def read_metadata(path: str | StoragePath) -> dict[str, Any]:
    """What `read_checkpoint` returns, with a `TensorInfo` (name, dtype, shape) for each tensor. Opens no tensor file.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    folder = _existing(as_storage_path(path))
    data = _read_data(folder, read_manifest(folder), verify=True)
    return {key: join(content, lambda info: info, _place(folder, key)) for key, content in data.items()}


def read_manifest(path: str | StoragePath) -> Manifest:
    """Its `info` and its list of files, without opening these.

    Raises:
        CheckpointError: `path` is not a committed checkpoint, or its manifest is damaged.
    """
    folder = _existing(as_storage_path(path))
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
    if text != with_checksum(body):
        raise CheckpointError(f"{place} is damaged: its checksum is not that of its contents")
    return _parse_manifest(body, place)


def verify_checkpoint(path: str | StoragePath) -> list[str]:
    """Everything that is wrong with a checkpoint, in words that name the file; empty when it is whole.

    Reads all its files: missing and damaged ones, and ones that do not belong to it.
    """
    problems = find_damage(path)
    folder = as_storage_path(path)
    try:
        known = {*read_manifest(folder).files, MANIFEST_FILE}
    except CheckpointError:
        return problems
    strays = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    return problems + [f"{folder / name} is not in the manifest" for name in strays]


def find_damage(path: str | StoragePath, contents: bool = True) -> list[str]:
    """As `verify_checkpoint`, but a file too many is no damage.

    Args:
        contents: False: check only that the files are there and have their size; opens none but the manifest.
    """
    folder = as_storage_path(path)
    try:
        files = read_manifest(folder).files
    except CheckpointError as error:
        return [str(error)]
    checks = (check_entry(folder / name, entry, contents) for name, entry in files.items())
    return [problem for problem in checks if problem]


def is_committed(path: StoragePath) -> bool:
    """Whether it is a folder with a manifest: a checkpoint that was completely written, perhaps damaged since."""
    return (path / MANIFEST_FILE).is_file()


def checkpoints_in(folder: StoragePath) -> list[StoragePath]:
    """The committed checkpoints in a folder, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and is_committed(path))


def with_checksum(body: dict[str, Any]) -> bytes:
    """The manifest's text, with a checksum of its own: one changed bit anywhere in it is noticed."""
    seal = hashlib.sha256(json.dumps(body, indent=2).encode("ascii")).hexdigest()
    return (json.dumps({**body, "seal": seal}, indent=2) + "\n").encode("ascii")


# -- reading ----------------------------------------------------------------------------------------------------------


def _existing(folder: StoragePath) -> StoragePath:
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


def _read_data(folder: StoragePath, manifest: Manifest, verify: bool) -> dict[str, Any]:
    entry = manifest.files[DATA_FILE]
    with open_entry(folder / DATA_FILE, entry, verify) as reader:
        text = reader.read(entry.bytes)
    data = from_json(text, str(folder / DATA_FILE))
    if not isinstance(data, dict):
        raise CheckpointError(f"{folder / DATA_FILE} is not that of a checkpoint")
    return data


def _read_key(folder: StoragePath, manifest: Manifest, key: str, content: Any, verify: bool) -> Any:
    infos = _infos(folder, key, content)
    tensors: dict[str, torch.Tensor] = {}
    for info in infos.values():
        if info.parts:
            tensors[info.name] = torch.zeros(info.shape, dtype=info.dtype)
    for name, (expected, extents) in _files_of(folder, manifest, infos, key).items():
        entry = manifest.files[name]
        with open_entry(folder / name, entry, verify) as reader:
            for tensor_name, tensor in read_tensors(reader, entry.bytes, expected, str(folder / name)):
                if tensor_name in extents:
                    extent = extents[tensor_name]
                    extent.view_in(tensors[tensor_name]).copy_(tensor.view(extent.count, extent.length))
                else:
                    tensors[tensor_name] = tensor
    return join(content, lambda info: tensors[info.name], _place(folder, key))


def _open_key(folder: StoragePath, manifest: Manifest, key: str, content: Any) -> Any:
    infos = _infos(folder, key, content)
    sources: dict[str, list[Source]] = {name: [] for name in infos}
    for name, (expected, extents) in _files_of(folder, manifest, infos, key).items():
        entry = manifest.files[name]
        with open_entry(folder / name, entry, hashing=False) as reader:
            places = find_tensors(reader, entry.bytes, expected, str(folder / name))
        for tensor_name, offset in places.items():
            extent = extents.get(tensor_name, FlatSlice(0, math.prod(infos[tensor_name].shape)))
            sources[tensor_name].append(Source(folder / name, offset, extent))
    tensors = {info.name: FileTensor(info.name, info.shape, info.dtype, sources[info.name]) for info in infos.values()}
    return join(content, lambda info: tensors[info.name], _place(folder, key))


def _infos(folder: StoragePath, key: str, content: Any) -> dict[str, TensorInfo]:
    """The tensors of a top-level key by name."""
    infos: dict[str, TensorInfo] = {}

    def note(info: TensorInfo) -> None:
        if infos.setdefault(info.name, info) != info:
            raise CheckpointError(f"{_place(folder, key)} refers to the tensor {info.name!r} in two different ways")

    join(content, note, _place(folder, key))
    return infos


def _files_of(
    folder: StoragePath, manifest: Manifest, infos: dict[str, TensorInfo], key: str
) -> dict[str, tuple[dict[str, TensorInfo], dict[str, FlatSlice]]]:
    """By file: what its header has to say, and which elements of divided tensors are in it."""
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
        raise CheckpointError(f"{_place(folder, key)} refers to tensors, but the manifest has no {missing}")
    return files


def part_file(key: str, rank: int) -> str:
    """The file with the elements that process `rank` has of the divided tensors of a top-level key."""
    return f"{key}.{rank:05}.safetensors"


def _place(folder: StoragePath, key: str) -> str:
    return f"{folder / DATA_FILE}, {key!r}"


@dataclass(frozen=True)
class Source:
    """A file that has some of a tensor's elements."""

    path: StoragePath
    offset: int
    """Where the first of them is, in bytes."""
    extent: FlatSlice
    """Which."""

    def overlaps(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """What it has of the elements from `first` to before `end`: how many elements into its own, from, to before."""
        extent = self.extent
        stride = max(extent.stride, 1)
        # The first run that ends after `first`, and the first one that begins at or after `end`.
        low = max(0, (first - extent.start - extent.length) // stride + 1)
        high = min(extent.count, -(-(end - extent.start) // stride))
        for run in range(low, high) if extent.count > 1 else range(1):
            start = extent.start + run * extent.stride
            begin, stop = max(first, start), min(end, start + extent.length)
            if begin < stop:
                yield run * extent.length + begin - start, begin, stop


class FileTensor(StoredTensor):
    """A tensor whose elements are in one or more safetensors files."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, sources: list[Source]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._sources = sources

    def __repr__(self) -> str:
        return f"FileTensor({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def read(self, extent: FlatSlice | None = None) -> torch.Tensor:
        wanted = FlatSlice(0, math.prod(self.shape)) if extent is None else extent
        result = torch.zeros(wanted.numel, dtype=self.dtype)
        if not result.numel():
            return result if extent is not None else result.reshape(self.shape)
        memory = flat_bytes(result).numpy().data
        size, position = self.dtype.itemsize, 0
        with ExitStack() as opened:
            files: dict[StoragePath, BinaryIO] = {}
            for first, end in wanted.runs():
                for source in self._sources:
                    for within, begin, stop in source.overlaps(first, end):
                        if source.path not in files:
                            files[source.path] = opened.enter_context(_opened(source.path))
                        start = position + begin - first
                        view = memory[start * size : (start + stop - begin) * size]
                        _read_into(files[source.path], source, source.offset + within * size, view)
                position += end - first
        return result if extent is not None else result.reshape(self.shape)


@contextmanager
def _opened(path: StoragePath) -> Iterator[BinaryIO]:
    try:
        with storage_of(path).open_file(path) as (file, _):
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None


def _read_into(file: BinaryIO, source: Source, offset: int, view: memoryview) -> None:
    try:
        file.seek(offset)
        got = file.readinto(view)  # type: ignore[attr-defined]  # a BufferedReader has it
    except OSError as error:
        raise CheckpointError(f"{source.path} cannot be read: {error.strerror or error}") from error
    if got != len(view):
        raise CheckpointError(f"{source.path} ended {len(view) - got} bytes too early while it was read")
