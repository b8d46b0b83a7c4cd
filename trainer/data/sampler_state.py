"""Find, seed, save and restore the state inside a user's sampler: random generators and plain attributes."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Sampler

from trainer.hyperparameters import NUMPY_NUMBERS, SCALARS, is_scalar
from trainer.model.reachable import OwnGenerator, attributes, generator_kinds, named_inside, walk
from trainer.seed import seed_cpu_generators

_MAX_DEPTH, _MAX_NUMBERS = 5, 100_000
# SystemRandom has no state.
_ALWAYS = (torch.Tensor, np.ndarray, Dataset, type, ModuleType, random.SystemRandom, *SCALARS)
_OPAQUE = (nn.Module, *_ALWAYS)
_NOT_STATE = (Sampler, *_ALWAYS)
"""The same in a search for the state of a program: loaders keep the state of their samplers."""
_HOLDERS = {"argparse", "collections", "types"}
"""Packages with namespaces, and with objects around a dict or a list."""
_LIBRARIES = frozenset({"torch", "numpy", "trainer", "deepspeed", *sys.stdlib_module_names} - _HOLDERS)
"""Packages whose objects such a search does not enter."""


def own_generators(*owners: Any, of_data: bool = False) -> list[OwnGenerator]:
    """Return the generators in the attributes of samplers or others, and in globals that their methods use.

    The default generators of torch, numpy and `random` are left out.

    Args:
        of_data: also generators of datasets.
    """
    opaque = tuple(kind for kind in _OPAQUE if kind is not Dataset or not of_data)
    found = walk(dict(enumerate(owners)), _MAX_DEPTH, _global_generators(), opaque, generator_kinds())
    return [OwnGenerator(one) for _, one in found]


def seed_with(seed: int, generators: Iterable[OwnGenerator]) -> None:
    """Seed the global generators on the CPU, and further generators."""
    seed_cpu_generators(seed)
    for generator in generators:
        generator.seed(seed)


def set_epoch(owners: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch` of the samplers and datasets that have it."""
    for one in owners:
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)


def named_generators(
    owners: Mapping[str, Any], contents: dict[int, dict[Any, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the generators in the attributes of parts of a program, by the part and the path to them, such as "noise".

    Generators in globals that the methods use count, too. Datasets, samplers and objects of libraries are not searched.

    Args:
        contents: receives the contents of each searched object, by its id.
    """
    seen = {} if contents is None else contents
    seen |= _global_generators() | {id(owner): named_inside(owner, of_class=True) for owner in owners.values()}
    kinds = generator_kinds()
    found = {
        name: dict(walk(seen[id(owner)], _MAX_DEPTH - 1, seen, _NOT_STATE, kinds, _LIBRARIES))
        for name, owner in owners.items()
    }
    return {name: of_one for name, of_one in found.items() if of_one}


def _place_of(owner: Any, path: str) -> tuple[Any, dict[str, Any], str]:
    """Return the object that holds a generator of `named_generators`, what can be set in it, and the name there."""
    *way, last = path.split(".")
    for part in way:
        owner = {str(name): one for name, one in named_inside(owner, of_class=True).items()}.get(part)
    entries = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    # A number stands for an item of a list, or a key that is not a text; a name in a function for a global.
    return owner, {} if last.isdecimal() or isinstance(owner, FunctionType) else entries, last


def put_generator(owner: Any, path: str, generator: Any) -> None:
    """Put a generator where `named_generators` finds it, if nothing is there and the object can take one."""
    holder, entries, last = _place_of(owner, path)
    if named_inside(holder, of_class=True).get(last) is None:
        entries[last] = generator


def take_back(owner: Any, path: str, contents: Mapping[int, dict[Any, Any]]) -> None:
    """Put back the value in the place of a generator, by the `contents` of `named_generators` before it was made.

    An object that did not exist then keeps the generator.
    """
    holder, entries, last = _place_of(owner, path)
    before = contents.get(id(holder), {last: entries.get(last)})
    if last in before:
        entries[last] = before[last]
    else:
        entries.pop(last, None)


def _global_generators() -> dict[int, dict[Any, Any]]:
    known = torch.default_generator, getattr(np.random.mtrand, "_rand", None), getattr(random, "_inst", None)
    return {id(one): {} for one in known}


def plain_attributes(sampler: Any) -> dict[str, Any]:
    """Return copies of the attributes that are numbers, texts, None, or lists and arrays of up to 100,000 numbers."""
    return {name: _copy(value) for name, value in attributes(sampler).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.numel() <= _MAX_NUMBERS and value.layout == torch.strided
    if type(value) is np.ndarray:
        return value.size <= _MAX_NUMBERS and value.dtype.name in NUMPY_NUMBERS
    if type(value) is list:
        return len(value) <= _MAX_NUMBERS and all(map(is_scalar, value))
    return is_scalar(value)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def changed_attributes(before: dict[str, Any], sampler: Any) -> dict[str, Any]:
    """Return the plain attributes that differ from those in `before`, an earlier result of `plain_attributes`."""
    now = plain_attributes(sampler)
    return {name: value for name, value in now.items() if name not in before or not _equal(before[name], value)}


def set_attributes(sampler: Any, values: dict[str, Any], in_place: bool = False) -> None:
    """Set attributes that `changed_attributes` returned; names of methods and properties are skipped.

    Args:
        in_place: tensors stay the same objects, which a module may share.
    """
    before = attributes(sampler)
    for name, value in values.items():
        own = before.get(name)
        if hasattr(type(sampler), name) or not _is_plain(value) or (name in before and _equal(own, value)):
            continue
        if in_place and isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
            own.copy_(value)
        else:
            setattr(sampler, name, _copy(value))


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    return bool(one == other)
