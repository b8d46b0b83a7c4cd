"""Find, seed, save and restore the state inside a user's sampler: random generators and plain attributes."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from trainer.hyperparameters import NUMPY_NUMBERS, SCALARS, is_scalar
from trainer.model.reachable import (
    CONTAINERS,
    WRAPPERS,
    OwnGenerator,
    attributes,
    is_generator,
    named_inside,
)

_MAX_DEPTH, _MAX_NUMBERS = 5, 100_000
_COMMON = frozenset({dict, OrderedDict, list, tuple, set})
_OPAQUE = (torch.Tensor, np.ndarray, nn.Module, Dataset, type, ModuleType, *SCALARS)
_NOT_STATE = (torch.Tensor, np.ndarray, Dataset, Sampler, type, ModuleType, *SCALARS)
"""The same where the state of a program is looked for; the loaders' own is kept with them."""
_LOOKED_INTO = (*CONTAINERS, FunctionType, MethodType, CellType, partial, nn.Module, *WRAPPERS)
_HOLDERS = {"argparse", "collections", "types"}
"""Packages with namespaces, and with objects around a dict or a list."""
_WITHOUT_GENERATORS = ("torch.", "trainer.", "deepspeed.", "builtins", "typing", "abc", "collections", "functools")
"""Beginnings of modules whose classes have none in their attributes."""
_LIBRARIES = frozenset({"torch", "numpy", "trainer", "deepspeed", *sys.stdlib_module_names} - _HOLDERS)
"""Packages whose other objects are not looked into then."""


def own_generators(*owners: Any, depth: int = _MAX_DEPTH, of_data: bool = False) -> list[OwnGenerator]:
    """Return the generators in the attributes of samplers or others, and in globals that their methods use.

    The default generators of torch, numpy and `random` are left out.

    Args:
        depth: levels of objects in objects that are looked through.
        of_data: also those of datasets.
    """
    opaque = tuple(kind for kind in _OPAQUE if kind is not Dataset or not of_data)
    found = _generators_in(dict(enumerate(owners)), depth, {*map(id, _global_generators())}, opaque)
    return [OwnGenerator(one) for _, one in found]


def named_generators(owners: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the generators in the attributes of parts of a program, by the part and the way to them, such as "noise".

    Those in globals that the methods use, too. Datasets, samplers and objects of libraries are not looked into.
    """
    seen = {id(one) for one in (*_global_generators(), *owners.values())}
    found = {
        name: dict(_generators_in(_inside(owner), _MAX_DEPTH - 1, seen, _NOT_STATE, _LIBRARIES))
        for name, owner in owners.items()
    }
    return {name: of_one for name, of_one in found.items() if of_one}


def put_generator(owner: Any, path: str, generator: Any) -> None:
    """Put a generator where `named_generators` finds it, if nothing is there and the object can take one."""
    *way, last = path.split(".")
    for part in way:
        owner = {str(name): one for name, one in _inside(owner).items()}.get(part)
    # A number stands for an item of a list, or a key that is not a text; a name in a function for a global.
    takes_one = not last.isdecimal() and not isinstance(owner, FunctionType)
    entries = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    if takes_one and _inside(owner).get(last) is None:
        entries[last] = generator


def _global_generators() -> tuple[Any, ...]:
    return torch.default_generator, getattr(np.random.mtrand, "_rand", None), getattr(random, "_inst", None)


def _generators_in(
    values: dict[Any, Any],
    depth: int,
    seen: set[int],
    opaque: tuple[type, ...],
    libraries: Collection[str] = (),
) -> list[tuple[str, Any]]:
    """Return the random generators inside named values, each once, with the way to them.

    Args:
        depth: levels of objects in objects that are looked through.
        seen: ids of objects that are left out; those that are looked into are added.
    """
    found: list[tuple[str, Any]] = []
    waiting = [(one, str(name), depth) for name, one in reversed(values.items())]
    while waiting:
        value, way, levels = waiting.pop()
        kind = type(value)
        # Most attributes of modules are scalars or empty.
        if kind in SCALARS or (kind in _COMMON and not value) or id(value) in seen or isinstance(value, opaque):
            continue
        seen.add(id(value))
        is_holder = isinstance(value, _LOOKED_INTO)
        if not is_holder and is_generator(value):
            found.append((way, value))
        elif levels and (is_holder or kind.__module__.partition(".")[0] not in libraries):
            inside = reversed(_inside(value).items())
            waiting += [(one, f"{way}.{name}", levels - 1) for name, one in inside]
    return found


def _inside(value: Any) -> dict[Any, Any]:
    """Return what is inside an object, and in its class where that is the user's."""
    found = named_inside(value)
    for kind in type(value).__mro__:
        if not kind.__module__.startswith(_WITHOUT_GENERATORS):
            found = {**vars(kind), **found}
    return found


def plain_attributes(sampler: Any) -> dict[str, Any]:
    """Return copies of the attributes that are numbers, texts, or lists and arrays of up to 100,000 numbers.

    Each copy is in a tuple of one, as `_copy` returns it.
    """
    return {name: copy for name, value in attributes(sampler).items() if (copy := _copy(value)) is not None}


def _copy(value: Any) -> Any:
    """Return a copy of a plain value, in a tuple of one because None is a plain value; None for other values."""
    if is_scalar(value):
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
