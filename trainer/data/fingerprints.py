"""Describe the numbers that decide which samples a loader gives, to compare them with another process's or run's."""

from __future__ import annotations

import dis
import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainer.model.reachable import attributes, is_filled

_MOST_DATASETS = 10_000
_MOST_SAMPLES = 5_000_000
_MOST_FUNCTIONS = 100
_MOST_ITEMS = 1000
_MOST_COMPARED = 16
_PLAIN = (bool, int, float, str, tuple)
_DEPTH = 6


def fingerprint(value: Any) -> str | None:
    """Return a description by which two values can be compared; None if the value holds no numbers.

    An int or bool is described by itself; a range, list, array or tensor of numbers by its size and a hash, which do
    not depend on its type.
    """
    if type(value) in (bool, int):
        return str(value)
    if isinstance(value, range):
        value = np.arange(value.start, value.stop, value.step)
    elif isinstance(value, torch.Tensor):
        if value.is_meta or value.layout != torch.strided:
            return None
        value = value.detach().cpu()
    elif not isinstance(value, (list, tuple, np.ndarray)):
        return None
    try:
        numbers = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # a ragged list, or other objects
        return None
    if numbers.dtype.kind not in "biuf":
        return None
    # The same for a list, an array and a tensor.
    numbers = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)
    return f"{numbers.size} numbers ({hashlib.sha256(numbers.tobytes()).hexdigest()[:8]})"


def indices_fingerprint(dataset: Any) -> str | None:
    """Return a fingerprint of the indices of `Subset`s and the sizes of `ConcatDataset`s in a dataset, or None."""
    found: list[str] = []
    for one in _nested(dataset):
        if isinstance(one, Subset):
            found.append(fingerprint(one.indices) or "unknown")
        elif isinstance(one, ConcatDataset):
            found.append(fingerprint(one.cumulative_sizes) or "unknown")
    return _joint_fingerprint(found)


def samples_fingerprints(dataset: Any) -> dict[str, str]:
    """Return fingerprints of the lists that a dataset keeps with a whole number or text for each sample.

    By class and attribute. File names are compared without the folder that all of them are in.
    """
    found: dict[str, list[str]] = {}
    for one in _nested(dataset):
        if not isinstance(one, (Subset, ConcatDataset)):
            for name, value in attributes(one).items():
                if (text := _sample_list_fingerprint(value, one)) is not None:
                    found.setdefault(f"{type(one).__name__}.{name}", []).append(text)
    return {name: str(_joint_fingerprint(texts)) for name, texts in found.items()}


def contents_fingerprints(dataset: Any) -> dict[str, str]:
    """Return fingerprints of some samples that a dataset keeps in tensors, arrays and lists, by class and attribute.

    Nothing of a dataset is called but its length. Texts do not count, which may be paths.
    """
    found: dict[str, list[str]] = {}
    for one in _nested(dataset):
        length = 0 if isinstance(one, (Subset, ConcatDataset)) else _length(one)
        for name, value in attributes(one).items() if length else ():
            try:
                texts = [_digest(repr(_contents(column, length))) for column in _columns(value, length)]
            except Exception:  # a foreign kind of array or tensor
                continue
            if texts:
                found.setdefault(f"{type(one).__name__}.{name}", []).extend(texts)
    return {name: str(_joint_fingerprint(texts)) for name, texts in found.items()}


def _contents(column: Any, length: int) -> list[Any]:
    """Return texts of a few entries of a tensor, array or list, the first and the last among them."""
    positions = {number * (length - 1) // (_MOST_COMPARED - 1) for number in range(_MOST_COMPARED)}
    return [_content(column[position]) for position in sorted(positions)]


def _columns(value: Any, length: int) -> list[Any]:
    """Return the tensors, arrays and lists with an entry for each sample: the value, or those in it."""
    several = [*value.values()] if type(value) is dict else value if type(value) in (list, tuple) else []
    if type(value) in (list, tuple) and len(value) == length:
        return [] if any(one is None for one in value) else [value]  # a cache that is not full yet
    known = (torch.Tensor, np.ndarray)
    return [
        one for one in [value, *several[:_MOST_ITEMS]] if isinstance(one, known) and one.ndim and len(one) == length
    ]


def _content(value: Any, depth: int = 3) -> Any:
    """Return text and lists that are equal for two samples of the same numbers; of an unknown object, its class."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided:
        value = value.detach().reshape(-1)[:_MOST_ITEMS].resolve_conj().contiguous().view(torch.uint8).numpy()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return hashlib.sha256(np.asarray(value).reshape(-1)[:_MOST_ITEMS].tobytes()).hexdigest()
    if value is None or type(value) in (bool, int, float, complex):
        return repr(value)
    inside = [*value.values()] if type(value) is dict else value if type(value) in (list, tuple) else []
    return [type(value).__name__, *(_content(one, depth - 1) for one in inside[:_MOST_ITEMS] if depth)]


def _length(dataset: Any) -> int:
    """Return the length of a dataset; 0 if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return 0


def _nested(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those that it is made of, which it keeps in attributes."""
    waiting, seen = [dataset], set()
    for _ in range(_MOST_DATASETS):
        if not waiting:
            return
        yield (one := waiting.pop(0))
        if isinstance(one, ConcatDataset):
            waiting += one.datasets
        elif isinstance(one, Subset):
            waiting.append(one.dataset)
        elif isinstance(one, Dataset) and id(one) not in seen:
            seen.add(id(one))  # it may be in itself
            waiting += [inner for inner in attributes(one).values() if isinstance(inner, Dataset)]


def _sample_list_fingerprint(value: Any, dataset: Any) -> str | None:
    if not isinstance(value, (list, tuple, range, np.ndarray, torch.Tensor)) or getattr(value, "ndim", 1) != 1:
        return None
    return _list_fingerprint(value) if 0 < len(value) == _length(dataset) <= _MOST_SAMPLES else None


def _list_fingerprint(value: Any) -> str | None:
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.tolist()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return fingerprint(value) if str(value.dtype).removeprefix("torch.").startswith(("int", "uint")) else None
    kinds = {int} if isinstance(value, range) else set(map(type, value))
    if kinds == {str}:
        first, last = min(value), max(value)
        folder = next((at for at, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), len(first))
        return f"{len(value)} texts ({_digest(chr(0).join(text[folder:] for text in value))})"
    return fingerprint(value) if kinds <= {int, bool} else None


def _joint_fingerprint(found: list[str]) -> str | None:
    if len(found) < 2:
        return found[0] if found else None
    return f"{len(found)} lists ({_digest(' '.join(found))})"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def sampler_fingerprints(sampler: Any) -> dict[str, str]:
    """Return fingerprints of the numbers that a sampler holds, by the names of its attributes.

    Without `epoch`, which the trainer sets. Those of a list of indices, or of lists of them, are called "order".
    """
    if isinstance(sampler, (list, tuple, range, np.ndarray, torch.Tensor)):
        order, batches = fingerprint(sampler), list[Any](sampler)
        if order is None and all(isinstance(one, (list, tuple)) for one in batches):  # of different sizes
            order = fingerprint([*map(len, batches), *(index for batch in batches for index in batch)])
        return {} if order is None else {"order": order}
    found = {name: fingerprint(value) for name, value in attributes(sampler).items() if name != "epoch"}
    return {name: numbers for name, numbers in found.items() if numbers is not None}


def globals_fingerprints(functions: Iterable[Any]) -> dict[str, str]:
    """Return the plain globals that functions read, and functions of the same module that they call, by name.

    Without those that they set: these count, or keep something.
    """
    found: dict[str, str] = {}
    written: set[str] = set()
    waiting = [one for one in functions if isinstance(one, FunctionType)]
    seen: set[FunctionType] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for instruction in _instructions(function.__code__):
            name, value = instruction.argval, function.__globals__.get(instruction.argval)
            if instruction.opname == "STORE_GLOBAL":
                written.add(name)
            elif instruction.opname == "LOAD_GLOBAL" and type(value) in _PLAIN:
                found[f"global {name}"] = repr(value)
            elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
                waiting.append(value)
    return {name: text for name, text in found.items() if name.removeprefix("global ") not in written}


def read_values_fingerprints(function: Any) -> dict[str, str]:
    """Return the plain values that a function reads from its object, from enclosed and from global objects, by name.

    Lists and dicts of plain values are such values too. `hparams` is looked into; no other property is called.
    Without single values that it encloses, or that are globals themselves.
    """
    function, own = getattr(function, "__func__", function), getattr(function, "__self__", None)
    if not isinstance(function, FunctionType):
        return {}
    codes = [function.__code__, *(one for one in function.__code__.co_consts if isinstance(one, CodeType))]
    names = {name for code in codes for name in code.co_names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells if is_filled(cell)}
    values |= {} if own is None else {"self": own}
    values |= {f"global {name}": function.__globals__[name] for name in names if name in function.__globals__}
    for _ in range(3):  # objects in objects
        objects = {name: one for name, one in values.items() if hasattr(one, "__dict__")}
        values |= {
            f"{name}.{key}": one for name, holder in objects.items() for key, one in _held(holder, names).items()
        }
    return {name: repr(one) for name, one in values.items() if is_plain(one) and ("." in name or not is_plain(one, 0))}


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Return True for None, numbers and texts, and for short lists and dicts of such values."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        return depth > 0 and len(value) <= _MOST_ITEMS and all(is_plain(one, depth - 1) for one in value)
    return value is None or type(value) in (bool, int, float, str)


def _held(holder: Any, names: set[str]) -> dict[str, Any]:
    held = attributes(holder)
    inner = held.get("_hparams") if "hparams" in names else None
    return {name: held[name] for name in names if name in held} | (
        {f"hparams.{name}": inner[name] for name in names if name in inner} if isinstance(inner, dict) else {}
    )


def _instructions(code: CodeType) -> Iterable[dis.Instruction]:
    """Yield the instructions that name globals, also of the functions and comprehensions inside."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            yield instruction
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _instructions(inner)


def functions_of(value: Any) -> list[Any]:
    """Return the function itself, or the methods of an object's class and of its bases, but for torch's."""
    if isinstance(value, FunctionType):
        return [value]
    value = getattr(value, "__func__", getattr(value, "func", value))  # a method, a partial
    if isinstance(value, FunctionType):
        return [value]
    kinds = [
        one for one in type(value).__mro__ if not one.__module__.startswith(("torch.", "builtins", "typing", "abc"))
    ]
    return [one for kind in kinds for one in vars(kind).values()]


def name_of(function: Any) -> str:
    """Return a name by which two processes can compare a function: of a lambda with its place, of an object its class.

    What the function holds or encloses, such as a generator or a rank, does not count.
    """
    if isinstance(function, partial):
        return name_of(function.func)
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        code = function.__code__
        return f"{function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def function_fingerprint(function: Any) -> str | None:
    """Return a fingerprint of what a function, partial or callable object computes; None if it is nothing to call.

    It depends on the code, defaults, enclosed values, attributes and plain globals, so on the version of Python too.
    """
    if not callable(function):
        return None
    found = [_computed(function, _DEPTH), sorted(globals_fingerprints(functions_of(function)).items())]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:8]


def describe_function(function: Any) -> str:
    """Return the name of a function, partial or callable object, with its fingerprint."""
    named = getattr(function, "func", function)
    return f"{getattr(named, '__qualname__', type(named).__qualname__)} ({function_fingerprint(function)})"


def _computed(value: Any, depth: int) -> Any:
    """Return lists and texts that are equal on two processes if the values are; of unknown objects, their class."""
    if depth == 0:
        return "..."
    inner = depth - 1
    if value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.dtype):
        return repr(value)
    if isinstance(value, CodeType):
        constants = [_computed(one, depth) for one in value.co_consts]
        return [value.co_code.hex(), value.co_names, constants]
    if isinstance(value, FunctionType):
        enclosed = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        return [_computed(one, inner) for one in (value.__code__, enclosed, value.__defaults__, value.__kwdefaults__)]
    if isinstance(value, partial):
        return [_computed(one, inner) for one in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return [_computed(one, inner) for one in (value.__func__, value.__self__)]
    if isinstance(value, dict):
        return sorted(str([_computed(key, inner), _computed(one, inner)]) for key, one in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(str(_computed(one, inner)) for one in value)
    if (numbers := fingerprint(value)) is not None:
        return numbers
    if isinstance(value, (list, tuple)):
        return [_computed(one, inner) for one in value]
    kind = type(value)
    name = [kind.__qualname__, getattr(value, "__qualname__", "")]
    if not callable(value) or isinstance(value, (type, torch.nn.Module)) or kind.__module__ in ("builtins", "torch"):
        return name
    return [name, _computed(getattr(kind.__call__, "__code__", None), inner), _computed(attributes(value), inner)]
