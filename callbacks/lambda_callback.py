"""LambdaCallback: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.callback import HOOKS, Callback
from trainer.errors import ConfigError, raise_problems, unknown_name_error


class LambdaCallback(Callback):
    """Call the given functions at the given hooks, each with the arguments that a method gets after `self`.

    >>> greet = LambdaCallback(on_train_start=lambda trainer, pl_module: print("here we go"))

    Raises:
        ConfigError: a name is not a hook (every hook stands at the top of `trainer/callback.py`), or its value cannot
            be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        given = {name: call for name, call in hooks.items() if call is not None}
        raise_problems([problem for name, call in given.items() for problem in _problems(name, call)], "LambdaCallback")
        for name, call in given.items():
            setattr(self, name, call)


def _problems(name: str, call: object) -> list[str]:
    if name not in HOOKS:
        return [str(unknown_name_error("hook of LambdaCallback", name, HOOKS))]
    if not callable(call):
        return [str(ConfigError(f"LambdaCallback({name}={call!r}): give a function."))]
    return []
