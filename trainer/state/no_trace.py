"""no_trace: run batches through a module, and leave the module and the random generators unchanged."""

from __future__ import annotations

import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.arguments import defines
from trainer.callback import Callback
from trainer.hyperparameters import is_scalar
from trainer.metrics.state import kept_torchmetrics
from trainer.metrics.torchmetrics_lists import is_torchmetric
from trainer.model.reachable import attributes, content, is_container, is_generator
from trainer.model.unsupported import shares_elements
from trainer.module import EXCLUDED_FROM_PICKLE
from trainer.state.held_generators import with_generators, without_generators

if TYPE_CHECKING:
    from trainer.loop.run import Run

_OWN = frozenset({*vars(nn.Module()), *EXCLUDED_FROM_PICKLE})
_LARGEST = 2**26
"""Bytes of an array, or of a tensor that is not a buffer, up to which its values are kept."""
_LARGE, _SMALL = 2**20, 2**10
"""The same for tensors in checkpoints, and for the states of optimizers, which are as many as the weights."""
_DEEPEST, _MANY = 4, 1000
"""Levels of containers in containers, and items of a container, up to which their contents are kept, too."""
_LEVEL_OF_DATA = 2
"""The level at which streams count, because data can hold many containers: fewer levels of them are looked into."""
# A tuple cannot change, but the objects in it can.
_CONTAINERS = (OrderedDict, dict, deque, list, set, tuple)
# No subclasses, which may do more than store.
_PLAIN = (*_CONTAINERS, defaultdict, Counter, np.ndarray, torch.Tensor)
_NOT_USERS = frozenset({"torch", "numpy", "trainer", *sys.stdlib_module_names})
"""Packages whose objects are not looked into, but for modules and namespaces."""

Restore = Callable[[], object]


@dataclass(frozen=True)
class Uncopied:
    """A tensor that is too large for a copy: it is not put back, but its changes are noticed."""

    tensor: torch.Tensor
    version: int

    def __call__(self) -> None: ...


@contextmanager
def no_trace(run: Run) -> Iterator[None]:
    """Restore on exit the states of `keep_states`, all buffers and plain attributes of the module, and the random
    generators: the global generators, and the generators of the user's objects and of the data that are evaluated, with
    the places of streams in their attributes.

    Plain are numbers, texts, tensors, arrays, and containers of these.
    """
    loaders = run.loaders.evaluated.values()
    streams = [stream for loader in loaders for stream in loader.streams()]
    with run.generators.isolated([one for loader in loaders for one in loader.generators()]):
        restore = [*_Keeper(_SMALL, set()).values(streams, _LEVEL_OF_DATA), *keep_states(run)]
        for module in run.module.modules():
            restore += keep_buffers(module, math.inf)
            if not is_torchmetric(module):  # else it is restored with the metrics
                restore += _Keeper(_LARGEST).attributes(module)
        try:
            yield
        finally:
            for put_back in restore:
                put_back()


def keep_states(run: Run, looks_inside: bool = False) -> Iterator[Restore]:
    """Yield functions that put back everything that a checkpoint has now, but weights, buffers and large tensors.

    For users' callbacks, data module and module with a state these are the plain attributes.

    Args:
        looks_inside: also the attributes of the objects in them. False where the run continues: an object may be a
            connection.
    """
    yield run.hook_changes.kept()
    yield kept_torchmetrics(run.metrics)
    yield from keep_users(run, {*map(id, (run.module.trainer, *run.module.modules()))} if looks_inside else None)
    for optimizer in run.optimizers:
        yield from _Keeper(_LARGE).values([optimizer.param_groups])
        yield from _Keeper(_SMALL).values([optimizer.state])
    for config in run.scheduler_configs:
        state = config.scheduler.state_dict()
        copied = with_generators(deepcopy(without_generators(state)), state)  # which others may hold, too
        yield partial(config.scheduler.load_state_dict, copied)


def keep_users(run: Run, seen: set[int] | None = None) -> Iterator[Restore]:
    """Yield functions that put back the plain attributes of users' callbacks, data module and module with a state.

    `seen`: as for `_Keeper`.
    """
    owners: list[Any] = []
    for callback in run.callbacks:
        kind = type(callback)
        methods = (kind.state_dict, kind.on_save_checkpoint)
        if methods != (Callback.state_dict, Callback.on_save_checkpoint) and not kind.__module__.startswith("trainer."):
            owners.append(callback)
    if run.datamodule is not None and run.datamodule.overrides("state_dict"):
        owners.append(run.datamodule)
    if run.module.overrides("on_save_checkpoint"):
        owners += [part for part in run.module.modules() if not is_torchmetric(part)]
    for owner in owners:
        yield from _Keeper(_LARGE, seen).attributes(owner)


def keep_buffers(module: nn.Module, largest: float) -> Iterator[Restore]:
    """Yield functions that put back the buffers of a module without its parts; larger ones without their values."""
    if type(module._buffers) is dict:  # not the table of a scripted module
        yield partial(_put_items, dict, module._buffers, dict(module._buffers))
    for buffer in module.buffers(recurse=False):
        yield from _keep_tensor(buffer, largest)


def keeps_an_iterator(value: Any, depth: int = _LEVEL_OF_DATA) -> bool:
    """Whether a stream has an iterator or an open file in its attributes, whose place cannot be put back."""
    looked_into = is_container(value) and (type(value) in _PLAIN or _may_have_a_state(value))
    inside = content(value).values() if looked_into and depth <= _DEEPEST else ()
    return any(defines(one, "__next__") or keeps_an_iterator(one, depth + 1) for one in inside)


def _may_have_a_state(value: Any) -> bool:
    """Whether a value is an object of a user's class, a module, or a namespace."""
    kind = type(value)
    if isinstance(value, type) or kind.__module__.partition(".")[0] in _NOT_USERS:
        return isinstance(value, (nn.Module, SimpleNamespace))
    return True


def is_dense(value: torch.Tensor) -> bool:
    """Whether training may write to each value of a tensor."""
    if is_lazy(value) or value.is_nested or value.layout is not torch.strided or value.is_inference():
        return False
    return not shares_elements(value)


class _Keeper:
    """Yields functions that put back the plain values of objects.

    Args:
        largest: bytes of a tensor or an array up to which its values are kept.
        seen: ids of objects that are not looked into. Modules and other objects of users' classes are, and are added.
            None: no objects are looked into.
    """

    def __init__(self, largest: float, seen: set[int] | None = None) -> None:
        self._largest, self._seen = largest, set[int]() if seen is None else seen
        self._looks_inside, self._bases = seen is not None, tuple if seen is None else _CONTAINERS

    def attributes(self, owner: Any, depth: int = 0) -> Iterator[Restore]:
        """Yield functions that put back the plain attributes of an object, at this depth within others."""
        kept = {
            name: value
            for name, value in _attributes(owner).items()
            if _is_plain(value) or (self._looks_inside and _may_have_a_state(value))
        }
        yield partial(_put_attributes, owner, kept)
        yield from self.values(kept.values(), depth)

    def values(self, values: Collection[Any], depth: int = 0) -> Iterator[Restore]:
        """Yield functions that restore the contents of containers, tensors, arrays and perhaps objects."""
        if depth > _DEEPEST or (depth > 0 and len(values) > _MANY):
            return
        for value in values:
            kind = type(value)
            if kind is torch.Tensor:  # not a parameter, which a strategy may have emptied
                yield from _keep_tensor(value, self._largest)
            elif kind is np.ndarray:
                if value.nbytes <= self._largest and value.flags.writeable:
                    yield partial(_put_array, value, value.copy())
            elif kind in _PLAIN or isinstance(value, self._bases):
                yield from self._container(value, depth)
            if self._looks_inside and kind not in _PLAIN and _may_have_a_state(value):
                yield from self._object(value, depth + 1)

    def _container(self, value: Any, depth: int) -> Iterator[Restore]:
        """Yield functions that put back the items of a container, and the values in them."""
        base: Any = next(one for one in _CONTAINERS if isinstance(value, one))
        if base is not tuple:
            yield partial(_put_items, base, value, base(value))
        yield from self.values(value.values() if isinstance(value, dict) else value, depth + 1)

    def _object(self, owner: Any, depth: int) -> Iterator[Restore]:
        """Yield functions that put back an object, or a module with its parts."""
        for part in owner.modules() if isinstance(owner, nn.Module) else (owner,):
            if id(part) not in self._seen:
                self._seen.add(id(part))
                if isinstance(part, nn.Module):
                    yield from keep_buffers(part, self._largest)
                yield from self.attributes(part, depth)


def _keep_tensor(value: torch.Tensor, largest: float) -> Iterator[Restore]:
    """Yield a function that puts back the values of a dense tensor, or, of a larger one, knows of changes."""
    if is_dense(value) and not value.requires_grad:
        copied = value.nbytes <= largest
        yield partial(_put_values, value, value.detach().clone()) if copied else Uncopied(value, value._version)


def _is_plain(value: Any) -> bool:
    return is_scalar(value) or type(value) in _PLAIN or is_generator(value)


def _attributes(owner: Any) -> dict[str, Any]:
    left_out = _OWN if isinstance(owner, nn.Module) else ()
    return {name: value for name, value in attributes(owner).items() if name not in left_out}


def _put_attributes(owner: Any, before: dict[str, Any]) -> None:
    for name, value in _attributes(owner).items():
        if name not in before and _is_plain(value):
            object.__delattr__(owner, name)
    for name, value in before.items():
        with suppress(AttributeError):  # a property without a setter
            object.__setattr__(owner, name, value)


@torch.no_grad()
def _put_values(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if tensor.shape != before.shape:  # as observers of quantization do it in their first forward
        tensor.resize_(before.shape)
    tensor.copy_(before)


def _put_array(array: Any, before: Any) -> None:
    if array.flags.writeable and array.shape == before.shape:
        np.copyto(array, before)


def _put_items(base: Any, items: Any, before: Any) -> None:
    """Set the contents of a container by the methods of `base`, its class or a base of it."""
    base.clear(items)
    (base.extend if hasattr(base, "extend") else base.update)(items, before)
