"""Serialize nested data to JSON plus named tensors, so that `deserialize` gives it back exactly.

A value that JSON lacks is written as an object whose key begins with `$`:

    {"$tensor": name, "dtype": "float32", "shape": [2, 3]}     a tensor; the same name twice is the same tensor
      ... "parts": [[file, start, length, stride, count], ...]    a sharded tensor, with elements in several files
    {"$tuple": [...]}   {"$items": [[key, value], ...]}        a tuple; a dict whose keys are not plain strings
    {"$counter": [[key, value], ...]}                          a collections.Counter, which MultiStepLR keeps
    {"$default": ["int", [[key, value], ...]]}                 a collections.defaultdict with one of `FACTORIES`
    {"$float": "nan"}   {"$int": "0x..."}                      nan and infinities; integers beyond 64 bits
    {"$number": ["float32", 0.5]}   {"$array": {"$tensor"...}}    a number and an array of numpy
    {"$kind": ["dtype", "float32", null]}                      one of `KINDS`, by its content and detail in `CODECS`

A user's dict with a key that begins with `$` is written as `$items`, so that it cannot be mistaken for one of these.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.checkpoint.deserialization import FACTORIES, ITEM_BYTES, KINDS, MAX_DEPTH, are_items, is_key
from trainer.checkpoint.shards import Shard
from trainer.distributed.sendable import sendable
from trainer.errors import CheckpointError, printable
from trainer.hyperparameters import CODECS, NUMPY_NUMBERS, SCALARS, is_numpy_number, kind_of

log = logging.getLogger("trainer")

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""The dtypes that can be stored, by their name in the JSON."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_ALLOWED = (
    "A checkpoint holds data only: None, bool, int, float, str, list, tuple, dict, set, timedelta, Path, torch.Tensor, "
    "torch.dtype, torch.device, torch.Size, and numpy's numbers and arrays of numbers"
)
_JSON_SCALARS = SCALARS - {int, float}
"""Classes whose values JSON holds unchanged."""
_MARKS = repeat("$")
"""The first character of the keys that only this module writes, repeated for each key of a dict."""
_reported: set[tuple[str, ...]] = set()
"""The entries and classes that a warning has named."""

Refused = list[tuple[tuple[Any, ...], str]]
"""The path to each value that cannot be stored, from its entry on, and what it is."""


@sendable
class UnstorableError(CheckpointError):
    """A checkpoint cannot hold some values; the message names each."""

    refused: Sequence[tuple[tuple[Any, ...], str]] = ()
    """See `Refused`; empty in an error of another process."""


def unstorable(refused: Refused) -> UnstorableError:
    """Return the error of values that cannot be stored."""
    problems = [f"{place(path)}: it is a {what}" for path, what in refused]
    shown = "".join(f"\n  - {problem}" for problem in problems[:20])
    several = f"{len(problems)} fields. {_ALLOWED}.{shown}"
    error = UnstorableError(f"cannot store {several if len(problems) > 1 else f'{problems[0]}. {_ALLOWED}.'}")
    error.refused = refused
    return error


def place(path: Sequence[Any]) -> str:
    """Return a path as a text, such as callbacks['Timer']."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


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


def serialize(value: Any, where: str, allow_tensors: bool = True, exact: bool = False) -> Serialized:
    """Convert `value` to JSON-ready data, and collect its tensors by name; nothing is copied.

    Tensors that are the same memory (same storage, offset, shape and strides) get one name. A tensor directly in the
    dict `value` keeps its key as its name; a deeper one is named by its path, as in "0.state.3.exp_avg". Subclasses of
    dict become dicts, except Counter and defaultdict with one of `FACTORIES`; a warning says so once, but of
    OrderedDict. nn.Parameter becomes a plain tensor. The same `Shard` object twice is one tensor.

    Args:
        where: the name of `value` in messages.
        allow_tensors: if False, refuse tensors too.
        exact: refuse other subclasses of dict, which would come back as dicts.

    Raises:
        UnstorableError: something cannot be stored; names every such field, its type, and what to store instead.
    """
    serializer = _Serializer(value, where, allow_tensors, exact)
    data = serializer.encode(value)
    if serializer.refused:
        raise unstorable(serializer.refused)
    return Serialized(data, serializer.tensors, serializer.shards, serializer.parts)


class _Serializer:
    """One walk over the data: the current path, the names given, and the refused fields."""

    def __init__(self, root: Any, where: str, allow_tensors: bool, exact: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.shards: dict[str, Shard] = {}
        self.parts: dict[str, list[list[int]]] = {}
        self.refused: Refused = []
        self._allow_tensors, self._exact = allow_tensors, exact
        self._where = where
        self._path: list[Any] = []
        self._open: set[int] = set()  # the containers around the current value, to detect cycles
        self._name_of: dict[Any, str] = {}
        self._own_names: set[str] = set()
        # Other programs look for a state_dict's keys: a deeper tensor must not take such a name.
        if isinstance(root, dict):
            for key, value in root.items():
                if type(key) is str and isinstance(value, (torch.Tensor, Shard)) and key == _utf8(key):
                    self._own_names.add(key)
        self._own_names.discard("__metadata__")
        self._taken = {*self._own_names, "__metadata__"}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind is float:
            return value if math.isfinite(value) else {"$float": _odd_float(value)}
        if kind is int:
            return value if value.bit_length() <= 64 else {"$int": hex(value)}
        if kind in _JSON_SCALARS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is Shard:
            return self._shard(value)
        if kind in (list, tuple) or isinstance(value, dict):
            return self._container(value, kind)
        if is_numpy_number(value):
            return {"$number": [value.dtype.name, self.encode(value.item())]}
        if kind is np.ndarray and value.dtype.name in NUMPY_NUMBERS:
            # A copy: torch wants an array that may be written to, in the machine's order of bytes.
            return {"$array": self._tensor(torch.from_numpy(np.array(value, NUMPY_NUMBERS[value.dtype.name])))}
        if (name := kind_of(value)) in KINDS:
            return self._kind(name, value)
        return self._refuse(f"{_name(kind)}; store data from which it can be made again: a name, a list, a state_dict")

    def _container(self, value: Any, kind: type) -> Any:
        if id(value) in self._open:
            return self._refuse(f"{_name(kind)} that contains itself")
        if len(self._path) >= MAX_DEPTH:
            return self._refuse(f"{_name(kind)} nested more than {MAX_DEPTH} levels deep")
        self._open.add(id(value))
        data: Any = []
        if kind in (list, tuple):
            for index, one in enumerate(value):
                self._path.append(index)
                data.append(one if type(one) in _JSON_SCALARS else self.encode(one))
                self._path.pop()
        elif (
            kind in (dict, OrderedDict) and {*map(type, value)} <= {str} and not any(map(str.startswith, value, _MARKS))
        ):
            data = {}
            for key, one in value.items():
                self._path.append(key)
                data[key] = one if type(one) in _JSON_SCALARS else self.encode(one)
                self._path.pop()
        else:
            data = self._other_dict(value, kind)
        self._open.discard(id(value))
        return {"$tuple": data} if kind is tuple else data

    def _other_dict(self, values: Any, kind: type) -> Any:
        """Encode a dict of another class, or with other keys than texts."""
        if kind is Counter:
            return {"$counter": self._items(values)}
        if kind is defaultdict and values.default_factory in FACTORIES.values():
            return {"$default": [values.default_factory.__name__, self._items(values)]}
        if kind not in (dict, OrderedDict):
            if self._exact:
                return self._refuse(f"{_name(kind)}; store dict(value)")
            self._report(_name(kind))
            return self._container(dict(values), dict)
        return {"$items": self._items(values)}

    def _items(self, values: dict[Any, Any]) -> list[Any]:
        items = []
        for key, value in values.items():
            if not is_key(key):
                self._refuse(f"dict with the key {key!r} of type {_name(type(key))}; use a str, number or tuple as key")
                continue
            self._path.append(key)
            items.append([self.encode(key), self.encode(value)])
            self._path.pop()
        return items

    def _kind(self, name: str, value: Any) -> Any:
        if not are_items(value):
            return self._refuse(f"{name} of other values than numbers, texts and tuples; use a list")
        self._path.append(name)
        content, detail = self.encode(CODECS[name].content(value)), self.encode(CODECS[name].detail(value))
        self._path.pop()
        return {"$kind": [name, content, detail]}

    def _tensor(self, tensor: torch.Tensor) -> Any:
        problem = _tensor_problem(tensor)
        if not self._allow_tensors:
            problem = "torch.Tensor, which cannot be here; store value.item() or value.tolist()"
        if problem:
            return self._refuse(problem)
        if tensor.device.type == "xla":
            tensor = tensor.cpu()  # XLA tensors have no memory that can be read.
        memory = _memory(tensor)
        name = self._name_of.get(memory)
        if name is None:
            name = self._new_name()
            self.tensors[name] = tensor
            self._name_of[memory] = name
        return {"$tensor": name, "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}

    def _shard(self, shard: Shard) -> Any:
        problem = _tensor_problem(shard.local)
        if problem:
            return self._refuse(problem)
        name = self._name_of.get(id(shard))
        if name is None:
            name = self._name_of[id(shard)] = self._new_name()
            self.shards[name], self.parts[name] = shard, []
        dtype, shape = _NAMES[shard.local.dtype], list(shard.shape)
        return {"$tensor": name, "dtype": dtype, "shape": shape, "parts": self.parts[name]}

    def _new_name(self) -> str:
        path = self._path or [self._where]
        name = _utf8(".".join(map(str, path)))
        if path == [name] and name in self._own_names:
            return name
        candidate, number = name, 1
        while candidate in self._taken:
            number += 1
            candidate = f"{name}#{number}"
        self._taken.add(candidate)
        return candidate

    def _report(self, kind: str) -> None:
        if (entry := (self._where, *map(str, self._path[:1]), kind)) not in _reported:
            _reported.add(entry)
            where = printable(place([self._where, *self._path]))
            log.warning("%s: it is a %s, and comes back from a checkpoint as a dict", where, kind)

    def _refuse(self, what: str) -> None:
        """Note that the current value cannot be stored; return None in its place."""
        self.refused.append(((self._where, *self._path), what))


def _memory(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that view the same elements of the same memory."""
    if tensor.numel() == 0:
        return object()  # two empty tensors are never one
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _tensor_problem(tensor: torch.Tensor) -> str | None:
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (tensor.is_nested or tensor.is_meta)
    if is_plain and tensor.layout == torch.strided and tensor.dtype in _NAMES:
        return None
    return (
        f"{_name(type(tensor))} of {tensor.dtype}; store a plain, dense tensor of a common dtype that is not on the "
        "meta device (of a DTensor: value.full_tensor())"
    )


def _odd_float(value: float) -> str:
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    return sign + ("nan" if math.isnan(value) else "inf")


def _utf8(name: str) -> str:
    """Replace lone surrogates, which other readers of safetensors refuse."""
    return name.encode("utf-8", "replace").decode("utf-8")


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"
