"""The checkpoint format and its readers: a directory of safetensors and JSON files, valid once it has a manifest.

    <name>/<key>.safetensors    one for each top-level key with tensors; model.safetensors has the state_dict's keys
    <name>/<key>.00001.safetensors    the elements of sharded tensors that process 1 holds, each flattened
    <name>/checkpoint.json      everything that is not a tensor, with references to the tensors (see serialization.py)
    <name>/manifest.json        format, version, a small "info" for listings, and size and checksum of every other file;
                                in an object store also the folder in <name>, .new-..., that a replacement has made
    <name>/file.json            size and checksum of <name>.ckpt, the single file beside the folder, if it was written

Reading a checkpoint runs no code: nothing is unpickled or imported, and anything unexpected is a CheckpointError.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import torch

from trainer.checkpoint.deserialization import TensorInfo, deserialize
from trainer.checkpoint.flat_slice import FlatSlice
from trainer.checkpoint.manifest import DATA_FILE, Manifest, location, read_data, read_manifest
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.safetensors_io import find_tensors, flat_bytes, read_tensors
from trainer.checkpoint.shards import StoredTensor
from trainer.checkpoint.storage import StoragePath, check_entry, open_entry, reading, storage_of
from trainer.errors import CheckpointError


def read_checkpoint(
    path: str | StoragePath, keys: Collection[str] | None = None, verify: bool = True
) -> dict[str, Any]:
    """Return the state that was given to `write_checkpoint`, with its tensors on the CPU.

    Args:
        path: the checkpoint's directory.
        keys: read only these of the checkpoint's top-level keys, without opening the files of the others.
        verify: check the hashes of the files while reading them. Sizes and structure are always checked.

    Raises:
        CheckpointError: there is no valid checkpoint; the message names the file that is wrong.
    """
    manifest = read_manifest(path)
    return {
        key: _read_key(manifest, key, content, verify)
        for key, content in read_data(manifest, verify).items()
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
    manifest = read_manifest(path)
    folder = manifest.folder
    if verify:
        own = list(manifest.files.items())[process_group.rank :: process_group.world_size]
        found = [problem for name, entry in own if (problem := check_entry(folder / name, entry, True))]
        problems = [problem for of_one in process_group.all_gather_object(found) for problem in of_one]
        if problems:
            raise CheckpointError("\n".join(problems))
    return {
        key: _open_key(manifest, key, content)
        if lazy is None or key in lazy
        else _read_key(manifest, key, content, False)
        for key, content in read_data(manifest, verify).items()
    }


# -- reading ----------------------------------------------------------------------------------------------------------

_Files = dict[str, tuple[dict[str, TensorInfo], dict[str, FlatSlice]]]
"""For each file of a key the tensors expected in its header, and the elements of sharded tensors in it."""


def _read_key(manifest: Manifest, key: str, content: Any, verify: bool) -> Any:
    folder = manifest.folder
    infos, value = _infos(folder, key, content)
    files = _files_of(manifest, infos, key)
    if not files:
        return value
    sharded = [info for info in infos.values() if info.parts]
    if sharded:  # before their memory is allocated; other tensors are allocated file by file
        _check_sizes(manifest, files)
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
    return deserialize(content, lambda info: tensors[info.name], location(folder, key))


def _open_key(manifest: Manifest, key: str, content: Any) -> Any:
    folder = manifest.folder
    infos, value = _infos(folder, key, content)
    files = _files_of(manifest, infos, key)
    if not files:
        return value
    parts: dict[str, list[FilePart]] = {name: [] for name in infos}
    for name, (expected, extents) in files.items():
        entry = manifest.files[name]
        with open_entry(folder / name, entry, hashing=False) as reader:
            positions = find_tensors(reader, entry.bytes, expected, str(folder / name))
        for tensor_name, offset in positions.items():
            extent = extents.get(tensor_name, FlatSlice(0, math.prod(infos[tensor_name].shape)))
            parts[tensor_name].append(FilePart(folder / name, offset, extent))
    tensors = {info.name: FileTensor(info.name, info.shape, info.dtype, parts[info.name]) for info in infos.values()}
    return deserialize(content, lambda info: tensors[info.name], location(folder, key))


def _infos(folder: StoragePath, key: str, content: Any) -> tuple[dict[str, TensorInfo], Any]:
    """Return the tensors of a top-level key by name, and its value, which is final if there are none."""
    infos: dict[str, TensorInfo] = {}

    def note(info: TensorInfo) -> None:
        if infos.setdefault(info.name, info) != info:
            raise CheckpointError(
                f"{location(folder, key)} refers to the tensor {info.name!r:.100} in two different ways"
            )

    return infos, deserialize(content, note, location(folder, key))


def _files_of(manifest: Manifest, infos: dict[str, TensorInfo], key: str) -> _Files:
    files: _Files = {}
    for name in manifest.files:
        if name.partition(".")[0] == key and name != DATA_FILE:
            files[name] = ({}, {})
    for info in infos.values():
        if not info.parts:
            files.setdefault(f"{key}.safetensors", ({}, {}))[0][info.name] = info
        for number, extent in info.parts:
            expected, extents = files.setdefault(part_file(key, number), ({}, {}))
            expected[info.name] = TensorInfo(info.name, info.dtype_name, (extent.numel,))
            extents[info.name] = extent
    for name in files:
        if name not in manifest.files:
            place = location(manifest.folder, key)
            raise CheckpointError(f"{place} refers to tensors, but the manifest has no {name:.150}")
    return files


def _check_sizes(manifest: Manifest, files: _Files) -> None:
    """Check that the files are there, and large enough for the tensors in them."""
    for name, (expected, _) in files.items():
        path, entry = manifest.folder / name, manifest.files[name]
        with open_entry(path, entry, hashing=False):
            if sum(info.bytes for info in expected.values()) > entry.bytes:
                raise CheckpointError(f"{path} is too short for its tensors: it is damaged")


def part_file(key: str, rank: int) -> str:
    """Return the name of the file with process `rank`'s elements of the sharded tensors of a top-level key."""
    return f"{key}.{rank:05}.safetensors"


class FilePart(NamedTuple):
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
            for run in range(low, high):
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

    @classmethod
    def joined(cls, name: str, shape: tuple[int, ...], pieces: Sequence[FileTensor]) -> FileTensor:
        """Return a tensor of this shape that joins complete tensors, one after the other."""
        parts, start = [], 0
        for piece in pieces:
            (part,) = piece._parts
            parts.append(FilePart(part.path, part.offset, FlatSlice(start, part.extent.numel)))
            start += part.extent.numel
        return cls(name, shape, pieces[0].dtype, parts)

    def read(self, extent: FlatSlice | None = None) -> torch.Tensor:
        if extent is None:
            return self.read(FlatSlice(0, math.prod(self.shape))).reshape(self.shape)
        result = torch.zeros(extent.numel, dtype=self.dtype)
        memory, size = flat_bytes(result).numpy().data, self.dtype.itemsize
        for part in self._parts:
            runs = list(part.overlaps(extent))
            if runs:
                with _open(part.path) as file:
                    for source, target, length in runs:
                        _read_into(file, part, source * size, memory[target * size : (target + length) * size])
        return result


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


def evaluated_weights(checkpoint: Mapping[str, Any]) -> Any:
    """Return a checkpoint's weights for evaluation: the averages, if the optimizer trains with other weights."""
    if checkpoint.get("evaluated") != "average":
        return checkpoint.get("model")
    return {**checkpoint["model"], **checkpoint["average"]}
