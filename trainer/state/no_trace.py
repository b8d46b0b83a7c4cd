"""no_trace: run batches through a module, and leave the module and the random generators as they were."""

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
"""Bytes of a tensor that is no buffer, or of an array, up to which its values are kept."""
_LARGE, _SMALL = 2**20, 2**10
"""The same of what a checkpoint has, and of the states of optimizers, which are as many as the weights."""
_DEEPEST, _MANY = 4, 1000
"""Levels of containers in containers, and items of one, up to which what is in them is kept, too."""
_LEVEL_OF_DATA = 2
"""The level at which streams count, because data can hold many containers: fewer levels of them are looked into."""
# A tuple cannot change, but what is in it can.
_CONTAINERS = (OrderedDict, dict, deque, list, set, tuple)
# No subclasses, which may do more than store.
_PLAIN = (*_CONTAINERS, defaultdict, Counter, np.ndarray, torch.Tensor)
_NOT_USERS = frozenset({"torch", "numpy", "trainer", *sys.stdlib_module_names})
"""Packages whose objects are not looked into, but for modules and namespaces."""

Restore = Callable[[], object]


@dataclass(frozen=True)
class Uncopied:
    """A tensor that is too large for a copy, which is not put back, but known to have changed."""

    tensor: torch.Tensor
    version: int

    def __call__(self) -> None: ...


@contextmanager
def no_trace(run: Run) -> Iterator[None]:
    """Restore on exit what `keep_states` keeps, all buffers and plain attributes of the module, and the random
    generators: the global ones, those that the user's objects hold, and those of the data that are evaluated, with the
    places of streams in their attributes.

    Plain are numbers, texts, tensors, arrays, and containers of these.
    """
    loaders = run.loaders.evaluated.values()
    streams = [stream for loader in loaders for stream in loader.streams()]
    with run.generators.isolated([one for loader in loaders for one in loader.generators()]):
        restore = [*_keep_values(streams, _SMALL, set(), _LEVEL_OF_DATA), *keep_states(run)]
        for module in run.module.modules():
            restore += keep_buffers(module, math.inf)
            if not is_torchmetric(module):  # else it is restored with the metrics
                restore += keep_attributes(module, _LARGEST)
        try:
            yield
        finally:
            for put_back in restore:
                put_back()


def keep_states(run: Run, looks_inside: bool = False) -> Iterator[Restore]:
    """Yield functions that put back what a checkpoint has now, but for weights, buffers and large tensors.

    Of users' callbacks, data module and module with a state these are the plain attributes.

    Args:
        looks_inside: also those of the objects in them. False where the run goes on: an object may be a connection.
    """
    yield run.hook_changes.kept()
    yield kept_torchmetrics(run.metrics)
    yield from keep_users(
        run, {id(one) for one in (run.module.trainer, *run.module.modules())} if looks_inside else None
    )
    for optimizer in run.optimizers:
        yield from _keep_values([optimizer.param_groups], _LARGE)
        yield from _keep_values([optimizer.state], _SMALL)
    for config in run.scheduler_configs:
        state = config.scheduler.state_dict()
        copied = with_generators(deepcopy(without_generators(state)), state)  # which others may hold, too
        yield partial(config.scheduler.load_state_dict, copied)


def keep_users(run: Run, seen: set[int] | None = None) -> Iterator[Restore]:
    """Yield functions that put back the plain attributes of users' callbacks, data module and module with a state.

    `seen`: as for `keep_attributes`.
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
        yield from keep_attributes(owner, _LARGE, seen)


def keep_buffers(module: nn.Module, largest: float) -> Iterator[Restore]:
    """Yield functions that put back the buffers of a module without its parts, and the values of those no larger."""
    if type(module._buffers) is dict:  # not the table of a scripted module
        yield partial(_put_items, dict, module._buffers, dict(module._buffers))
    for buffer in module.buffers(recurse=False):
        yield from _keep_tensor(buffer, largest)


def keep_attributes(owner: Any, largest: float, seen: set[int] | None = None, depth: int = 0) -> Iterator[Restore]:
    """Yield functions that put back the plain attributes of an object.

    Args:
        largest: bytes of a tensor or an array up to which its values are kept.
        seen: ids of objects that are not looked into; others of users' classes, and modules, are, and are added.
            None: no objects are.
        depth: of the object within others.
    """
    kept = {
        name: value
        for name, value in _attributes(owner).items()
        if _is_plain(value) or (seen is not None and _may_have_a_state(value))
    }
    yield partial(_put_attributes, owner, kept)
    yield from _keep_values(kept.values(), largest, seen, depth)


def _keep_object(owner: Any, largest: float, seen: set[int], depth: int) -> Iterator[Restore]:
    """Yield functions that put back an object, or a module with its parts."""
    for part in owner.modules() if isinstance(owner, nn.Module) else (owner,):
        if id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, nn.Module):
                yield from keep_buffers(part, largest)
            yield from keep_attributes(part, largest, seen, depth)


def keeps_an_iterator(value: Any, depth: int = _LEVEL_OF_DATA) -> bool:
    """Whether a stream has an iterator, or an open file, in its attributes: no place in it can be put back."""
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


def _keep_tensor(value: torch.Tensor, largest: float) -> Iterator[Restore]:
    """Yield a function that puts back the values of a tensor that is dense, if it is no larger; nothing for others."""
    if is_dense(value) and not value.requires_grad:
        copied = value.nbytes <= largest
        yield partial(_put_values, value, value.detach().clone()) if copied else Uncopied(value, value._version)


def _keep_values(
    values: Collection[Any], largest: float, seen: set[int] | None = None, depth: int = 0
) -> Iterator[Restore]:
    """Yield functions that restore what containers, tensors, arrays and perhaps objects contain."""
    for value in values if depth <= _DEEPEST and (depth == 0 or len(values) <= _MANY) else ():
        kind = type(value)
        if kind is torch.Tensor:  # no parameter, which a strategy may have emptied
            yield from _keep_tensor(value, largest)
        elif kind is np.ndarray:
            yield from _keep_array(value, largest)
        elif isinstance(value, tuple) or kind in _PLAIN or (seen is not None and isinstance(value, _CONTAINERS)):
            yield from _keep_container(value, largest, seen, depth)
        if seen is not None and kind not in _PLAIN and _may_have_a_state(value):
            yield from _keep_object(value, largest, seen, depth + 1)


def _keep_array(value: Any, largest: float) -> Iterator[Restore]:
    if value.nbytes <= largest and value.flags.writeable:
        yield partial(_put_array, value, value.copy())


def _keep_container(value: Any, largest: float, seen: set[int] | None, depth: int) -> Iterator[Restore]:
    """Yield functions that put back what a container has, and what is in that."""
    base: Any = next(one for one in _CONTAINERS if isinstance(value, one))
    if base is not tuple:
        yield partial(_put_items, base, value, base(value))
    yield from _keep_values(value.values() if isinstance(value, dict) else value, largest, seen, depth + 1)


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
    """Set what a container holds by the methods of `base`, its class or the one from which that is derived."""
    base.clear(items)
    (base.extend if hasattr(base, "extend") else base.update)(items, before)
