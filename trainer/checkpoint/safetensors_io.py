"""Read and write the safetensors file format, one tensor at a time.

The format is the safetensors library's (https://huggingface.co/docs/safetensors). This codec exists because the library
moves all tensors of a file to the CPU before it writes the first one, and cannot hash on the way: every file
would have to be read once more for its checksum, when written and when read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer.checkpoint.deserialization import TensorInfo, are_sizes, from_json
from trainer.checkpoint.shards import StoredTensor, materialize
from trainer.checkpoint.storage import HashedReader
from trainer.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

_CHUNK = 16 << 20
_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {code: dtype for dtype, code in _CODES.items()}
"""The dtypes by their names in a file."""


def is_native(dtype: torch.dtype) -> bool:
    """Return True if safetensors has this dtype; others are stored as the bytes of each element."""
    return dtype in _CODES


def file_chunks(tensors: Mapping[str, torch.Tensor] | Mapping[str, StoredTensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file with these tensors; copy at most one tensor at a time.

    Raises:
        CheckpointError: the header would exceed `MAX_HEADER`.
    """
    # Largest elements first, so that each tensor is aligned for its dtype.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        code, shape = _file_type(tensor.dtype, tensor.shape)
        end = offset + size_of(tensor.dtype, tensor.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"cannot store {len(names)} tensors in one file: their names exceed {MAX_HEADER} bytes")
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        plain = materialize(tensors[name]).detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        view = flat_bytes(plain).numpy().data
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]


class TensorFile:
    """The bytes of a safetensors file as chunks; can be iterated again from the beginning."""

    def __init__(self, tensors: Mapping[str, torch.Tensor] | Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return file_chunks(self._tensors)


def read_tensors(
    reader: HashedReader, size: int, expected: Mapping[str, TensorInfo], where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a safetensors file of `size` bytes, each in new CPU memory.

    Nothing is allocated before the header is checked.

    Raises:
        CheckpointError: the header does not describe exactly the `expected` tensors, or does not fit the size.
    """
    header, first = read_header(reader, size, where)
    for name in _checked_order(header, size - first, expected, where):
        yield name, _read_tensor(reader, expected[name], where)


def find_tensors(reader: HashedReader, size: int, expected: Mapping[str, TensorInfo], where: str) -> dict[str, int]:
    """Return the offset of each tensor from the start of a safetensors file, in bytes.

    Raises:
        CheckpointError: the header does not describe exactly the `expected` tensors, or does not fit the size.
    """
    header, position = read_header(reader, size, where)
    positions = {}
    for name in _checked_order(header, size - position, expected, where):
        positions[name] = position
        position += expected[name].bytes
    return positions


def read_header(reader: HashedReader, size: int, where: str) -> tuple[dict[str, Any], int]:
    """Return the tensors' entries, by name, in the header of a safetensors file, and the offset of the first tensor.

    Raises:
        CheckpointError: there is no such header.
    """
    length = int.from_bytes(reader.read(8), "little")
    if length > min(size - 8, MAX_HEADER):
        raise CheckpointError(f"{where} is damaged, or is not a safetensors file: its header would have {length} bytes")
    header = from_json(reader.read(length), f"the header of {where}")
    if not isinstance(header, dict):
        raise CheckpointError(f"{where} is damaged, or is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _checked_order(header: dict[str, Any], size: int, expected: Mapping[str, TensorInfo], where: str) -> list[str]:
    """Return the names in the order of their bytes, which must fill the file without gaps or overlaps."""
    if header.keys() != expected.keys():
        raise _error(where, "it does not have the tensors that checkpoint.json names")
    try:
        spans = {name: header[name]["data_offsets"] for name in expected}
        names = sorted(expected, key=lambda name: [*spans[name], name])
    except (KeyError, TypeError, RecursionError):
        raise _error(where, "its header does not say where each tensor is") from None
    position = 0
    for name in names:
        code, shape = _file_type(expected[name].dtype, expected[name].shape)
        begin, position = position, position + expected[name].bytes
        wanted = {"dtype": code, "shape": shape, "data_offsets": [begin, position]}
        if header[name] != wanted or not are_sizes(spans[name]):
            raise _error(
                where, f"its header does not have {name!r:.100} at byte {begin}, as {code} of shape {shape!s:.100}"
            )
    if position != size:
        raise _error(where, f"its tensors take {position} bytes, but {size} are there")
    return names


def _read_tensor(reader: HashedReader, info: TensorInfo, where: str) -> torch.Tensor:
    raw, dtype = torch.empty(info.bytes, dtype=torch.uint8), info.dtype
    reader.read_into(raw.numpy().data)
    if dtype is torch.bool and bool((raw > 1).any()):
        raise _error(where, f"the tensor {info.name!r:.100} is boolean and has values other than 0 and 1")
    try:
        return raw.view(dtype).reshape(info.shape)
    except (RuntimeError, OverflowError, TypeError):
        raise _error(where, f"the tensor {info.name!r:.100} has an impossible shape") from None


def _file_type(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return the dtype and shape in the file: a dtype that safetensors lacks is stored as the bytes of each element."""
    if dtype in _CODES:
        return _CODES[dtype], list(shape)
    return "U8", [*shape, dtype.itemsize]


def size_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of the elements in bytes."""
    return dtype.itemsize * math.prod(shape)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 view."""
    flat = tensor.reshape(-1)
    # A single element counts as contiguous whatever its stride is, but cannot be viewed as bytes then.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _error(where: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{where}: {problem}. It is damaged, or was not written by this package")
