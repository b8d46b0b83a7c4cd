"""Find what a block can write to beside its output: containers it is given, attributes, and objects of its hooks."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.data.sampler_state import attributes, is_filled

_OPAQUE = (np.ndarray, type, ModuleType, str, bytes, int, float, complex, NoneType)
_PACKAGES = ("trainer", "torch", "transformers")
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""
_LARGEST = 1000
"""Items of a container that is looked through: larger ones are data."""


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Return the tensors in any nesting of dicts, lists, tuples and the like."""
    leaves, _ = torch.utils._pytree.tree_flatten(nested)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def containers(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """Return the lists, dicts and dataclasses among the arguments of a call, the outer ones first."""
    args, kwargs = arguments
    found: list[Any] = []
    waiting = [*args, *kwargs.values()]
    for one in waiting:
        if isinstance(one, torch.Tensor):
            continue
        if isinstance(one, tuple):
            waiting += one
        elif isinstance(one, (list, deque, dict)) or _is_dataclass(one):
            found.append(one)
            waiting += content(one).values()
    return found


def objects(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """Return the users' other objects and the sets among the arguments of a call."""
    args, kwargs = arguments
    return [one for one in (*args, *kwargs.values()) if isinstance(one, set) or is_users(one)]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an attribute: itself, in containers, and in the attributes of a user's object."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, deque, dict)) or is_users(value):
        for one in value if isinstance(value, (list, tuple, set, deque)) else content(value).values():
            if one is not value:
                yield from tensors_of(one) if not is_users(one) else ()


def is_users(one: Any) -> bool:
    """Whether this is an object of a class of the user's, with attributes, and no module."""
    kind = type(one)
    if isinstance(one, (*_OPAQUE, torch.Tensor, nn.Module, FunctionType, MethodType, partial)):
        return False
    return kind.__module__.partition(".")[0] not in ("trainer", "torch", "transformers", "builtins", "collections")


def keep_attributes_of(one: Any, other: Any) -> None:
    """Give a copy of a container the attributes that copying has not kept: of a subclass, or made anew by an init."""
    if isinstance(one, (list, deque, dict)):
        vars(other).update(vars(one)) if hasattr(one, "__dict__") else None
        return
    for name, value in attributes(one).items():
        if not isinstance(value, (torch.Tensor, list, deque, dict, tuple)) and not _is_dataclass(value):
            object.__setattr__(other, name, value)


def content(container: Any) -> dict[Any, Any]:
    """Return the entries of a dict by key, of a list or set by number, of an object by attribute."""
    if isinstance(container, dict):
        return dict(container)
    return dict(enumerate(container)) if isinstance(container, (list, deque, set)) else attributes(container)


def fill(container: Any, entries: dict[Any, Any]) -> None:
    """Replace what is in a container by the entries that `content` has returned of one."""
    if not isinstance(container, (list, deque, set, dict)):
        for name in attributes(container).keys() - entries.keys():
            object.__delattr__(container, name)
        for name, value in entries.items():
            object.__setattr__(container, name, value)
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(entries.values())
    else:
        container.update(entries.values() if isinstance(container, set) else entries)


def same_content(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether the same objects are in two results of `content`."""
    return one.keys() == other.keys() and all(value is other[key] for key, value in one.items())


def is_container(one: Any) -> bool:
    """Whether an object is one that `content` takes, and small."""
    if isinstance(one, (list, deque, set, dict)):
        return len(one) <= _LARGEST
    return hasattr(one, "__dict__") and not isinstance(one, (torch.Tensor, *_OPAQUE, FunctionType, MethodType, partial))


def _is_dataclass(one: Any) -> bool:
    return dataclasses.is_dataclass(one) and not isinstance(one, type)


def places(name: str, block: nn.Module, inputs: Any = ()) -> Iterator[tuple[str, Any]]:
    """Yield what a block may write to, with words for it: attributes, objects among its inputs, what its hooks know."""
    for path, child in block.named_modules():
        place = ".".join(filter(None, (name, path)))
        for attribute, value in vars(child).items():
            if attribute not in OF_TORCH:
                yield f"{place}.{attribute}", value
        for hook in (*child._forward_hooks.values(), *child._forward_pre_hooks.values()):
            yield f"what a hook of {place} writes to", hook
    leaves, _ = torch.utils._pytree.tree_flatten(inputs)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            yield f"what is in a {type(leaf).__name__} among the arguments", leaf


def global_containers(block: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the lists, sets and dicts at module level that a block's methods and functions they call use, by name."""
    kinds = {kind: None for child in block.modules() for kind in type(child).__mro__ if kind is not nn.Module}
    waiting = [one for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType)]
    seen: set[int] = set()
    for function in waiting:
        for name in function.__code__.co_names if id(function) not in seen else ():
            value, package = function.__globals__.get(name), function.__module__.partition(".")[0]
            if isinstance(value, (list, deque, set, dict)) and package not in _PACKAGES:
                yield f"{name} at the level of {function.__module__}", value
            elif isinstance(value, FunctionType) and value.__module__.partition(".")[0] == package:
                waiting.append(value)
        seen.add(id(function))


def objects_behind(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield an object and what is in it, in any nesting of containers, objects and what functions enclose, each once.

    What belongs to this package or to a library is not looked into.
    """
    of = value if isinstance(value, FunctionType) else type(value)
    is_package = str(of.__module__).partition(".")[0] in _PACKAGES
    if id(value) in seen or (not isinstance(value, torch.Tensor) and (isinstance(value, _OPAQUE) or is_package)):
        return
    seen.add(id(value))
    yield value
    for one in _inside(value):
        yield from objects_behind(one, seen)


def shared_objects(blocks: Mapping[str, nn.Module]) -> list[Any]:
    """Return the containers and objects that several blocks have in attributes, or their hooks know, and global lists.

    A dict at module level may be a cache, which each process can fill for itself.
    """
    found: dict[int, Any] = {}
    times: Counter[int] = Counter()
    for block in blocks.values():
        seen: set[int] = set()
        of_block = [one for _, place in places("", block) for one in objects_behind(place, seen) if is_container(one)]
        found.update({id(one): one for one in of_block})
        times.update(map(id, of_block))
    of_all = [one for block in blocks.values() for _, one in global_containers(block) if isinstance(one, list)]
    shared = [found[key] for key, number in times.items() if number > 1]
    return [*shared, *{id(one): one for one in of_all if is_container(one)}.values()]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return []
    if isinstance(value, (dict, list, tuple, set, deque)):
        several = len(value) <= _LARGEST
        return [*(value.values() if isinstance(value, dict) else value)] if several else []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, CellType):
        return [value.cell_contents] if is_filled(value) else []
    if isinstance(value, FunctionType):
        known = value.__globals__
        return [*(value.__closure__ or ()), *(known.get(name) for name in value.__code__.co_names)]
    # Of a module its own attributes, which a hook may write; its parts are asked for by themselves.
    return [one for key, one in attributes(value).items() if not isinstance(value, nn.Module) or key[:1] != "_"]
