"""LambdaCallback: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.callback import HOOKS, Callback
from trainer.errors import ConfigError, unknown_name_error


class LambdaCallback(Callback):
    """Call the given functions at the given hooks, each with the arguments that a method gets after `self`.

    >>> greet = LambdaCallback(on_train_start=lambda trainer, pl_module: print("here we go"))

    Raises:
        ConfigError: a name is not a hook (every hook stands at the top of `trainer/callback.py`), or its value cannot
            be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, call in hooks.items():
            if name not in HOOKS:
                raise unknown_name_error("hook of LambdaCallback", name, HOOKS)
            if call is None:
                continue
            if not callable(call):
                raise ConfigError(f"LambdaCallback({name}={call!r}): give a function.")
            setattr(self, name, call)
