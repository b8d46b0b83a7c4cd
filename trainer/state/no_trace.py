"""no_trace: run batches through a module, and leave the module and the random generators as they were."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import partial
from itertools import chain
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
from trainer.model.reachable import attributes, is_generator, is_users
from trainer.model.unsupported import shares_elements
from trainer.module import EXCLUDED_FROM_PICKLE
from trainer.state.held_generators import with_generators, without_generators

if TYPE_CHECKING:
    from trainer.loop.run import Run

_OWN = frozenset({*vars(nn.Module()), *EXCLUDED_FROM_PICKLE})
_LARGEST = 2**26
"""Bytes of a tensor that is no buffer, or of an array, up to which its values are kept."""
_SMALL = 2**10
"""The same of the states of optimizers, which are as many as the weights."""
_DEEPEST, _MANY = 4, 1000
"""Levels of containers in containers, and items of one, up to which what is in them is kept, too."""
# No subclasses, which may do more than store; a tuple cannot change, but what is in it can.
_PLAIN = (OrderedDict, dict, deque, list, set, defaultdict, Counter, tuple, np.ndarray, torch.Tensor)

Restore = Callable[[], object]


@contextmanager
def no_trace(run: Run) -> Iterator[None]:
    """Restore on exit what a checkpoint has, but for weights, all buffers and plain attributes of the module, and the
    random generators: the global ones, those that the user's objects hold, and those of the data that are evaluated,
    with the plain attributes of streams.

    Plain are numbers, texts, tensors, arrays, and containers of these.
    """
    loaders = run.loaders.evaluated.values()
    streams = [stream for loader in loaders for stream in loader.streams()]
    with run.generators.isolated([one for loader in loaders for one in loader.generators()]):
        restore = [*keep_states(run), *chain.from_iterable(keep_attributes(one, _SMALL) for one in streams)]
        for module in run.module.modules():
            restore += keep_buffers(module)
            if not is_torchmetric(module):  # else it is restored with the metrics
                restore += keep_attributes(module, _LARGEST)
        try:
            yield
        finally:
            for put_back in restore:
                put_back()


def keep_states(run: Run, inside: bool = False) -> Iterator[Restore]:
    """Yield functions that put back what a checkpoint has now, but for weights, buffers and large tensors.

    `inside`: as for `keep_attributes`.
    """
    yield run.hook_changes.kept()
    yield kept_torchmetrics(run.metrics)
    yield from keep_users(run, inside)
    for optimizer in run.optimizers:
        yield from _keep_values([optimizer.param_groups], _LARGEST)
        yield from _keep_values([optimizer.state], _SMALL)
    for config in run.scheduler_configs:
        state = config.scheduler.state_dict()
        copied = with_generators(deepcopy(without_generators(state)), state)  # which others may hold, too
        yield partial(config.scheduler.load_state_dict, copied)


def keep_users(run: Run, inside: bool = False) -> Iterator[Restore]:
    """Yield functions that put back the plain attributes of users' callbacks, data module and module with a state."""
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
        yield from keep_attributes(owner, _LARGEST, inside)


def keep_buffers(module: nn.Module) -> Iterator[Restore]:
    """Yield functions that put back the buffers of a module without its parts, and their values."""
    if type(module._buffers) is dict:  # not the table of a scripted module
        yield partial(_put_items, module._buffers, dict(module._buffers))
    yield from _keep_values([one for one in module._buffers.values() if one is not None], math.inf)


def keep_attributes(owner: Any, largest: float, inside: bool = False, depth: int = 0) -> Iterator[Restore]:
    """Yield functions that put back the plain attributes of an object.

    Args:
        largest: bytes of a tensor or an array up to which its values are kept.
        inside: also those of users' objects in it, which may be connections: not where the run goes on.
        depth: of the object within others.
    """
    found = _attributes(owner)
    yield partial(_put_attributes, owner, {name: value for name, value in found.items() if _is_plain(value)})
    yield from _keep_values(found.values(), largest, inside, depth)


def keeps_an_iterator(stream: Any) -> bool:
    """Whether a stream has an iterator, or an open file, in its attributes: no place in it can be put back."""
    return any(defines(one, "__next__") for one in attributes(stream).values())


def is_dense(value: torch.Tensor) -> bool:
    """Whether training may write to each value of a tensor."""
    if is_lazy(value) or value.is_nested or value.layout is not torch.strided or value.is_inference():
        return False
    return not shares_elements(value)


def _keep_tensor(value: torch.Tensor, largest: float) -> Iterator[Restore]:
    """Yield a function that puts back the values of a tensor that is dense, if it is no larger; nothing for others."""
    if is_dense(value) and not value.requires_grad and value.nbytes <= largest:
        yield partial(_put_values, value, value.detach().clone())


def _keep_values(values: Collection[Any], largest: float, inside: bool = False, depth: int = 0) -> Iterator[Restore]:
    """Yield functions that put back what tensors, arrays and containers hold, and what is in these."""
    for value in values if depth <= _DEEPEST else ():
        kind = type(value)
        if kind is torch.Tensor:  # no parameter, which a strategy may have emptied
            yield from _keep_tensor(value, largest)
        elif kind is np.ndarray:
            if value.nbytes <= largest and value.flags.writeable:
                yield partial(_put_array, value, value.copy())
        elif kind in _PLAIN or (inside and isinstance(value, (dict, deque, list, set))):
            if kind is not tuple:
                yield partial(_put_items, value, copy(value))
            if len(value) <= _MANY:
                items = value.values() if isinstance(value, dict) else value
                yield from _keep_values(items, largest, inside, depth + 1)
        if inside and kind not in _PLAIN and is_users(value):
            yield from keep_attributes(value, largest, inside, depth + 1)


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


def _put_items(items: Any, before: Any) -> None:
    items.clear()
    (items.extend if hasattr(items, "extend") else items.update)(before)
