"""Serialize nested data to JSON plus named tensors, and back exactly.

A value that JSON lacks is written as an object whose key begins with `$`:

    {"$tensor": name, "dtype": "float32", "shape": [2, 3]}     a tensor; the same name twice is the same tensor
      ... "parts": [[file, start, length, stride, count], ...]    a sharded tensor, with elements in several files
    {"$tuple": [...]}   {"$items": [[key, value], ...]}        a tuple; a dict whose keys are not plain strings
    {"$counter": [[key, value], ...]}                          a collections.Counter, which MultiStepLR keeps
    {"$float": "nan"}   {"$int": "0x..."}                      nan and infinities; integers beyond 64 bits
    {"$number": ["float32", 0.5]}   {"$array": {"$tensor"...}}    a number and an array of numpy

A user's dict with a key that begins with `$` is written as `$items`, so that it cannot be mistaken for one of these.
"""

from __future__ import annotations

import enum
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from trainer.checkpoint.shards import FlatSlice, Shard, StoredTensor, materialize
from trainer.errors import CheckpointError
from trainer.hyperparameters import NUMPY_NUMBERS, SCALARS, is_numpy_number, is_scalar

MAX_DEPTH = 100
"""Maximum nesting depth, written and read."""
_MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in most operations of torch."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.complex128, torch.complex64, torch.complex32),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    )
}
"""The dtypes that can be stored, by their name in the JSON."""

_ALLOWED = (
    "A checkpoint holds data only: None, bool, int, float, str, list, tuple, dict, torch.Tensor, and numpy's numbers "
    "and arrays of numbers"
)
_ODD_FLOATS = frozenset({"nan", "-nan", "inf", "-inf"})
_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "store value.name"),
    (os.PathLike, "store str(value)"),
    ((set, frozenset), "store sorted(value)"),
    ((bytes, bytearray), "store value.hex(), or a uint8 tensor"),
    (torch.nn.Module, "store value.state_dict()"),
    ((torch.dtype, torch.device), "store str(value)"),
    ((bool, int, float, str, tuple, list), "store it as the plain type"),
    (type, "store value.__name__"),
)


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a tensor in a checkpoint."""

    name: str
    """The tensor's name in the safetensors file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[int, FlatSlice], ...] = ()
    """Numbers of the files that hold a sharded tensor, and the elements in each."""


class Serialized(NamedTuple):
    """Result of `serialize`."""

    data: Any
    """Ready for JSON."""
    tensors: dict[str, torch.Tensor]
    """The full tensors, by the names used in `data`."""
    shards: dict[str, Shard]
    """Shards of the sharded tensors that this process holds."""
    parts: dict[str, list[list[int]]]
    """The "parts" lists in `data` of the sharded tensors, still empty, to be filled by the caller."""


def serialize(value: Any, where: str, allow_tensors: bool = True) -> Serialized:
    """Convert `value` to JSON-ready data, and collect its tensors by name; nothing is copied.

    Tensors that are the same memory (same storage, offset, shape and strides) get one name. A tensor directly in the
    dict `value` keeps its key as its name; a deeper one is named by its path, as in "0.state.3.exp_avg". Subclasses of
    dict become dicts, except Counter; nn.Parameter becomes a plain tensor. The same `Shard` object twice is one tensor.

    Args:
        where: the name of `value` in messages.
        allow_tensors: if False, refuse tensors too.

    Raises:
        CheckpointError: something cannot be stored; names every such field, its type, and what to store instead.
    """
    serializer = _Serializer(value, where, allow_tensors)
    data = serializer.encode(value)
    refused = serializer.refused
    if len(refused) == 1:
        raise CheckpointError(f"cannot store {refused[0]}. {_ALLOWED}.")
    if refused:
        shown = "".join(f"\n  - {problem}" for problem in refused[:20])
        raise CheckpointError(f"cannot store {len(refused)} fields. {_ALLOWED}.{shown}")
    return Serialized(data, serializer.tensors, serializer.shards, serializer.parts)


def deserialize(data: Any, take: Callable[[TensorInfo], Any], where: str) -> Any:
    """Invert `serialize`; `take` returns the tensor (or a stand-in) for each reference to one.

    Raises:
        CheckpointError: `serialize` does not write such data.
    """
    return _Deserializer(take, where).decode(data, 0)


def to_json(data: Any) -> bytes:
    """Encode the result of `serialize` as a JSON document."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode("ascii")


def from_json(text: bytes, where: str) -> Any:
    """Parse JSON strictly: UTF-8, no NaN literals, bounded nesting.

    Raises:
        CheckpointError: `text` is not such a document.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = f"{where} is not valid JSON ({error}): it is damaged, or not part of a checkpoint"
        raise CheckpointError(reason) from None


class _Serializer:
    """One walk over the data: the current path, the names given, and the refused fields."""

    def __init__(self, root: Any, where: str, allow_tensors: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, Shard] = {}
        self.parts: dict[str, list[list[int]]] = {}
        self.refused: list[str] = []
        self._allow_tensors = allow_tensors
        self._where = where
        self._path: list[Any] = []
        self._open: set[int] = set()  # the containers around the current value, to detect cycles
        self._name_of: dict[Any, str] = {}
        self._own_names: set[str] = set()
        if isinstance(root, dict):
            # Other programs look for a state_dict's keys: a deeper tensor must not take such a name.
            keys = (key for key, value in root.items() if type(key) is str and isinstance(value, (torch.Tensor, Shard)))
            self._own_names = {key for key in keys if key == _utf8(key) and key != "__metadata__"}
        self._reserved = {*self._own_names, "__metadata__"}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind is float:
            return value if math.isfinite(value) else {"$float": _odd_float(value)}
        if kind is int:
            return value if value.bit_length() <= 64 else {"$int": hex(value)}
        if kind in SCALARS:
            return value
        if is_numpy_number(value):
            return {"$number": [value.dtype.name, self.encode(value.item())]}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is np.ndarray and value.dtype.name in NUMPY_NUMBERS:
            # A copy: torch wants an array that may be written to, in the machine's order of bytes.
            return {"$array": self._tensor(torch.from_numpy(np.array(value, NUMPY_NUMBERS[value.dtype.name])))}
        if kind is Shard:
            return self._shard(value)
        if kind is list:
            return self._container(value, self._list)
        if kind is tuple:
            return self._container(value, lambda items: {"$tuple": self._list(items)})
        if kind is Counter:
            return self._container(value, lambda counts: {"$counter": self._items(counts)})
        if isinstance(value, dict):
            return self._container(value, self._dict)
        self._refuse(f"{_name(kind)}; {_advice(value)}")
        return None

    def _container(self, value: Any, encode: Callable[[Any], Any]) -> Any:
        if id(value) in self._open:
            self._refuse(f"{_name(type(value))} that contains itself")
            return None
        if len(self._path) >= MAX_DEPTH:
            self._refuse(f"{_name(type(value))} nested more than {MAX_DEPTH} levels deep")
            return None
        self._open.add(id(value))
        data = encode(value)
        self._open.discard(id(value))
        return data

    def _at(self, key: Any, value: Any) -> Any:
        self._path.append(key)
        data = self.encode(value)
        self._path.pop()
        return data

    def _list(self, values: Any) -> list[Any]:
        return [self._at(index, value) for index, value in enumerate(values)]

    def _dict(self, values: dict[Any, Any]) -> dict[str, Any]:
        if all(type(key) is str and not key.startswith("$") for key in values):
            return {key: self._at(key, value) for key, value in values.items()}
        return {"$items": self._items(values)}

    def _items(self, values: dict[Any, Any]) -> list[Any]:
        items = []
        for key, value in values.items():
            if not _is_key(key):
                self._refuse(f"dict with the key {key!r} of type {_name(type(key))}; use a str, number or tuple as key")
                continue
            items.append([self.encode(key), self._at(key, value)])
        return items

    def _tensor(self, tensor: torch.Tensor) -> Any:
        problem = _tensor_problem(tensor)
        if not self._allow_tensors:
            problem = "torch.Tensor, which cannot be here; store value.item() or value.tolist()"
        if problem:
            self._refuse(problem)
            return None
        if tensor.device.type == "xla":
            tensor = tensor.cpu()  # XLA tensors have no memory that can be read.
        memory = _memory(tensor)
        name = self._name_of.get(memory) if memory else None
        if name is None:
            name = self._new_name()
            self.tensors[name] = tensor
            self._name_of[memory] = name
        return {"$tensor": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}

    def _shard(self, shard: Shard) -> Any:
        problem = _tensor_problem(shard.local)
        if not self._allow_tensors or problem:
            self._refuse(problem or "part of a tensor, which cannot be here")
            return None
        name = self._name_of.get(id(shard))
        if name is None:
            name = self._name_of[id(shard)] = self._new_name()
            self.shards[name], self.parts[name] = shard, []
        dtype = str(shard.local.dtype).removeprefix("torch.")
        return {"$tensor": name, "dtype": dtype, "shape": list(shard.shape), "parts": self.parts[name]}

    def _new_name(self) -> str:
        path = self._path or [self._where]
        name = _utf8(".".join(str(key) for key in path))
        if path == [name] and name in self._own_names:
            return name
        candidate, number = name, 1
        while candidate in self.tensors or candidate in self.shards or candidate in self._reserved:
            number += 1
            candidate = f"{name}#{number}"
        return candidate

    def _refuse(self, what: str) -> None:
        place = self._where + "".join(f"[{key!r}]" for key in self._path)
        self.refused.append(f"{place}: it is a {what}")


class _Deserializer:
    def __init__(self, take: Callable[[TensorInfo], Any], where: str) -> None:
        self._take = take
        self._where = where

    def decode(self, data: Any, depth: int) -> Any:
        if depth > MAX_DEPTH + 1:  # a tuple that is a key stands one level deeper here than when it was written
            raise self._error(f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(data, list):
            return [self.decode(item, depth + 1) for item in data]
        if not isinstance(data, dict):
            return data
        marker = next((key for key in data if key.startswith("$")), None)
        if marker is None:
            return {key: self.decode(value, depth + 1) for key, value in data.items()}
        if marker == "$tensor":
            return self._take(self._tensor(data))
        if len(data) > 1:
            raise self._error(f"{marker!r:.100} does not stand alone")
        return self._special(marker, data[marker], depth)

    def _special(self, marker: str, content: Any, depth: int) -> Any:
        if marker == "$tuple" and isinstance(content, list):
            return tuple(self.decode(item, depth + 1) for item in content)
        if marker in ("$items", "$counter") and isinstance(content, list):
            items = self._items(content, depth)
            return Counter(items) if marker == "$counter" else items
        if marker == "$array" and isinstance(content, dict) and content.get("dtype") in NUMPY_NUMBERS:
            taken = self.decode(content, depth + 1)
            return materialize(taken).numpy().copy() if isinstance(taken, (torch.Tensor, StoredTensor)) else taken
        if marker == "$number" and isinstance(content, list) and len(content) == 2 and content[0] in [*NUMPY_NUMBERS]:
            number, kind = self.decode(content[1], depth + 1), NUMPY_NUMBERS[content[0]]
            limits = np.iinfo(kind) if issubclass(kind, np.integer) else None
            if type(number) is type(kind(0).item()) and (limits is None or limits.min <= number <= limits.max):
                return kind(number)
        if marker == "$float" and isinstance(content, str) and content in _ODD_FLOATS:
            return float(content)
        if marker == "$int" and isinstance(content, str) and re.fullmatch("-?0x[0-9a-f]+", content):
            return int(content, 16)
        raise self._error(f"{marker!r:.100} is unknown or has a content that it cannot have")

    def _items(self, content: list[Any], depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for item in content:
            if not isinstance(item, list) or len(item) != 2:
                raise self._error("a dict holds something that is not a pair")
            key = self.decode(item[0], depth + 1)
            if not _is_key(key) or key in result:
                raise self._error("a dict holds a key that cannot be one, or the same key twice")
            result[key] = self.decode(item[1], depth + 1)
        return result

    def _tensor(self, data: dict[str, Any]) -> TensorInfo:
        name, dtype, shape = data["$tensor"], data.get("dtype"), data.get("shape")
        if (
            data.keys() - {"parts"} != {"$tensor", "dtype", "shape"}
            or not isinstance(name, str)
            or not isinstance(dtype, str)
            or dtype not in DTYPES
            or not isinstance(shape, list)
            or len(shape) > _MAX_DIMENSIONS
            or not all(type(size) is int and 0 <= size < 2**63 for size in shape)
            or math.prod(max(1, size) for size in shape) * DTYPES[dtype].itemsize >= 2**63
        ):
            raise self._error(f"the reference to the tensor {name!r:.100} is malformed")
        parts = self._parts(data["parts"], math.prod(shape), name) if "parts" in data else ()
        return TensorInfo(name, DTYPES[dtype], tuple(shape), parts)

    def _parts(self, parts: Any, numel: int, name: str) -> tuple[tuple[int, FlatSlice], ...]:
        """Parse parts that together have as many elements as the tensor, all of them inside it."""
        found = []
        for part in parts if isinstance(parts, list) else [None]:
            if (
                not isinstance(part, list)
                or len(part) != 5
                or any(type(n) is not int or not 0 <= n < 2**63 for n in part)
            ):
                raise self._error(f"a part of the tensor {name!r:.100} is malformed")
            found.append((part[0], FlatSlice(*part[1:])))
        if len({number for number, _ in found}) != len(found):
            raise self._error(f"two parts of the tensor {name!r:.100} are in one file")
        outside = any(extent.end > numel or extent.overlaps_itself() for _, extent in found)
        if outside or sum(extent.numel for _, extent in found) != numel:
            raise self._error(f"the parts of the tensor {name!r:.100} do not add up to it")
        return tuple(found)

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {problem}. It is damaged, or was not written by this package")


def _memory(tensor: torch.Tensor) -> Any:
    """Return a key equal for tensors that view the same elements of the same memory; None for an empty tensor."""
    if tensor.numel() == 0:
        return None
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    kind = _name(type(tensor))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"{kind}; store a plain tensor (of a DTensor: value.full_tensor())"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"{kind} that is sparse or nested; store value.to_dense(), or its parts"
    if tensor.is_meta:
        return f"{kind} on the meta device, which has no values; materialize it first"
    if tensor.is_quantized or str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        return f"{kind} of {tensor.dtype}; convert it to another dtype"
    return None


def _advice(value: Any) -> str:
    module = type(value).__module__
    if module == "numpy":
        return "store its numbers, as an array of float64 or int64, or a text for each"
    for kinds, advice in _ADVICE:
        if isinstance(value, kinds):
            return advice
    return f"store the {'name' if callable(value) else 'data'} from which it can be made again"


def _is_key(key: Any) -> bool:
    return is_scalar(key) or (type(key) is tuple and all(_is_key(part) for part in key))


def _odd_float(value: float) -> str:
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    return sign + ("nan" if math.isnan(value) else "inf")


def _utf8(name: str) -> str:
    """Replace lone surrogates, which other readers of safetensors refuse."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
