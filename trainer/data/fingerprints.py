"""Describe the numbers that decide which samples a loader gives, to compare them with another process's or run's."""

from __future__ import annotations

import dis
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from trainer.model.reachable import attributes, is_filled, used_globals

_MOST_DATASETS = 10_000
_MOST_SAMPLES = 5_000_000
_MOST_ITEMS = 1000
_MOST_COMPARED = 16
_PLAIN = (bool, int, float, str, tuple)
_SCALARS = (type(None), bool, int, float, str)
_WITH_ITEMS = (list, tuple, range, np.ndarray, torch.Tensor)
_DEPTH = 6


# -- of numbers --------------------------------------------------------------------------------------------------------


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its values in memory, one after the other."""
    return not tensor.is_meta and tensor.layout == torch.strided


def fingerprint(value: Any) -> str | None:
    """Return a description for comparing two values; None if the value holds no numbers.

    An int or bool describes itself. The description of a range, list, array or tensor of numbers is its size and a
    hash, which do not depend on its type.
    """
    if type(value) in (bool, int):
        return str(value)
    if not isinstance(value, _WITH_ITEMS):
        return None
    try:
        numbers = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # a ragged list, other objects, a sparse tensor
        return None
    if numbers.dtype.kind not in "biuf":
        return None
    # The same for a list, an array and a tensor.
    numbers = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)
    return f"{numbers.size} numbers ({_hexdigest(numbers.tobytes())})"


def sampler_fingerprints(sampler: Any) -> dict[str, str]:
    """Return fingerprints of the numbers that a sampler holds, by the names of its attributes.

    Without `epoch`, which the trainer sets. A list of indices, or of lists of them, has the name "order".
    """
    if isinstance(sampler, _WITH_ITEMS):
        order, batches = fingerprint(sampler), list[Any](sampler)
        if order is None and all(isinstance(one, (list, tuple)) for one in batches):  # of different sizes
            order = fingerprint([*map(len, batches), *chain.from_iterable(batches)])
        found = {"order": order}
    else:
        found = {name: fingerprint(value) for name, value in attributes(sampler).items() if name != "epoch"}
    return {name: numbers for name, numbers in found.items() if numbers is not None}


# -- of datasets -------------------------------------------------------------------------------------------------------


def indices_fingerprint(dataset: Any) -> str | None:
    """Return a fingerprint of the indices of `Subset`s and the sizes of `ConcatDataset`s in a dataset, or None."""
    parts = [one for one in _nested(dataset) if isinstance(one, (Subset, ConcatDataset))]
    chosen = [one.indices if isinstance(one, Subset) else one.cumulative_sizes for one in parts]
    return _joint_fingerprint([fingerprint(one) or "unknown" for one in chosen])


def samples_fingerprints(dataset: Any) -> dict[str, str]:
    """Return fingerprints of a dataset's lists with a whole number or text for each sample, by class and attribute.

    File names are compared without their common folder.
    """
    return _by_attribute(dataset, lambda value, length: filter(None, [_list_fingerprint(value, length)]))


def contents_fingerprints(dataset: Any) -> dict[str, str]:
    """Return fingerprints of some samples that a dataset keeps in tensors, arrays and lists, by class and attribute.

    Only the length of a dataset is called. Texts do not count, because they may be paths.
    """
    return _by_attribute(
        dataset, lambda value, length: [_digest(repr(_contents(one, length))) for one in _columns(value, length)]
    )


def _by_attribute(dataset: Any, describe: Callable[[Any, int], Iterable[str]]) -> dict[str, str]:
    """Return the texts that `describe` gives for each attribute of a dataset of known length, by class and name."""
    found: dict[str, list[str]] = {}
    for one in _nested(dataset):
        length = length_of(one)
        if not length or isinstance(one, (Subset, ConcatDataset)):
            continue
        for name, value in attributes(one).items():
            try:
                texts = [*describe(value, length)]
            except Exception:  # a foreign kind of array or tensor
                continue
            if texts:
                found.setdefault(f"{type(one).__name__}.{name}", []).extend(texts)
    return {name: str(_joint_fingerprint(texts)) for name, texts in found.items()}


def _list_fingerprint(value: Any, length: int) -> str | None:
    """Return a fingerprint of a list, array or tensor with a whole number or text for each sample; else None."""
    if length > _MOST_SAMPLES or not isinstance(value, _WITH_ITEMS):
        return None
    if getattr(value, "ndim", 1) != 1 or len(value) != length:
        return None
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        value = value.tolist()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return fingerprint(value) if str(value.dtype).removeprefix("torch.").startswith(("int", "uint")) else None
    kinds = {int} if isinstance(value, range) else set(map(type, value))
    if kinds == {str}:
        folder = len(os.path.commonprefix([min(value), max(value)]))  # noqa: RUF071  # of characters
        return f"{length} texts ({_digest(chr(0).join(text[folder:] for text in value))})"
    return fingerprint(value) if kinds <= {int, bool} else None


def _columns(value: Any, length: int) -> list[Any]:
    """Return the tensors, arrays and lists with an entry for each sample: the value, or those in it."""
    if type(value) in (list, tuple) and len(value) == length:
        return [] if any(one is None for one in value) else [value]  # a cache that is not full yet
    columns = [value, *_items(value)]
    return [one for one in columns if isinstance(one, (torch.Tensor, np.ndarray)) and one.ndim and len(one) == length]


def _contents(column: Any, length: int) -> list[Any]:
    """Return texts of a few entries of a tensor, array or list, the first and the last among them."""
    positions = {number * (length - 1) // (_MOST_COMPARED - 1) for number in range(_MOST_COMPARED)}
    return [_content(column[position]) for position in sorted(positions)]


def _content(value: Any, depth: int = 3) -> Any:
    """Return text and lists that are equal for two samples of the same numbers; of an unknown object, its class."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and has_values(value):
        value = value.detach().reshape(-1)[:_MOST_ITEMS].resolve_conj().contiguous().view(torch.uint8).numpy()
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        return hashlib.sha256(np.asarray(value).reshape(-1)[:_MOST_ITEMS].tobytes()).hexdigest()
    if value is None or type(value) in (bool, int, float, complex):
        return repr(value)
    return [type(value).__name__, *(_content(one, depth - 1) for one in _items(value) if depth)]


def _items(value: Any) -> list[Any]:
    """Return the first items of a dict, list or tuple; of other values none."""
    if type(value) is dict:
        return list(islice(value.values(), _MOST_ITEMS))
    return list(value[:_MOST_ITEMS]) if type(value) in (list, tuple) else []


def length_of(value: Any) -> int | None:
    """Return the length of a dataset, a sampler or a loader; None if it has none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def _nested(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and the datasets in its attributes."""
    waiting, seen = [dataset], set()
    for one in islice(waiting, _MOST_DATASETS):
        yield one
        if isinstance(one, ConcatDataset):
            waiting += one.datasets
        elif isinstance(one, Subset):
            waiting.append(one.dataset)
        elif isinstance(one, Dataset) and id(one) not in seen:
            seen.add(id(one))  # it may be in itself
            waiting += [inner for inner in attributes(one).values() if isinstance(inner, Dataset)]


def _joint_fingerprint(found: list[str]) -> str | None:
    if len(found) < 2:
        return found[0] if found else None
    return f"{len(found)} lists ({_digest(' '.join(found))})"


def _digest(text: str) -> str:
    return _hexdigest(text.encode(errors="surrogatepass"))


def _hexdigest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


# -- of functions ------------------------------------------------------------------------------------------------------


def globals_fingerprints(functions: Iterable[Any]) -> dict[str, str]:
    """Return the plain globals that functions, and functions of the same module that they call, read, by name.

    Globals that they also set are left out: these count, or keep something.
    """
    found: dict[str, str] = {}
    written: set[str] = set()
    waiting = [one for one in functions if isinstance(one, FunctionType)]
    for function in waiting:
        for name, value in used_globals(function).items():
            if type(value) in _PLAIN:
                found[f"global {name}"] = repr(value)
            elif isinstance(value, FunctionType) and value.__module__ == function.__module__ and value not in waiting:
                waiting.append(value)
        for code in codes_in(function.__code__):
            written |= {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL"}
    return {name: text for name, text in found.items() if name.removeprefix("global ") not in written}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and of the functions and comprehensions inside."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_in(inner)


def read_values_fingerprints(function: Any) -> dict[str, str]:
    """Return the plain values that a function reads from its object, from enclosed and from global objects, by name.

    Lists and dicts of plain values count as plain values. `hparams` is read; no other property is called. Single values
    that the function encloses, or that are globals, are left out.
    """
    function, own = getattr(function, "__func__", function), getattr(function, "__self__", None)
    if not isinstance(function, FunctionType):
        return {}
    used = used_globals(function)
    values = {"self": own} | enclosed_values(function) | {f"global {name}": one for name, one in used.items()}
    for _ in range(3):  # objects in objects
        objects = {name: one for name, one in values.items() if hasattr(one, "__dict__")}
        values |= {f"{name}.{key}": inner for name, one in objects.items() for key, inner in _held(one, used).items()}
    return {name: repr(one) for name, one in values.items() if is_plain(one) and ("." in name or not is_plain(one, 0))}


def _held(holder: Any, names: Collection[str]) -> dict[str, Any]:
    """Return the attributes and hyperparameters of an object that have one of the names."""
    held = attributes(holder)
    hparams = held.get("_hparams") if "hparams" in names else None
    inside = {f"hparams.{name}": one for name, one in hparams.items()} if isinstance(hparams, dict) else {}
    return {name: one for name, one in {**held, **inside}.items() if name.removeprefix("hparams.") in names}


def enclosed_values(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function encloses, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if is_filled(cell)}


def is_plain(value: Any, depth: int = _DEPTH) -> bool:
    """Return True for None, numbers and texts, and for short lists and dicts of such values."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        return depth > 0 and len(value) <= _MOST_ITEMS and all(is_plain(one, depth - 1) for one in value)
    return type(value) in _SCALARS


def functions_of(value: Any) -> list[Any]:
    """Return the function itself, or the methods of an object's class and of its bases, but for torch's."""
    value = getattr(value, "__func__", getattr(value, "func", value))  # a method, a partial
    if isinstance(value, FunctionType):
        return [value]
    foreign = ("torch.", "builtins", "typing", "abc")
    return [
        one for kind in type(value).__mro__ if not kind.__module__.startswith(foreign) for one in vars(kind).values()
    ]


def name_of(function: Any) -> str:
    """Return a name for comparing a function between processes: with its place in a file, or the class of an object.

    The values that the function holds or encloses, such as a generator or a rank, do not count.
    """
    function = function.func if isinstance(function, partial) else function
    function = getattr(function, "__func__", function)
    if isinstance(function, FunctionType):
        code = function.__code__
        return f"{function.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def function_fingerprint(function: Any) -> str | None:
    """Return a fingerprint of the computation of a function, partial or callable object; None for other objects.

    It depends on the code, defaults, enclosed values, attributes and plain globals, and so on the version of Python.
    """
    if not callable(function):
        return None
    found = [_computed(function, _DEPTH), sorted(globals_fingerprints(functions_of(function)).items())]
    return _hexdigest(repr(found).encode())


def describe_function(function: Any) -> str:
    """Return the name of a function, partial or callable object, with its fingerprint."""
    named = getattr(function, "func", function)
    return f"{getattr(named, '__qualname__', type(named).__qualname__)} ({function_fingerprint(function)})"


def _parts_of_function(function: FunctionType) -> tuple[Any, ...]:
    enclosed = [*enclosed_values(function).values()]
    return function.__code__, enclosed, function.__defaults__, function.__kwdefaults__


_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    FunctionType: _parts_of_function,
    partial: attrgetter("func", "args", "keywords"),
    MethodType: attrgetter("__func__", "__self__"),
}
"""The parts that decide what a callable computes, by its class."""


def _computed(value: Any, depth: int) -> Any:
    """Return lists and texts that are equal on two processes if the values are; of unknown objects, their class."""
    if depth == 0:
        return "..."
    inner = depth - 1
    if type(value) in (*_SCALARS, complex, bytes, torch.dtype):
        return repr(value)
    if isinstance(value, CodeType):
        constants = [_computed(one, depth) for one in value.co_consts]
        return [value.co_code.hex(), value.co_names, constants]
    for kind, parts_of in _PARTS.items():
        if isinstance(value, kind):
            return [_computed(one, inner) for one in parts_of(value)]
    if isinstance(value, dict):
        return sorted(str([_computed(key, inner), _computed(one, inner)]) for key, one in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(str(_computed(one, inner)) for one in value)
    if (numbers := fingerprint(value)) is not None:
        return numbers
    if isinstance(value, (list, tuple)):
        return [_computed(one, inner) for one in value]
    return _computed_by_object(value, inner)


def _computed_by_object(value: Any, inner: int) -> Any:
    """Return the class of an object, and the code and attributes of an object that can be called."""
    kind = type(value)
    name = [kind.__qualname__, getattr(value, "__qualname__", "")]
    if not callable(value) or isinstance(value, (type, torch.nn.Module)) or kind.__module__ in ("builtins", "torch"):
        return name
    return [name, _computed(getattr(kind.__call__, "__code__", None), inner), _computed(attributes(value), inner)]
