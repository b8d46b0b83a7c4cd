"""Check the names and parameters of the hooks of callbacks and modules."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from trainer.callback import HOOKS, Callback
from trainer.errors import did_you_mean
from trainer.logger import Logger
from trainer.names.misses import member_words, words_for

EVALUATION_ARGUMENTS = ["batch", "batch_idx", "dataloader_idx=0"]
"""The arguments of `validation_step`, `test_step` and `predict_step`; the last one where there are several loaders."""


def callback_problems(callback: Callback) -> list[str]:
    """Return a problem for each misspelt hook and each hook with wrong parameters."""
    wrong = [check_signature(callback, hook, arguments_of(hook)) for hook in overridden_hooks(callback)]
    own = next(one for one in type(callback).__mro__ if one.__module__.startswith("trainer."))
    names = methods_beyond(callback, own)
    instead = words_for("hook", [name for name in names if name.startswith("on_")])
    if not isinstance(callback, Logger):
        instead |= member_words(type(callback), names)
    return [*uncalled_methods(callback, names, instead, hooks=HOOKS), *filter(None, wrong)]


def users_callbacks(callbacks: list[Callback], hook_name: str) -> list[Callback]:
    """Return the user's callbacks that have a hook."""
    hooks = [(one, getattr(one, hook_name)) for one in callbacks]  # None: left out
    return [one for one, hook in hooks if hook is not None and not hook.__module__.startswith("trainer.")]


def uncalled_methods(
    plug: object,
    names: Iterable[str],
    instead: Mapping[str, str],
    hooks: Collection[str] = (),
    methods: Collection[str] = (),
) -> list[str]:
    """Return a problem for each of a user's methods that looks like one that is called, and is not.

    Args:
        names: as `methods_beyond` returns them.
        instead: what to use instead of methods that other trainers call.
        hooks: the names of the plug's hooks.
        methods: the names of further methods, which the user has not defined.
    """
    kind, helpers, problems = type(plug).__name__, called_by_others(type(plug)), []
    for name in names:
        if name in helpers:
            continue
        like_a_hook = f"on_{name}" in hooks or (name.startswith("on_") and len(hooks) > 0)
        close = difflib.get_close_matches(name, methods, n=1, cutoff=0.85)
        if name in instead:
            problems.append(f"{kind}.{name} would never be called. Use {instead[name]}.")
        elif like_a_hook and not name.endswith("_checkpoint"):
            problems.append(
                f"{kind}.{name} is not a hook, so it would never be called.{did_you_mean(name, hooks)} "
                "Every hook, in running order, stands at the top of trainer/callback.py."
            )
        # A name around the known one, such as configure_models, is a helper's.
        elif close and close[0] not in name:
            problems.append(f"{kind}.{name} is not a method that the trainer calls. Did you mean {close[0]!r}?")
    return problems


def methods_beyond(plug: object, own: type) -> list[str]:
    """Return the names of the public methods of a user's class that the class `own` of this package lacks."""
    names = [name for name in dir(type(plug)) if not name.startswith("_") and not hasattr(own, name)]
    return [name for name in names if callable(inspect.getattr_static(type(plug), name))]


def called_by_others(kind: type) -> set[str]:
    """Return the names that methods of the user's classes call in methods of other names: their own helpers."""
    codes = [function.__code__ for function in users_functions(kind)]
    return {name for code in codes for name in code.co_names if name != code.co_name}


def users_functions(kind: type) -> list[FunctionType]:
    """Return the methods that a class has from the user's code."""
    users = [one for one in kind.__mro__ if not one.__module__.startswith(("trainer.", "torch.", "builtins"))]
    return [value for one in users for value in vars(one).values() if isinstance(value, FunctionType)]


def overridden_hooks(callback: Callback) -> list[str]:
    """Return the hooks that a callback or its class overrides, in their order; a hook that is None does not count."""
    return [
        hook
        for hook in HOOKS
        if (method := getattr(callback, hook)) is not None
        and getattr(method, "__func__", None) is not getattr(Callback, hook)
    ]


def check_signature(owner: object, name: str, expected: list[str]) -> str | None:
    """Return the problem of calling the method `name` of `owner` with the arguments `expected`, by position; or None.

    It may leave out `dataloader_idx`, which is given where there are several loaders.
    """
    method = getattr(owner, name)
    where = f"{type(owner).__name__}.{name}"
    if not callable(method):
        return f"{where} is of type {type(method).__name__}, but the trainer calls it: give yours another name."
    if takes(method, len(expected)) or takes(method, len(expected) - expected.count("dataloader_idx=0")):
        return None
    return (
        f"{where} takes {inspect.signature(method)}, but it is called with ({', '.join(expected)}): "
        f"define {name}({', '.join(['self', *expected])})."
    )


def parameters_of(method: Callable[..., Any]) -> list[str]:
    """Return the parameters of a method after `self`, as source: `["batch", "batch_idx"]`, `["dataloader_idx=0"]`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


@cache
def arguments_of(hook: str) -> list[str]:
    """Return the parameters of a callback's hook, as `parameters_of` does."""
    return parameters_of(getattr(Callback, hook))


def takes(method: Callable[..., Any], number: int) -> bool:
    """Whether a method can be called with so many positional arguments; True if its signature is not known."""
    try:
        inspect.signature(method).bind(*[None] * number)
    except TypeError:
        return False
    except ValueError:  # written in C, or the like
        return True
    return True
