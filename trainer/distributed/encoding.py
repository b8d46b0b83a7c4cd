"""Encode the values that processes send each other: JSON and raw tensors, so that decoding them runs no code."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from trainer.distributed.sendable import ERRORS, RECORDS
from trainer.errors import ConfigError, TrainerError

MAX_BYTES = 2**36
"""The size of the largest message that is accepted, in bytes."""
_KIND = "<kind>"
_HEADER = struct.Struct("<Q")
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def to_bytes(value: Any) -> bytes:
    """Encode a value.

    Args:
        value: None, bool, int, float, str, list, tuple, set, dict, bytes, tensors, numpy's numbers and arrays, torch's
            dtypes, exceptions, and objects of classes that are `sendable`, in any nesting. Tensors are copied to the
            CPU. Exceptions of other classes than the `sendable` ones become a TrainerError with their text.

    Raises:
        ConfigError: `value` contains another object; the message names its place.
    """
    tensors: list[bytes] = []
    text = json.dumps(_encode(value, tensors, "value"), separators=(",", ":")).encode()
    return b"".join([_HEADER.pack(len(text)), text, *tensors])


def from_bytes(message: bytes | bytearray | memoryview) -> Any:
    """Decode a message of `to_bytes`; its tensors are on the CPU.

    Raises:
        TrainerError: the message is damaged, or was not made by `to_bytes`.
    """
    view = memoryview(message)
    try:
        (length,) = _HEADER.unpack_from(view)
        start = _HEADER.size + length
        if start > len(view):
            raise ValueError("its end is missing")
        return _decode(json.loads(bytes(view[_HEADER.size : start])), view[start:])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, RuntimeError, struct.error) as error:
        raise TrainerError(f"a message between the processes is damaged, or is not of this run: {error}") from None


# -- writing -----------------------------------------------------------------------------------------------------------


def _encode(value: Any, tensors: list[bytes], where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if RECORDS.get(type(value).__name__) is type(value):
        fields = [getattr(value, name) for name in _fields(type(value))]
        return {_KIND: type(value).__name__, "fields": _encode(fields, tensors, where)}
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value, tensors, where)
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which cannot be sent to other processes: give data only (None, bool, "
        "int, float, str, list, tuple, dict, torch.Tensor)."
    )


def _encode_error(value: Exception, tensors: list[bytes], where: str) -> Any:
    kind = type(value).__name__ if ERRORS.get(type(value).__name__) is type(value) else ""
    text = str(value) if isinstance(value, TrainerError) else f"{type(value).__name__}: {value}"
    return {_KIND: "error", "name": kind, "text": text}


def _encode_dict(value: dict[Any, Any], tensors: list[bytes], where: str) -> Any:
    if all(type(key) is str and key != _KIND for key in value):
        return {key: _encode(one, tensors, f"{where}[{key!r}]") for key, one in value.items()}
    return {_KIND: "dict", "items": _encode([*map(list, value.items())], tensors, where)}


def _encode_list(value: Iterable[Any], tensors: list[bytes], where: str) -> list[Any]:
    return [_encode(one, tensors, f"{where}[{number}]") for number, one in enumerate(value)]


def _encode_array(value: np.ndarray[Any, Any], tensors: list[bytes], where: str) -> Any:
    return {_KIND: "array", **_raw(torch.from_numpy(value.copy()), tensors)}


_WRITERS: dict[Any, Callable[[Any, list[bytes], str], Any]] = {
    torch.Tensor: lambda value, tensors, where: {_KIND: "tensor", **_raw(value, tensors)},
    torch.dtype: lambda value, tensors, where: {_KIND: "dtype", "name": str(value)},
    Exception: _encode_error,
    dict: _encode_dict,
    list: _encode_list,
    tuple: lambda value, tensors, where: {_KIND: "tuple", "items": _encode_list(value, tensors, where)},
    set: lambda value, tensors, where: {_KIND: "set", "items": _encode_list(value, tensors, where)},
    (bytes, bytearray): lambda value, tensors, where: {_KIND: "bytes", "hex": value.hex()},
    # Enumerations of numbers and texts, and numpy's float64.
    int: lambda value, tensors, where: int(value),
    float: lambda value, tensors, where: float(value),
    str: lambda value, tensors, where: str.__str__(value),
    np.generic: lambda value, tensors, where: _encode(value.item(), tensors, where),
    np.ndarray: _encode_array,
}


def _raw(tensor: torch.Tensor, tensors: list[bytes]) -> dict[str, Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    about = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "at": sum(map(len, tensors))}
    tensors.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return about


def _fields(kind: Any) -> list[str]:
    if issubclass(kind, tuple):
        return list(kind._fields)
    return [field.name for field in dataclasses.fields(kind)]


# -- reading -----------------------------------------------------------------------------------------------------------


def _decode(data: Any, tensors: memoryview) -> Any:
    if isinstance(data, list):
        return [_decode(one, tensors) for one in data]
    if not isinstance(data, dict):
        return data
    if _KIND not in data:
        return {key: _decode(one, tensors) for key, one in data.items()}
    kind = data[_KIND]
    if kind in _READERS:
        return _READERS[kind](data, tensors)
    record, fields = RECORDS[kind], _decode(data["fields"], tensors)
    if len(fields) != len(_fields(record)):
        raise ValueError(f"{kind} with {len(fields)} fields")
    return record(*fields)


def _decode_tensor(data: dict[str, Any], tensors: memoryview) -> torch.Tensor:
    dtype, shape, at = _DTYPES[data["dtype"]], data["shape"], data["at"]
    if not all(type(size) is int and size >= 0 for size in [*shape, at]):
        raise ValueError(f"a tensor of shape {shape}")
    numel = math.prod(shape)
    if at + numel * dtype.itemsize > len(tensors):
        raise ValueError(f"a tensor of shape {shape} in {len(tensors)} bytes")
    if not numel:
        return torch.empty(shape, dtype=dtype, device="cpu")
    part = bytearray(tensors[at : at + numel * dtype.itemsize])
    return torch.frombuffer(part, dtype=torch.uint8).view(dtype).reshape(shape)


_READERS: dict[str, Callable[[dict[str, Any], memoryview], Any]] = {
    "tensor": _decode_tensor,
    "array": lambda data, tensors: _decode_tensor(data, tensors).numpy(),
    "dtype": lambda data, tensors: _DTYPES[data["name"]],
    "error": lambda data, tensors: ERRORS.get(data["name"], TrainerError)(str(data["text"])),
    "bytes": lambda data, tensors: bytes.fromhex(data["hex"]),
    "dict": lambda data, tensors: {_decode(k, tensors): _decode(v, tensors) for k, v in data["items"]},
    "tuple": lambda data, tensors: tuple(_decode(data["items"], tensors)),
    "set": lambda data, tensors: set(_decode(data["items"], tensors)),
}
