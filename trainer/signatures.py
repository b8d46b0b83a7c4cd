"""Whether a user's method can be called in the way in which the trainer calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def parameters_of(method: Callable[..., Any]) -> list[str]:
    """The parameters of a method as they are written after `self`: `["batch", "batch_idx"]`, `["dataloader_idx=0"]`.

    Without a default the text is the bare name, and so is what the trainer gives: all of them, by position.
    """
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


def wrong_parameters(owner: object, name: str, expected: list[str], least: int | None = None) -> str | None:
    """What is wrong with the method `name` of `owner` if it is called with `expected`, by position; None: nothing.

    Args:
        least: it may also be called with only so many of them.
    """
    method = getattr(owner, name)
    where = f"{type(owner).__name__}.{name}"
    if not callable(method):
        return (
            f"{where} is of type {type(method).__name__}, but the trainer calls a method of that name: "
            f"{name}({', '.join(['self', *expected])}). Give yours another name."
        )
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return None  # written in C, or the like: it does not tell
    numbers = {len(expected), len(expected) if least is None else least}
    if any(_binds(signature, number) for number in numbers):
        return None
    return (
        f"{where} takes {signature}, but it is called with ({', '.join(expected)}): "
        f"define {name}({', '.join(['self', *expected])})."
    )


def _binds(signature: inspect.Signature, number: int) -> bool:
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True
