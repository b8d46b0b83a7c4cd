"""The safetensors file format: tensors to bytes and back, one tensor at a time.

The files are what the safetensors library reads and writes (https://huggingface.co/docs/safetensors). This is a codec
of our own because the library moves all tensors of a file to the CPU before it writes the first, and cannot hash on the
way, so that every file would have to be read once more to write it and once more to read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainer.checkpoint.serialization import TensorInfo, from_json
from trainer.checkpoint.shards import StoredTensor, whole
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


class Source(Protocol):
    """Where `read_tensors` gets its bytes, in order."""

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, or CheckpointError."""

    def read_into(self, view: memoryview) -> None:
        """Fill `view`, or CheckpointError."""


def is_native(dtype: torch.dtype) -> bool:
    """Whether safetensors has this dtype; others are stored as the bytes of each element."""
    return dtype in _CODES


def file_chunks(tensors: Mapping[str, torch.Tensor] | Mapping[str, StoredTensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file with these tensors. Holds the copy of one tensor at a time, if it needs one.

    Raises:
        CheckpointError: there are so many tensors that the header would exceed `MAX_HEADER`.
    """
    # Largest elements first, so that each tensor is aligned for its dtype.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        code, shape = _stored_as(TensorInfo(name, tensor.dtype, tuple(tensor.shape)))
        end = offset + size_of(tensor.dtype, tensor.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"cannot store {len(names)} tensors in one file: their names exceed {MAX_HEADER} bytes")
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        view = _bytes_of(whole(tensors[name]))
        for start in range(0, len(view), _CHUNK):
            yield view[start : start + _CHUNK]


def read_tensors(
    source: Source, size: int, expected: Mapping[str, TensorInfo], where: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file of `size` bytes, one after the other, on the CPU, each in memory of its own.

    Nothing is allocated before the header is found to describe exactly the `expected` tensors and to fit the size.

    Raises:
        CheckpointError: it does not.
    """
    names, _ = _read_header(source, size, expected, where)
    for name in names:
        yield name, _read_tensor(source, expected[name], where)


def find_tensors(source: Source, size: int, expected: Mapping[str, TensorInfo], where: str) -> dict[str, int]:
    """Where the tensors of a safetensors file begin, in bytes from its start. Checks as `read_tensors` does.

    Raises:
        CheckpointError: the header does not describe exactly the `expected` tensors, or does not fit the size.
    """
    names, position = _read_header(source, size, expected, where)
    places = {}
    for name in names:
        places[name] = position
        position += size_of(expected[name].dtype, expected[name].shape)
    return places


def _read_header(source: Source, size: int, expected: Mapping[str, TensorInfo], where: str) -> tuple[list[str], int]:
    """The names in the order of their bytes, and where the first one begins."""
    if size < 8:
        raise _error(where, "it is too short for a safetensors file")
    length = int.from_bytes(source.read(8), "little")
    if length > min(size - 8, MAX_HEADER):
        raise _error(where, f"it is not a safetensors file (a header of {length} bytes)")
    header = from_json(source.read(length), f"the header of {where}")
    return _checked_order(header, size - 8 - length, expected, where), 8 + length


def _checked_order(header: Any, size: int, expected: Mapping[str, TensorInfo], where: str) -> list[str]:
    """The names in the order of their bytes, after checking that these fill the file without holes or overlaps."""
    if not isinstance(header, dict):
        raise _error(where, "its header is not an object")
    header.pop("__metadata__", None)
    if header.keys() != expected.keys():
        strays = sorted(header.keys() ^ expected.keys())
        raise _error(
            where, f"it and checkpoint.json do not name the same tensors; {strays[0]!r} is in one of them only"
        )
    spans = []
    for name, entry in header.items():
        code, shape = _stored_as(expected[name])
        if not isinstance(entry, dict) or entry.get("dtype") != code or entry.get("shape") != shape:
            raise _error(
                where, f"the tensor {name!r} is not the {code} of shape {shape} that checkpoint.json refers to"
            )
        span = entry.get("data_offsets")
        if not isinstance(span, list) or len(span) != 2 or any(type(offset) is not int for offset in span):
            raise _error(where, f"the tensor {name!r} has no place in the file")
        spans.append((span[0], span[1], name))
    position = 0
    for start, end, name in sorted(spans):
        if start != position or end - start != size_of(expected[name].dtype, expected[name].shape):
            raise _error(where, f"the bytes of the tensor {name!r} are not where they must be")
        position = end
    if position != size:
        raise _error(where, f"its tensors take {position} bytes, but {size} are there")
    return [name for _, _, name in sorted(spans)]


def _read_tensor(source: Source, info: TensorInfo, where: str) -> torch.Tensor:
    raw = torch.empty(size_of(info.dtype, info.shape), dtype=torch.uint8)
    if raw.numel():
        source.read_into(raw.numpy().data)
    if info.dtype is torch.bool and bool((raw > 1).any()):
        raise _error(where, f"the tensor {info.name!r} is boolean and has values other than 0 and 1")
    try:
        return raw.view(info.dtype).reshape(info.shape)
    except (RuntimeError, OverflowError, TypeError):
        raise _error(where, f"the tensor {info.name!r} has an impossible shape") from None


def _stored_as(info: TensorInfo) -> tuple[str, list[int]]:
    """Safetensors' name for the dtype, and the shape: a dtype that it lacks is stored as the bytes of each element."""
    if info.dtype in _CODES:
        return _CODES[info.dtype], list(info.shape)
    return "U8", [*info.shape, info.dtype.itemsize]


def size_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of the elements."""
    return dtype.itemsize * math.prod(shape)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, of one dimension; nothing is copied."""
    flat = tensor.reshape(-1)
    # A single element counts as contiguous whatever its stride is, but cannot be viewed as bytes then.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return flat_bytes(plain).numpy().data


def _error(where: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{where}: {problem}. It is damaged, or was not written by this package")
