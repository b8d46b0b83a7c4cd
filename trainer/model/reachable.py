"""Find, keep and put back what a block can write to besides its output: containers, attributes, generators, hooks."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial, partialmethod
from itertools import chain
from operator import is_
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.hyperparameters import SCALARS
from trainer.model.blocks import class_of

_OPAQUE = (np.ndarray, type, ModuleType, str, bytes, int, float, complex, bool, NoneType)
_LIBRARIES = frozenset({"trainer", "torch", "transformers", "deepspeed"})
OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module."""
WRAPPERS = (staticmethod, classmethod, property, cached_property, partialmethod)
"""Classes of objects that a class holds around a function, in one of the attributes of the next line."""
_WRAPPED = ("__func__", "fget", "fset", "func")
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_COMMON = frozenset({dict, OrderedDict, list, tuple, set})
_LOOKED_INTO = (*CONTAINERS, FunctionType, MethodType, CellType, partial, nn.Module, *WRAPPERS)
_WITHOUT_STATE = frozenset({"torch", "trainer", "deepspeed", "builtins", "typing", "abc", "collections", "functools"})
"""Packages whose classes keep nothing in their attributes."""
_LARGEST = 1000
"""Items of a container that is looked through: larger ones are data."""
_LARGEST_COPY = 100_000
"""Elements of a tensor that a block may change in place where its forward is run again."""


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Return the tensors in any nesting of dicts, lists, tuples and the like."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


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


def nodes_behind(roots: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of autograd's graph that `roots` reach without passing through `ends`, each once."""
    seen, waiting = {None, *ends}, [*roots]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions]


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an attribute: itself, in containers, and in the attributes of a user's object."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, CONTAINERS) or is_users(value):
        for one in content(value).values():
            if one is not value and not is_users(one):
                yield from tensors_of(one)


def is_users(one: Any) -> bool:
    """Whether this is an object of a class of the user's, with attributes, and no module."""
    kind = type(one)
    if isinstance(one, (*_OPAQUE, torch.Tensor, nn.Module, FunctionType, MethodType, partial)):
        return False
    return kind.__module__.partition(".")[0] not in ("trainer", "torch", "transformers", "builtins", "collections")


def keep_attributes_of(one: Any, other: Any) -> None:
    """Give a copy of a container the attributes that were lost: a subclass's, or values that `__init__` set again."""
    if isinstance(one, (list, deque, dict)):
        if hasattr(one, "__dict__"):  # an object of a subclass
            vars(other).update(vars(one))
        return
    for name, value in attributes(one).items():
        if not isinstance(value, (torch.Tensor, list, deque, dict, tuple)) and not _is_dataclass(value):
            object.__setattr__(other, name, value)


def content(container: Any) -> dict[Any, Any]:
    """Return the entries of a dict by key, of a list, tuple or set by number, of an object by attribute."""
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, nn.Module):
        return dict(vars(container))
    return dict(enumerate(container)) if isinstance(container, CONTAINERS) else attributes(container)


def fill(container: Any, entries: dict[Any, Any]) -> None:
    """Replace the contents of a container by entries that `content` has returned."""
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
    return list(one) == list(other) and all(map(is_, one.values(), other.values()))


def is_container(one: Any) -> bool:
    """Whether `content` takes an object, and it is small."""
    if isinstance(one, (list, deque, set, dict)):
        return len(one) <= _LARGEST
    has_attributes = hasattr(one, "__dict__") or hasattr(one, "__slots__")
    return has_attributes and not isinstance(one, (torch.Tensor, *_OPAQUE, FunctionType, MethodType, partial))


class OwnGenerator:
    """One interface for the random generators of torch, numpy and Python."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def seed(self, seed: int) -> None:
        """Seed the generator with a number from 0 to 2**64 - 1."""
        own = self.generator
        if isinstance(own, torch.Generator):
            own.manual_seed(seed >> 1)
        elif isinstance(own, np.random.Generator):
            own.bit_generator.state = type(own.bit_generator)(seed).state
        elif isinstance(own, np.random.RandomState):
            own.seed(seed & 0xFFFFFFFF)
        else:
            own.seed(seed)

    def get_state(self) -> Any:
        """Return the generator's state, for `set_state`."""
        own = self.generator
        if isinstance(own, np.random.Generator):
            return own.bit_generator.state
        return own.getstate() if isinstance(own, random.Random) else own.get_state()

    def set_state(self, state: Any) -> None:
        """Restore a state that `get_state` returned."""
        own = self.generator
        if isinstance(own, np.random.Generator):
            own.bit_generator.state = state
        elif isinstance(own, random.Random):
            own.setstate(state)
        else:
            own.set_state(state)


@cache
def generator_kinds() -> tuple[type, ...]:
    """Return the classes of random generators; not as a constant, which would import numpy.random early."""
    return torch.Generator, np.random.Generator, np.random.RandomState, random.Random


def is_generator(value: Any) -> bool:
    """Whether this is a random generator that has a state."""
    return isinstance(value, generator_kinds()) and not isinstance(value, random.SystemRandom)  # which has no state


def is_filled(cell: CellType) -> bool:
    """Whether a cell of a closure has a value: it has none until the name is assigned."""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, including those in `__slots__`."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # one that is not set
                    found[name] = slot.__get__(value)
    with suppress(AttributeError):
        found |= object.__getattribute__(value, "__dict__")
    return found


def functions_of(value: Any) -> list[FunctionType]:
    """Return a function of a class, or the functions in a static method, a property and the like."""
    of_wrapper = [getattr(value, name, None) for name in _WRAPPED] if isinstance(value, WRAPPERS) else [value]
    return [one for one in of_wrapper if isinstance(one, FunctionType)]


def used_globals(function: FunctionType) -> dict[str, Any]:
    """Return the values at module level by the names that a function uses, and the comprehensions and functions in it.

    A name that is not there has the value None.
    """
    codes, known = [function.__code__], function.__globals__
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
    return {name: known.get(name) for code in codes for name in code.co_names}


def _is_dataclass(one: Any) -> bool:
    return dataclasses.is_dataclass(one) and not isinstance(one, type)


def places(name: str, block: nn.Module, inputs: Any = ()) -> Iterator[tuple[str, Any]]:
    """Yield what a block may write to, each with a description: attributes, objects among its inputs, and its hooks."""
    for path, child in block.named_modules():
        place = f"{name}.{path}".strip(".")
        for attribute, value in [*vars(child).items()]:
            if attribute not in OF_TORCH and type(value) not in _OPAQUE:
                yield f"{place}.{attribute}", value
        for hook in [*child._forward_hooks.values(), *child._forward_pre_hooks.values()]:
            yield f"what a hook of {place} writes to", hook
    for leaf in torch.utils._pytree.tree_leaves(inputs):
        if not isinstance(leaf, torch.Tensor):
            yield f"what is in a {type(leaf).__name__} among the arguments", leaf


def global_containers(block: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the containers and random generators at module level that a block's methods and their functions use."""
    kinds = {kind: None for child in block.modules() for kind in type(child).__mro__ if _is_users_class(kind)}
    functions = [function for kind in kinds for one in vars(kind).values() for function in functions_of(one)]
    known = set(functions)
    for function in functions:
        for name, value in used_globals(function).items():
            if isinstance(value, (list, deque, set, dict)) or is_generator(value):
                yield f"{name} at the level of {function.__module__}", value
            elif isinstance(value, FunctionType) and value not in known and _package(value) == _package(function):
                known.add(value)
                functions.append(value)


def _package(one: type | FunctionType) -> str:
    return one.__module__.partition(".")[0]


def shared_objects(blocks: Mapping[str, nn.Module]) -> list[Any]:
    """Return the containers and objects that several blocks have in attributes, or their hooks know, and global lists.

    A dict at module level may be a cache, which each process can fill for itself.
    """
    found: dict[int, Any] = {}
    times: Counter[int] = Counter()
    for block in blocks.values():
        seen: set[int] = set()
        behind = chain.from_iterable(objects_behind(place, seen) for _, place in places("", block))
        of_block = {id(one): one for one in behind if is_container(one)}
        found |= of_block
        times.update(of_block.keys())
    of_all = chain.from_iterable(map(global_containers, blocks.values()))
    lists = {id(one): one for _, one in of_all if isinstance(one, list) and is_container(one)}
    return [*(one for key, one in found.items() if times[key] > 1), *lists.values()]


def _is_users_class(kind: type) -> bool:
    """Whether a class does not belong to this package or to a library of modules."""
    return _package(kind) not in _LIBRARIES


def objects_behind(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield an object and what is in it, in any nesting of containers, objects and what functions enclose, each once.

    Objects of this package or of a library are not looked into.
    """
    of: Any = value if isinstance(value, FunctionType) else type(value)
    known = isinstance(value, (torch.Tensor, torch.Generator)) or not of.__module__ or _is_users_class(of)
    if id(value) in seen or not known or isinstance(value, _OPAQUE):
        return
    seen.add(id(value))
    yield value
    for one in _inside(value):
        yield from objects_behind(one, seen)


def named_inside(value: Any, of_class: bool = False) -> dict[Any, Any]:
    """Return what is inside an object by its name, or its number: items, attributes, and what functions know.

    `of_class`: also the attributes of the user's classes of an object.
    """
    container: Any
    for container in CONTAINERS:
        if isinstance(value, container):
            # By its own methods: a subclass may do anything in them.
            if container.__len__(value) > _LARGEST:
                return {}
            if container is not dict:
                return dict(enumerate(container.__iter__(value)))
            # A key may be anything: an optimizer's are parameters.
            return {key if type(key) is str else n: one for n, (key, one) in enumerate(container.items(value))}
    if isinstance(value, CellType):
        return {"": value.cell_contents} if is_filled(value) else {}
    if isinstance(value, FunctionType):
        used = {name: one for name, one in used_globals(value).items() if is_generator(one)}
        enclosed = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=False))
        return used | enclosed | dict(enumerate(value.__defaults__ or ()))
    if isinstance(value, MethodType):
        return {"": value.__func__, "self": value.__self__}
    if isinstance(value, (partial, partialmethod)):
        return {"": value.func, **dict(enumerate(value.args)), **value.keywords}
    if isinstance(value, WRAPPERS):
        return dict(enumerate(functions_of(value)))
    found = attributes(value)
    if of_class:
        for kind in type(value).__mro__:
            if kind.__module__.partition(".")[0] not in _WITHOUT_STATE:
                found = {**vars(kind), **found}
    return found


def walk(
    values: dict[Any, Any],
    depth: int,
    seen: dict[int, dict[Any, Any]],
    opaque: tuple[type, ...],
    kinds: tuple[type, ...],
    libraries: Collection[str] = (),
) -> list[tuple[str, Any]]:
    """Return the objects of some kinds inside named values, each once, with the way to it, such as "sampler.noise".

    Inside are items, attributes, attributes of users' classes, and values that functions enclose.

    Args:
        depth: levels of objects in objects that are looked through.
        seen: objects that are left out, by their id; is given what is inside each object that is looked into.
        opaque: kinds of objects that are left out.
        libraries: packages whose objects are not searched.
    """
    found: list[tuple[str, Any]] = []
    waiting = [(one, str(name), depth) for name, one in reversed(values.items())]
    while waiting:
        value, way, levels = waiting.pop()
        kind = type(value)
        # Most attributes of modules are scalars or empty.
        if kind in SCALARS or (kind in _COMMON and not value) or id(value) in seen or isinstance(value, opaque):
            continue
        seen[id(value)] = {}
        is_holder, is_wanted = isinstance(value, _LOOKED_INTO), isinstance(value, kinds)
        if is_wanted:
            found.append((way, value))
        if levels and (is_holder or not (is_wanted or kind.__module__.partition(".")[0] in libraries)):
            seen[id(value)] = inside = named_inside(value, of_class=True)
            for name, one in reversed(inside.items()):
                waiting.append((one, f"{way}.{name}", levels - 1))
    return found


def _inside(value: Any) -> Iterable[Any]:
    """Return what a block may write to in an object: of functions also globals, of a module its own attributes only."""
    if isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, nn.Module):  # `places` yields its parts separately
        return [one for name, one in attributes(value).items() if name[:1] != "_"]
    used = used_globals(value).values() if isinstance(value, FunctionType) else ()
    return [*named_inside(value).values(), *used]


class Held:
    """The contents of a block, its hooks and the arguments of a call, for another run of the block to begin with.

    Args:
        block: whose attributes, buffers and random generators these are, and what is in containers and objects.
        inputs: the arguments, whose tensors have to stay unchanged.
        largest_copy: the most elements that a tensor of the block may have to be changed in place by the block.
    """

    def __init__(self, block: nn.Module, inputs: Any = (), largest_copy: float = _LARGEST_COPY) -> None:
        seen: set[int] = set()
        self._block, modules = block, [*block.modules()]
        written = [value for _, value in chain(places("", block), global_containers(block))]
        found = [*chain.from_iterable(objects_behind(value, seen) for value in written), *block.buffers()]
        tensors = [one for one in found if isinstance(one, torch.Tensor) and not one.requires_grad]
        self._copies = {id(one): one.detach().clone() for one in tensors if one.numel() <= largest_copy}
        found += objects_behind(inputs, seen)
        others = [one for one in found if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter)]
        self._others = [(one, _version(one)) for one in others if id(one) not in self._copies]
        self._containers = [*modules, *(child._buffers for child in modules), *filter(is_container, found)]
        self._before = [*map(content, self._containers)]
        self.generators = [OwnGenerator(one) for one in found if is_generator(one)]
        self._states = [one.get_state() for one in self.generators]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Have the block see what it held; what it holds now is there again on exit, whatever runs in between.

        Raises:
            ConfigError: a tensor that was not copied has been changed in place.
        """
        for tensor, version in self._others:
            if _version(tensor) != version:
                raise ConfigError(
                    f"activation checkpointing runs the forward of {class_of(self._block).__name__} twice, and between "
                    f"the two a tensor {tuple(tensor.shape)} that it gets or holds was changed in place: the gradients "
                    "would be wrong. Write x = x + y instead of x += y, or choose blocks that leave it out."
                )
        now = [*map(content, self._containers)]
        states = [one.get_state() for one in self.generators]
        other = {key: copy.clone() for key, copy in self._copies.items()}
        before = [{name: other.get(id(one), one) for name, one in entries.items()} for entries in self._before]
        self._put(before)
        self._set_states(self._states)
        try:
            yield
        finally:
            self._put(now)
            self._set_states(states)

    def _put(self, contents: list[dict[Any, Any]]) -> None:
        for container, entries in zip(self._containers, contents, strict=True):
            if not same_content(content(container), entries):
                fill(container, entries)

    def _set_states(self, states: list[Any]) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def _version(tensor: torch.Tensor) -> int:
    """Return the number of changes in place, which tensors of the inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version
