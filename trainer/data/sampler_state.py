"""Find, seed, save and restore the state inside a user's sampler: random generators and plain attributes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from trainer.hyperparameters import NUMPY_NUMBERS, SCALARS, is_numpy_number, is_scalar
from trainer.model.reachable import OwnGenerator, attributes, is_filled, is_generator

_MAX_DEPTH, _MAX_ITEMS, _MAX_NUMBERS = 5, 1000, 100_000
_CONTAINERS = (dict, list, tuple, set, frozenset)
_OPAQUE = (torch.Tensor, np.ndarray, nn.Module, Dataset, type, ModuleType, *SCALARS)


def own_generators(*owners: Any, depth: int = _MAX_DEPTH, of_data: bool = False) -> list[OwnGenerator]:
    """Return the generators in the attributes of samplers or others, and in globals that their methods use.

    The default generators of torch, numpy and `random` are left out.

    Args:
        depth: levels of objects in objects that are looked through.
        of_data: also those of datasets.
    """
    known = {id(torch.default_generator), id(getattr(np.random.mtrand, "_rand", None)), id(getattr(random, "_inst", 0))}
    seen, opaque = set[int](), tuple(kind for kind in _OPAQUE if kind is not Dataset or not of_data)
    found = [one for owner in owners for one in _walk(owner, depth, seen, opaque) if id(one) not in known]
    return [OwnGenerator(one) for one in found]


def _walk(value: Any, depth: int, seen: set[int], opaque: tuple[type, ...]) -> Iterator[Any]:
    """Yield the random generators inside a value, each once."""
    if id(value) in seen or depth < 0 or isinstance(value, opaque):
        return
    seen.add(id(value))
    if is_generator(value):
        yield value
        return
    container: Any = next((kind for kind in _CONTAINERS if isinstance(value, kind)), None)
    if container is not None:
        # By its own methods: a subclass may do anything in them.
        several = container.__len__(value) <= _MAX_ITEMS
        inside = [*(dict.values(value) if container is dict else container.__iter__(value))] if several else []
    elif isinstance(value, CellType):
        inside = [value.cell_contents] if is_filled(value) else []
    elif isinstance(value, FunctionType):
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        inside = [value.__globals__[name] for name in names if is_generator(value.__globals__[name])]
        inside += [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    elif isinstance(value, MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    else:
        inside = [*attributes(value).values()]
        for kind in type(value).__mro__:
            if not kind.__module__.startswith(("torch.", "builtins", "typing", "abc")):
                inside += vars(kind).values()
    for one in inside:
        yield from _walk(one, depth - 1, seen, opaque)


def plain_attributes(sampler: Any) -> dict[str, Any]:
    """Return copies of the attributes that are numbers, texts, or lists and arrays of up to 100,000 numbers.

    Each copy is in a tuple of one, as `_copy` returns it.
    """
    return {name: copy for name, value in attributes(sampler).items() if (copy := _copy(value)) is not None}


def _copy(value: Any) -> Any:
    """Return a copy of a plain value, in a tuple of one because None is a plain value; None for other values."""
    if is_scalar(value) or is_numpy_number(value):
        return (value,)
    if type(value) is torch.Tensor:
        return (value.clone(),) if value.numel() <= _MAX_NUMBERS and value.layout == torch.strided else None
    if type(value) is np.ndarray:
        return (value.copy(),) if value.size <= _MAX_NUMBERS and value.dtype.name in NUMPY_NUMBERS else None
    if type(value) is list and len(value) <= _MAX_NUMBERS and all(map(is_scalar, value)):
        return (list(value),)
    return None


def changed_attributes(before: dict[str, Any], sampler: Any) -> dict[str, Any]:
    """Return the plain attributes that differ from those in `before`, an earlier result of `plain_attributes`."""
    now = plain_attributes(sampler)
    return {name: one[0] for name, one in now.items() if name not in before or not _equal(before[name][0], one[0])}


def set_attributes(sampler: Any, values: dict[str, Any], in_place: bool = False) -> None:
    """Set attributes that `changed_attributes` returned; names of methods and properties are skipped.

    Args:
        in_place: tensors stay the same objects, which may be those of a module.
    """
    before = attributes(sampler)
    for name, value in values.items():
        copied = _copy(value)
        if copied is None or hasattr(type(sampler), name) or (name in before and _equal(before[name], copied[0])):
            continue
        own = before.get(name)
        if in_place and isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
            own.copy_(value)
        else:
            setattr(sampler, name, copied[0])


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    return bool(one == other)
