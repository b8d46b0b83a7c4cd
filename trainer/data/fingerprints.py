"""Describe the numbers that decide which samples a loader gives, to compare them with another process's or run's."""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from trainer.data.sampler_state import attributes, is_filled

_MOST_DATASETS = 10_000
_MOST_FUNCTIONS = 100
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


def of_indices(dataset: Any) -> str | None:
    """Return a fingerprint of the indices of `Subset`s and the sizes of `ConcatDataset`s in a dataset, or None."""
    found: list[str] = []
    waiting = [dataset]
    while waiting and len(found) < _MOST_DATASETS:
        one = waiting.pop(0)
        if isinstance(one, Subset):
            found.append(fingerprint(one.indices) or "unknown")
            waiting.append(one.dataset)
        elif isinstance(one, ConcatDataset):
            found.append(fingerprint(one.cumulative_sizes) or "unknown")
            waiting += one.datasets
    if len(found) < 2:
        return found[0] if found else None
    return f"{len(found)} lists ({hashlib.sha256(' '.join(found).encode()).hexdigest()[:8]})"


def of_sampler(sampler: Any) -> dict[str, str]:
    """Return fingerprints of the numbers that a sampler holds, by the names of its attributes.

    Without `epoch`, which the trainer sets.
    """
    found = {name: fingerprint(value) for name, value in attributes(sampler).items() if name != "epoch"}
    return {name: numbers for name, numbers in found.items() if numbers is not None}


def of_globals(functions: Iterable[Any]) -> dict[str, str]:
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


def of_function(function: Any) -> str | None:
    """Return a fingerprint of what a function, partial or callable object computes; None if it is nothing to call.

    It depends on the code, defaults, enclosed values, attributes and plain globals, so on the version of Python too.
    """
    if not callable(function):
        return None
    found = [_computed(function, _DEPTH), sorted(of_globals(functions_of(function)).items())]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:8]


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
