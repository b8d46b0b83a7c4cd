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
from trainer.model.reachable import attributes, is_generator
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


def keep_states(run: Run) -> Iterator[Restore]:
    """Yield functions that put back what a checkpoint has now, but for weights, buffers and large tensors."""
    yield run.hook_changes.kept()
    yield kept_torchmetrics(run.metrics)
    yield from keep_users(run, [one for one in run.callbacks if not type(one).__module__.startswith("trainer.")])
    for optimizer in run.optimizers:
        yield from _keep_values([optimizer.param_groups], _LARGE)
        yield from _keep_values([optimizer.state], _SMALL)
    for config in run.scheduler_configs:
        state = config.scheduler.state_dict()
        copied = with_generators(deepcopy(without_generators(state)), state)  # which others may hold, too
        yield partial(config.scheduler.load_state_dict, copied)


def keep_users(run: Run, callbacks: Collection[Callback]) -> list[Restore]:
    """Return functions that put back the states of the data module, of the module, and of the user's callbacks, by
    their own methods for checkpoints."""
    owners: list[Any] = [*callbacks, *([run.datamodule] if run.datamodule else [])]
    methods: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
        (partial(_add_state, owner), owner.load_state_dict) for owner in owners
    ]
    if run.module.overrides("on_save_checkpoint"):
        methods.append((run.module.on_save_checkpoint, run.module.on_load_checkpoint))
    for one in callbacks:
        if type(one).on_save_checkpoint is not Callback.on_save_checkpoint:
            given = run.module.trainer, run.module
            methods.append((partial(one.on_save_checkpoint, *given), partial(one.on_load_checkpoint, *given)))
    restore: list[Restore] = []
    for save, load in methods:
        state: dict[str, Any] = {}
        with suppress(Exception):  # it changes what others have put into a checkpoint, or needs what a step makes
            save(state)
            restore += [partial(load, deepcopy(state))] if state else []
    return restore


def _add_state(owner: Any, state: dict[str, Any]) -> None:
    state.update(owner.state_dict())


def keep_buffers(module: nn.Module) -> Iterator[Restore]:
    """Yield functions that put back the buffers of a module without its parts, and their values."""
    if type(module._buffers) is dict:  # not the table of a scripted module
        yield partial(_put_items, module._buffers, dict(module._buffers))
    yield from _keep_values([one for one in module._buffers.values() if one is not None], math.inf)


def keep_attributes(owner: Any, largest: float) -> Iterator[Restore]:
    """Yield functions that put back the plain attributes of an object.

    `largest`: bytes of a tensor or an array up to which its values are kept.
    """
    kept = {name: value for name, value in _attributes(owner).items() if _is_plain(value)}
    yield partial(_put_attributes, owner, kept)
    yield from _keep_values(kept.values(), largest)


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


def _keep_values(values: Collection[Any], largest: float, depth: int = 0) -> Iterator[Restore]:
    """Yield functions that put back what tensors, arrays and containers hold, and what is in these."""
    for value in values:
        kind = type(value)
        if kind is torch.Tensor:  # no parameter, which a strategy may have emptied
            yield from _keep_tensor(value, largest)
        elif kind is np.ndarray:
            if value.nbytes <= largest and value.flags.writeable:
                yield partial(np.copyto, value, value.copy())
        elif kind in _PLAIN:
            if kind is not tuple:
                yield partial(_put_items, value, copy(value))
            if depth < _DEEPEST and len(value) <= _MANY:
                yield from _keep_values(value.values() if isinstance(value, dict) else value, largest, depth + 1)


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


def _put_items(items: Any, before: Any) -> None:
    items.clear()
    (items.extend if hasattr(items, "extend") else items.update)(before)
