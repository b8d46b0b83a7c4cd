"""Read what `serialization` writes: JSON with references to tensors. Does not import torch, for a fast command line."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import numpy as np

from trainer.checkpoint.flat_slice import FlatSlice
from trainer.errors import CheckpointError
from trainer.hyperparameters import CODECS, NUMPY_NUMBERS, is_scalar, kind_of

if TYPE_CHECKING:
    import torch

    from trainer.checkpoint.shards import Loadable

MAX_DEPTH = 100
"""Maximum nesting depth, written and read."""
_MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor, as in most operations of torch."""

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "bool": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
    "float8_e8m0fnu": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
}
"""Bytes of an element, by the names of the dtypes that can be stored."""
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}
"""The defaults of a defaultdict that can be stored, by the name in the JSON."""
KINDS = ("set", "frozenset", "range", "timedelta", "path", "dtype", "device", "Size")
"""The kinds of hyperparameters that can be anywhere in a checkpoint: those that no class of the user's makes."""
_ODD_FLOATS = frozenset({"nan", "-nan", "inf", "-inf"})


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a tensor in a checkpoint."""

    name: str
    """The tensor's name in the safetensors file."""
    dtype_name: str
    """The dtype without "torch."."""
    shape: tuple[int, ...]
    parts: tuple[tuple[int, FlatSlice], ...] = ()
    """Numbers of the files that hold a sharded tensor, and the elements in each."""

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype_name)
        return found

    @property
    def bytes(self) -> int:
        """Size of the elements."""
        return ITEM_BYTES[self.dtype_name] * math.prod(self.shape)


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


class _Deserializer:
    def __init__(self, take: Callable[[TensorInfo], Any], where: str) -> None:
        self._take = take
        self._where = where

    def decode(self, data: Any, depth: int) -> Any:
        if depth > MAX_DEPTH + 1:  # a tuple that is a key stands one level deeper here than when it was written
            raise self._error(f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(data, list):
            items = []
            for item in data:
                items.append(self.decode(item, depth + 1) if isinstance(item, (dict, list)) else item)
            return items
        if not isinstance(data, dict):
            return data
        entries = {}
        for key, value in data.items():
            if key.startswith("$"):
                return self._special(key, data, depth)
            entries[key] = self.decode(value, depth + 1) if isinstance(value, (dict, list)) else value
        return entries

    def _special(self, marker: str, data: dict[str, Any], depth: int) -> Any:
        """Return what a dict with a key of `serialization` stands for."""
        if marker == "$tensor":
            return self._take(self._tensor(data))
        if len(data) > 1:
            raise self._error(f"{marker!r:.100} does not stand alone")
        kind, read = _READERS.get(marker, (NoneType, None))
        if read is None or not isinstance(data[marker], kind):
            raise self._malformed(marker)
        return read(self, data[marker], depth + 1)

    def _tuple(self, content: list[Any], depth: int) -> Any:
        return tuple([self.decode(item, depth) for item in content])

    def _counter(self, content: list[Any], depth: int) -> Any:
        return Counter(self._items(content, depth))

    def _default(self, content: list[Any], depth: int) -> Any:
        factory, items = self._pair(content, FACTORIES, "$default")
        if not isinstance(items, list):
            raise self._malformed("$default")
        return defaultdict(factory, self._items(items, depth))

    def _number(self, content: list[Any], depth: int) -> Any:
        kind, number = self._pair(content, NUMPY_NUMBERS, "$number")
        number = self.decode(number, depth)
        limits = np.iinfo(kind) if issubclass(kind, np.integer) else None
        if type(number) is not type(kind(0).item()) or (limits and not limits.min <= number <= limits.max):
            raise self._malformed("$number")
        return kind(number)

    def _pair(self, content: list[Any], known: Mapping[str, Any], marker: str) -> tuple[Any, Any]:
        """Return the class that is named first in a list of two, and the second item."""
        if len(content) != 2 or content[0] not in [*known]:
            raise self._malformed(marker)
        return known[content[0]], content[1]

    def _kind(self, content: list[Any], depth: int) -> Any:
        with suppress(TypeError, ValueError, LookupError, ArithmeticError, RuntimeError):
            name, *stored = content
            codec = CODECS[KINDS[KINDS.index(name)]]
            value, detail = [self.decode(one, depth) for one in stored]
            made = codec.make(value, detail, object)
            if [codec.content(made), codec.detail(made)] == [value, detail] and are_items(made):
                return made
        raise self._malformed("$kind")

    def _array(self, content: dict[str, Any], depth: int) -> Any:
        if content.get("dtype") not in [*NUMPY_NUMBERS]:
            raise self._malformed("$array")
        taken = self.decode(content, depth)
        return taken if taken is None or isinstance(taken, TensorInfo) else _array(taken)

    def _float(self, content: str, depth: int) -> float:
        if content not in _ODD_FLOATS:
            raise self._malformed("$float")
        return float(content)

    def _int(self, content: str, depth: int) -> int:
        if not re.fullmatch("-?0x[0-9a-f]+", content):
            raise self._malformed("$int")
        return int(content, 16)

    def _malformed(self, marker: str) -> CheckpointError:
        return self._error(f"{marker!r:.100} is unknown or has a content that it cannot have")

    def _items(self, content: list[Any], depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for item in content:
            if not isinstance(item, list) or len(item) != 2:
                raise self._error("a dict holds something that is not a pair")
            key = self.decode(item[0], depth)
            if not is_key(key) or key in result:
                raise self._error("a dict holds a key that cannot be one, or the same key twice")
            result[key] = self.decode(item[1], depth)
        return result

    def _tensor(self, data: dict[str, Any]) -> TensorInfo:
        name, dtype, shape = data["$tensor"], data.get("dtype"), data.get("shape")
        if (
            data.keys() - {"parts"} != {"$tensor", "dtype", "shape"}
            or not isinstance(name, str)
            or not isinstance(dtype, str)
            or dtype not in ITEM_BYTES
            or not are_sizes(shape)
            or len(shape) > _MAX_DIMENSIONS
            or math.prod(filter(None, shape)) * ITEM_BYTES[dtype] >= 2**63
        ):
            raise self._error(f"the reference to the tensor {name!r:.100} is malformed")
        parts = self._parts(data["parts"], math.prod(shape), name) if "parts" in data else ()
        return TensorInfo(name, dtype, tuple(shape), parts)

    def _parts(self, parts: Any, numel: int, name: str) -> tuple[tuple[int, FlatSlice], ...]:
        """Parse parts that together have as many elements as the tensor, all of them inside it."""
        if not isinstance(parts, list) or not all(are_sizes(part) and len(part) == 5 for part in parts):
            raise self._error(f"a part of the tensor {name!r:.100} is malformed")
        found = {part[0]: FlatSlice(*part[1:]) for part in parts}  # by the number of the file
        outside = any(extent.end > numel or extent.overlaps_itself() for extent in found.values())
        if outside or len(found) != len(parts) or sum(extent.numel for extent in found.values()) != numel:
            raise self._error(f"the parts of the tensor {name!r:.100} do not add up to it")
        return tuple(found.items())

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {problem}. It is damaged, or was not written by this package")


_READERS: dict[str, tuple[type, Callable[[_Deserializer, Any, int], Any]]] = {
    "$tuple": (list, _Deserializer._tuple),
    "$items": (list, _Deserializer._items),
    "$counter": (list, _Deserializer._counter),
    "$default": (list, _Deserializer._default),
    "$number": (list, _Deserializer._number),
    "$kind": (list, _Deserializer._kind),
    "$array": (dict, _Deserializer._array),
    "$float": (str, _Deserializer._float),
    "$int": (str, _Deserializer._int),
}
"""The class of the content, and its reader, by the key that stands alone in a dict."""


def are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list of integers from 0 that fit 64 bits."""
    if not isinstance(value, list) or not {*map(type, value)} <= {int}:
        return False
    return min(value, default=0) >= 0 and max(value, default=0) < 2**63


def _array(stored: Loadable) -> Any:
    from trainer.checkpoint.shards import materialize

    return materialize(stored).numpy().copy()


def are_items(values: Any) -> bool:
    """Whether a value is not a set, or a set of what can be stored in one: no sets, whose order takes long to find."""
    return not isinstance(values, (set, frozenset)) or all(is_key(one) or kind_of(one) in KINDS[2:] for one in values)


def is_key(key: Any) -> bool:
    return is_scalar(key) or (type(key) is tuple and all(is_key(part) for part in key))
