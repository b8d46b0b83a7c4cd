"""Name what differs between processes, or between a run and its checkpoint."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, timedelta
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from pathlib import Path
from types import FunctionType, NoneType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from trainer.data.fingerprints import enclosed_values, has_values
from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError, format_ranks
from trainer.model.weights import AbsentParameter

MOST_LINES = 12
"""Differences that one message lists."""
_MOST_SHOWN, _MOST_SENT, _MOST_NUMBERS = 120, 10_000, 100
_MISSING = "missing"


# -- the differences ---------------------------------------------------------------------------------------------------


def differences(
    facts: Sequence[Mapping[str, str]], holders: Sequence[str] = (), only_common: bool = False
) -> list[str]:
    """Return a line for each fact that differs: `lr: 0.1 on ranks 0, 2, and 0.2 on rank 1`.

    Args:
        facts: the facts of each holder, by name.
        holders: their names, as in "0.1 here"; default: ranks.
        only_common: leave out facts that some holders do not have.
    """
    lines = []
    for name in dict.fromkeys(chain.from_iterable(facts)):
        values = [of_one.get(name, _MISSING) for of_one in facts]
        if len(set(values)) > 1 and not (only_common and _MISSING in values):
            lines.append(f"{name}: {_by_holder(values, holders)}")
    return lines


def _by_holder(values: list[str], holders: Sequence[str]) -> str:
    """Return the values, each with those who have it."""
    numbers: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        numbers.setdefault(value, []).append(number)
    position = len(os.path.commonprefix(values))  # noqa: RUF071  # of characters
    return ", and ".join(
        f"{_short(value, position)} {holders[who[0]] if holders else f'on {format_ranks(who)}'}"
        for value, who in numbers.items()
    )


def _short(value: str, position: int) -> str:
    """Return a value, or the part of a long one around `position`."""
    begin = max(0, position - _MOST_SHOWN // 2) if len(value) > _MOST_SHOWN else 0
    end = begin + _MOST_SHOWN
    return f"{'...' if begin else ''}{value[begin:end]}{'...' if end < len(value) else ''}"


def listed(lines: list[str], most: int = MOST_LINES) -> str:
    """Return the first lines, each on a separate line and indented."""
    shown = lines if len(lines) <= most else [*lines[:most], "and more"]
    return "".join(f"\n  {line}" for line in shown)


# -- between processes -------------------------------------------------------------------------------------------------


def compare(
    processes: SingleProcess,
    facts: Iterable[tuple[str, object]],
    fix: str,
    also: Any = None,
    in_order: bool = False,
) -> list[Any]:
    """Check that `facts`, pairs of a name and a value, are the same on all processes. Collective.

    What is gathered is a hash; only if the hashes differ, the values that are not rank 0's.

    Args:
        fix: the last sentence of the message.
        also: gathered in the same call, and not compared.
        in_order: the order of the facts has to be the same, too.

    Returns:
        Every process's `also`, in the order of ranks.

    Raises:
        ConfigError: they differ; raised on all processes.
    """
    if processes.world_size == 1:
        return [also]
    own = {name: as_text(value) for name, value in facts}
    digest = hashlib.sha256(repr([*own.items()] if in_order else sorted(own.items())).encode()).hexdigest()
    digests, others = zip(*processes.all_gather_object((digest, also)), strict=True)
    if len({*digests}) > 1:
        raise disagreement(_differences_of_ranks(processes, own), fix)
    return [*others]


def disagreement(lines: list[str], fix: str) -> ConfigError:
    """Return the error of processes that differ: `differences`, and the last sentence but one of the message."""
    return ConfigError(
        f"the processes do not agree:{listed(lines)}\n{fix} "
        "Look for what depends on the rank, the time, the machine, or random numbers without a seed."
    )


def _differences_of_ranks(processes: SingleProcess, own: dict[str, str]) -> list[str]:
    """Return a line for each fact that differs between the processes, or for their order. Collective."""
    first = processes.broadcast_object(own)
    differing = [name for name in {**first, **own} if own.get(name) != first.get(name)][: MOST_LINES + 1]
    names = [*dict.fromkeys(chain.from_iterable(processes.all_gather_object(differing)))]
    if not names:
        own, names = {"order": ", ".join(own)}, ["order"]
    lines = differences(processes.all_gather_object({name: own[name][:_MOST_SENT] for name in names if name in own}))
    # Facts that only some have may follow from another difference: the options of a missing callback.
    return [line for line in lines if f" {_MISSING} on " not in line] or lines


# -- as texts ----------------------------------------------------------------------------------------------------------


def as_text(value: object) -> str:
    """Return a value as a text that is the same on two processes if the value is.

    Paths may differ from machine to machine, so they all have the same text; so have objects of one class.
    """
    if _is_small(value):
        return as_text(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{as_text(fields)}"
    for kinds, describe in _TEXTS:
        if isinstance(value, kinds):
            return describe(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _sorted(texts: Iterable[str]) -> str:
    return f"{{{', '.join(sorted(texts))}}}"


def _is_small(value: Any) -> TypeGuard[np.ndarray[Any, Any] | torch.Tensor]:
    """Whether a value is an array or plain tensor of a few numbers, which can be compared one by one."""
    held = type(value) is np.ndarray or (type(value) is torch.Tensor and has_values(value))
    return held and math.prod(value.shape) <= _MOST_NUMBERS


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return shape, dtype and strides as text."""
    # A parameter that DeepSpeed has partitioned is empty, and keeps its full shape here.
    if is_lazy(tensor):
        return f"None {tensor.dtype}"
    # Strategies send the memory unchanged.
    here = not isinstance(tensor, AbsentParameter)
    strided = here and tensor.layout == torch.strided and not tensor.is_contiguous()
    order = f", strides {list(tensor.stride())}" if strided else ""
    return f"{list(getattr(tensor, 'ds_shape', tensor.shape))} {tensor.dtype}{order}"


def _given_to(function: FunctionType) -> str:
    """Return a description of a function's code, defaults and closure, for comparing two functions."""
    found: list[Any] = [one for one in function.__code__.co_consts if type(one) in (int, float)]
    found += function.__defaults__ or ()
    plain = {name: one for name, one in enclosed_values(function).items() if type(one) in (bool, int, float, str)}
    if plain:
        found.append(plain)
    return as_text(found) if found else ""


_TEXTS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (np.generic, lambda value: as_text(value.tolist())),
    (Path, lambda value: "a path"),
    (str, lambda value: "a path" if value.startswith(("/", "~")) else repr(value)),
    ((NoneType, bytes, Number, timedelta, date, torch.dtype, Enum), repr),
    (Mapping, lambda value: _sorted(f"{as_text(key)}: {as_text(one)}" for key, one in value.items())),
    ((list, tuple), lambda value: f"[{', '.join(map(as_text, value))}]"),
    ((set, frozenset), lambda value: _sorted(map(as_text, value))),
    (torch.Tensor, describe_tensor),
    (partial, lambda value: f"{as_text(value.func)}({as_text([*value.args, value.keywords])})"),
    (FunctionType, lambda value: f"{value.__qualname__}{_given_to(value)}"),
)
"""The descriptions of values by their classes: the first that fits is taken, and others have a name alone."""
