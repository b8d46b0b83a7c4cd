"""Copies of modules for trials: `copy.deepcopy`, and what it drops or shares with the original."""

from __future__ import annotations

import copy
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from trainer.model.reachable import is_filled, walk

Copied = TypeVar("Copied")
_DEPTH = 5
"""Levels of objects in objects that are searched for functions."""


def deepcopy_with_functions(value: Copied, memo: dict[int, Any]) -> Copied:
    """Return a deep copy of a module or another object, with copies of closures and hooks.

    `copy.deepcopy` shares functions, also those that hold the module in their closure, and drops the hooks and
    attributes of parameters.

    Args:
        memo: of `copy.deepcopy`. Parameters that stand for themselves there are left unchanged.
    """
    parts: list[Any] = [value]
    parameters: list[nn.Parameter] = []
    if isinstance(value, nn.Module):
        parameters = [*value.parameters()]
        parts = [*value.modules(), *parameters]
    hooks = {one: (_hooks(one._backward_hooks), _hooks(one._post_accumulate_grad_hooks)) for one in parameters}
    inside = [*(vars(one) if hasattr(one, "__dict__") else one for one in parts), *hooks.values()]
    cells = _copy_functions(inside, memo)
    copied = copy.deepcopy(value, memo)
    for cell in filter(is_filled, cells):
        memo[id(cell)].cell_contents = _content(cell.cell_contents, memo)
    for parameter, (of_gradient, after) in hooks.items():
        new = memo[id(parameter)]
        if new is not parameter:
            vars(new).update({name: _copy_or_share(one, memo) for name, one in vars(parameter).items()})
            new.requires_grad_(bool(of_gradient or after))  # it may have been frozen after it got its hooks
            for hook in of_gradient:
                new.register_hook(_copy_or_share(hook, memo))
            for hook in after:
                new.register_post_accumulate_grad_hook(_copy_or_share(hook, memo))
            new.requires_grad_(parameter.requires_grad)
    return copied


def _hooks(registered: Any) -> list[Any]:
    return [*(registered or {}).values()]


def _copy_functions(inside: list[Any], memo: dict[int, Any]) -> list[CellType]:
    """Put copies of the functions that enclose something into `memo`; return the cells of the originals."""
    opaque = (torch.Tensor, np.ndarray, type, ModuleType, nn.Module)  # modules are looked into one by one
    found = walk(dict(enumerate(inside)), _DEPTH, {}, opaque, (FunctionType,))
    functions = [one for _, one in found if one.__closure__]
    cells = {id(cell): cell for one in functions for cell in one.__closure__}
    memo |= {key: CellType() for key in cells}
    for one in functions:
        closure = tuple(memo[id(cell)] for cell in one.__closure__)
        new = FunctionType(one.__code__, one.__globals__, one.__name__, one.__defaults__, closure)
        new.__kwdefaults__ = one.__kwdefaults__
        vars(new).update(vars(one))
        memo[id(one)] = new
    return [*cells.values()]


def _content(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of what is part of the module, or may change; else the value itself, such as data."""
    is_changed = isinstance(value, (nn.Module, dict, list, set))
    return _copy_or_share(value, memo) if is_changed else memo.get(id(value), value)


def _copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy; the value itself where there can be none, as of a process group."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value
