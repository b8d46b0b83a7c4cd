"""Compare values between processes, and name what differs, and on which ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from enum import Enum
from functools import partial
from numbers import Number
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError, format_ranks
from trainer.model.reachable import is_filled
from trainer.model.weights import AbsentParameter

_MOST_LINES, _MOST_SHOWN, _MOST_SENT, _MOST_NUMBERS = 12, 120, 10_000, 100
_MISSING = "missing"


def compare(processes: SingleProcess, facts: Iterator[tuple[str, object]], fix: str, also: Any = None) -> list[Any]:
    """Check that `facts`, pairs of a name and a value, are the same on all processes. Collective.

    What is gathered is a hash; only if the hashes differ, the values that are not rank 0's.

    Args:
        fix: the last sentence of the message.
        also: gathered in the same call, and not compared.

    Returns:
        Every process's `also`, in the order of ranks.

    Raises:
        ConfigError: they differ; raised on all processes.
    """
    if processes.world_size == 1:
        return [also]
    own = {name: as_text(value) for name, value in facts}
    digest = hashlib.sha256("\n".join(f"{name}\0{own[name]}" for name in sorted(own)).encode()).hexdigest()
    gathered = processes.all_gather_object((digest, also))
    if len({digest for digest, _ in gathered}) == 1:
        return [also for _, also in gathered]
    first = processes.broadcast_object(own)
    differing = [name for name in {**first, **own} if own.get(name) != first.get(name)][: _MOST_LINES + 1]
    names = [*dict.fromkeys(name for of_rank in processes.all_gather_object(differing) for name in of_rank)]
    values = processes.all_gather_object([own.get(name, _MISSING)[:_MOST_SENT] for name in names[:_MOST_LINES]])
    lines = [f"{name}: {_by_rank(of_ranks)}" for name, *of_ranks in zip(names, *values, strict=False)]
    # What only some have follows from another difference, if there is one: the options of a missing callback.
    shown = [line for line in lines if _MISSING not in line] or lines
    more = ["and more"] if len(names) > _MOST_LINES and shown == lines else []
    raise ConfigError(
        "\n  ".join(["the processes do not agree:", *shown, *more])
        + f"\n{fix} Look for what depends on the rank, the time, the machine, or random numbers without a seed."
    )


def differing(by_rank: list[dict[str, str]]) -> list[str]:
    """Return a line for each name whose texts differ, with the texts and the ranks that have them."""
    names = dict.fromkeys(name for of_rank in by_rank for name in of_rank)
    values = {name: [of_rank.get(name, _MISSING) for of_rank in by_rank] for name in names}
    return [f"{name}: {_by_rank(texts)}" for name, texts in values.items() if len(set(texts)) > 1]


def _by_rank(values: list[str]) -> str:
    """Return the values, each with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    position = next((n for n, characters in enumerate(zip(*values, strict=False)) if len(set(characters)) > 1), 0)
    return ", and ".join(f"{_short(value, position)} on {format_ranks(where)}" for value, where in ranks.items())


def _short(value: str, position: int) -> str:
    """Return a value, or the part of a long one around `position`."""
    begin = max(0, position - _MOST_SHOWN // 2) if len(value) > _MOST_SHOWN else 0
    end = begin + _MOST_SHOWN
    return f"{'...' if begin else ''}{value[begin:end]}{'...' if end < len(value) else ''}"


def as_text(value: object) -> str:
    """Return a value as a text that is the same on two processes if the value is.

    Paths may differ from machine to machine, so they all have the same text; so have objects of one class.
    """
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith(("/", "~"))):
        return "a path"
    if isinstance(value, np.generic) or (isinstance(value, (np.ndarray, torch.Tensor)) and _is_small(value)):
        return as_text(value.tolist())
    if value is None or isinstance(value, (str, bytes, Number, timedelta, date, torch.dtype, Enum)):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{as_text(key)}: {as_text(one)}" for key, one in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(as_text, value))) + "}"
    if isinstance(value, torch.Tensor):
        return as_text(value.item()) if value.numel() == 1 and not value.is_meta else describe_tensor(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{as_text(fields)}"
    if isinstance(value, partial):
        return f"{as_text(value.func)}({as_text([*value.args, value.keywords])})"
    if isinstance(value, FunctionType):
        return f"{value.__qualname__}{_given_to(value)}"
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _is_small(value: np.ndarray[Any, Any] | torch.Tensor) -> bool:
    """Whether an array or plain tensor holds a few numbers, which can be compared one by one."""
    held = type(value) in (np.ndarray, torch.Tensor) and not getattr(value, "is_meta", False)
    return held and getattr(value, "layout", torch.strided) == torch.strided and math.prod(value.shape) <= _MOST_NUMBERS


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return shape, dtype and strides as text."""
    # A parameter that DeepSpeed has partitioned is empty, and keeps its full shape here.
    if is_lazy(tensor):
        return f"None {tensor.dtype}"
    # Strategies send the memory as it is.
    here = not isinstance(tensor, AbsentParameter)
    strided = here and tensor.layout == torch.strided and not tensor.is_contiguous()
    order = f", strides {list(tensor.stride())}" if strided else ""
    return f"{list(getattr(tensor, 'ds_shape', tensor.shape))} {tensor.dtype}{order}"


def _given_to(function: FunctionType) -> str:
    """Return a description of a function's code, defaults and closure, by which two functions can be compared."""
    numbers = [one for one in function.__code__.co_consts if type(one) in (int, float)]
    names = function.__code__.co_freevars
    closure = {
        name: cell.cell_contents
        for name, cell in zip(names, function.__closure__ or (), strict=True)
        if is_filled(cell) and type(cell.cell_contents) in (bool, int, float, str)
    }
    found = [*numbers, *(function.__defaults__ or ()), *([closure] if closure else [])]
    return as_text(found) if found else ""
