"""Copies of modules for trials: `copy.deepcopy`, and what it drops or shares with the original."""

from __future__ import annotations

import copy
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any, TypeVar

from torch import nn

Copied = TypeVar("Copied")
_DEEPEST = 3
"""Levels of lists and dicts in attributes in which functions are looked for."""


def deepcopy_with_functions(value: Copied, memo: dict[int, Any]) -> Copied:
    """Return a deep copy of a module or another object, in which closures and hooks have copies, too.

    `copy.deepcopy` shares functions, also those that hold the module in their closure, and drops the hooks and
    attributes of parameters.

    Args:
        memo: of `copy.deepcopy`. Parameters that stand for themselves there are left as they are.
    """
    copied = copy.deepcopy(value, memo)
    for parameter in value.parameters() if isinstance(value, nn.Module) else ():
        if memo[id(parameter)] is not parameter:
            _carry_over(parameter, memo[id(parameter)], memo)
    for part in copied.modules() if isinstance(copied, nn.Module) else _with_attributes(copied):
        if hasattr(part, "__dict__"):
            _rebind(vars(part), memo)
    return copied


def _with_attributes(copied: Any) -> list[Any]:
    """Return a copy of a loader, or of several, and the objects in its attributes, such as the dataset."""
    several = (
        [*copied.values()] if isinstance(copied, dict) else copied if isinstance(copied, (list, tuple)) else [copied]
    )
    with_attributes = [one for one in several if hasattr(one, "__dict__")]
    return [
        *with_attributes,
        *(one for part in with_attributes for one in vars(part).values() if hasattr(one, "__dict__")),
    ]


def _carry_over(parameter: nn.Parameter, copied: nn.Parameter, memo: dict[int, Any]) -> None:
    """Give a copy of a parameter the attributes and hooks of the original."""
    for name, value in vars(parameter).items():
        vars(copied).setdefault(name, _copy_or_share(value, memo))
    hooks: Any = [(copied.register_hook, parameter._backward_hooks)]
    hooks += [(copied.register_post_accumulate_grad_hook, parameter._post_accumulate_grad_hooks)]
    for register, those in hooks:
        for hook in (those or {}).values():
            copied.requires_grad_(True)  # the parameter may have been frozen after it got its hooks
            register(_rebind(_copy_or_share(hook, memo), memo))
            copied.requires_grad_(parameter.requires_grad)


def _rebind(value: Any, memo: dict[int, Any], depth: int = 0) -> Any:
    """Return a function with copies in its closure, or a copied dict or list after putting such functions into it."""
    if isinstance(value, FunctionType) and value.__closure__:
        return _with_copies(value, memo)
    if depth <= _DEEPEST and isinstance(value, (dict, list)):
        for key, one in [*value.items()] if isinstance(value, dict) else [*enumerate(value)]:
            if isinstance(one, (dict, list, FunctionType)):
                value[key] = _rebind(one, memo, depth + 1)
    return value


def _with_copies(function: FunctionType, memo: dict[int, Any]) -> Any:
    if id(function) not in memo:
        cells = [(memo.setdefault(id(cell), CellType()), cell) for cell in function.__closure__ or ()]
        closure = tuple(new for new, _ in cells)
        made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        vars(made).update(vars(function))
        memo[id(function)] = memo[id(made)] = made  # which its own closure may have
        for new, cell in cells:
            with suppress(ValueError):  # an empty one
                new.cell_contents = _rebind(_content(cell.cell_contents, memo), memo)
    return memo[id(function)]


def _content(value: Any, memo: dict[int, Any]) -> Any:
    """Return the copy of what is part of the module, or may change; else the value itself, such as data."""
    return (
        _copy_or_share(value, memo) if isinstance(value, (nn.Module, dict, list, set)) else memo.get(id(value), value)
    )


def _copy_or_share(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy; the value itself where there can be none, as of a process group."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value
