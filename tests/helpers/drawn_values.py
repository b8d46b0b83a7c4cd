"""Values drawn at random for an argument, right and wrong ones, and whether a value is of the annotated type."""

from __future__ import annotations

import collections
import collections.abc
import datetime
import decimal
import enum
import fractions
import inspect
import math
import numbers
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args, get_origin

import numpy as np
import torch

from trainer import callback, module, precision, strategy
from trainer.arguments import LISTS, MAPPINGS, options_of


class Number(int):
    """A subclass of int."""


class Text(str):
    """A subclass of str."""


class Choice(enum.StrEnum):
    """Names as members of an enumeration."""

    DDP = "ddp"
    NORM = "norm"


class Level(enum.IntEnum):
    TWO = 2


def endless() -> Iterator[int]:
    """Yield numbers without end."""
    while True:
        yield 1


def nested(depth: int) -> list[Any]:
    """Return a list in a list in a list ..."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def itself() -> list[Any]:
    """Return a list that contains itself."""
    found: list[Any] = []
    found.append(found)
    return found


NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, -1, -2, 50, 2**31, 2**63, 2**70, 10**400, 0.0, 0.5, 1.0, 1.5, -0.5, 3e-4, 1e300),
    *(float("nan"), float("inf"), float("-inf"), 1j, True, False, decimal.Decimal("0.5"), fractions.Fraction(1, 2)),
    *(np.int64(2), np.float32(0.5), np.float64(2.0), np.float64("nan"), np.bool_(True), np.array(2)),
    *(torch.tensor(1), torch.tensor(0.5)),
)
TEXTS: tuple[Any, ...] = (
    *("", " ", "x", "auto", "False", "true", "None", "2", "-1", "1e3", "nan", "00:00:00:05", "2h", "min", "max"),
    *("loss", "val_loss", "train_loss", "step", "epoch", "norm", "simple", "cpu", "float32", "runs/a", "a/b", "../x"),
    *("{epoch}-{step}", "{val_loss:.2f}", "{", "{0}", "a\0b", "a\nb", "ä", "x" * 300, "s3:/", "nosuch://x", b"x"),
    *(Path("x"), Path("runs/b"), Path("/dev/null/x")),
)
COLLECTIONS: tuple[Any, ...] = (
    *([], [1], [0, 0], ["x"], ["x", "x"], ["Linear"], [None], [[]], (), (1, 1), (2,), (1, -1), (0, 1, 2), {1}, set()),
    *({}, {"x": 1}, {"hours": 1}, {"hours": "x"}, {0: 2}, {0: 0}, {"0": 2}, {4: 2, 0: 1}, {None: None}, range(2)),
)
OTHERS: tuple[Any, ...] = (
    *(None, None, int, print, len, object(), ..., NotImplemented, torch.float16, torch.device("cpu"), torch.nn.Linear),
    *(torch.nn.Linear(1, 1), torch.zeros(2), np.zeros(2), ValueError("x"), callback.Callback(), callback.Callback),
    *(datetime.timedelta(0), datetime.timedelta(seconds=5), datetime.timedelta(days=-1), datetime.date(2030, 1, 1)),
    *(datetime.datetime(2020, 1, 1), datetime.datetime(2090, 1, 1)),
)
ODD: tuple[Any, ...] = (
    *(Number(2), Level.TWO, Choice.DDP, Choice.NORM, Text("ddp"), Text("cpu"), np.str_("norm"), np.array(["x"])),
    *(np.int8(-1), np.uint64(2**63), np.float16(0.5), np.complex64(1), np.datetime64("2030-01-01"), -0.0, 5e-324),
    *(np.array([1, 2]), torch.tensor([1, 2]), torch.tensor(True), torch.tensor(float("nan")), torch.Size([2])),
    *(torch.tensor(2.0, requires_grad=True), torch.empty(0), torch.empty(1, device="meta"), 2**31 - 1, 2.0, 1e9),
    *("\udcff/x", "\x1b[2J", "\u202e", "y" * 100_000, "~nosuch/x", "${HOME}/x", "%s", "NaN", "-inf"),
    *(bytearray(b"x"), memoryview(b"x"), iter([]), endless(), (one for one in [1]), itself(), nested(50), nested(900)),
    *({"x": {"x": itself()}}, collections.OrderedDict(x=1), collections.defaultdict(int), types.MappingProxyType({})),
    *(frozenset({1}), collections.deque([1]), [float("nan")], {"hours": float("nan")}, [True], list(range(10_000))),
    *(PurePosixPath("x"), Path(), lambda: None, type, object, sys, slice(2), Ellipsis, super, property()),
)
"""Subclasses, scalars of other packages, and containers without end."""
POOL = (*NUMBERS, *TEXTS, *COLLECTIONS, *OTHERS, *ODD)
"""Right for some arguments, wrong for most."""


def parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """Return the arguments of a class or function with evaluated annotations; what cannot be evaluated is `Any`."""
    found = {}
    function = cls.__init__ if isinstance(cls, type) else cls
    names = {name: value for part in (module, strategy, precision, callback) for name, value in vars(part).items()}
    names |= vars(sys.modules[cls.__module__])
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        annotation = function.__annotations__.get(name, Any)
        try:
            evaluated = eval(annotation, names) if isinstance(annotation, str) else annotation
        except Exception:
            evaluated = Any
        found[name] = parameter.replace(annotation=evaluated)
    return found


def draw(rng: random.Random, parameter: inspect.Parameter) -> Any:
    """Return a value for an argument: often one of the right type, else any."""
    right = [value for value in POOL if conforms(value, parameter.annotation)]
    for option in options_of(parameter.annotation):
        right += get_args(option) * 3 if get_origin(option) is Literal else []
    if parameter.default is not parameter.empty:
        right.append(parameter.default)
    return rng.choice(right) if right and rng.random() < 0.6 else rng.choice(POOL)


def conforms(value: Any, annotation: Any) -> bool:
    """Whether a value is of the annotated type: an integer is a float, a bool is no number, numpy has its own."""
    return any(_is_one(value, option) for option in options_of(annotation))


def _is_one(value: Any, option: Any) -> bool:
    origin, arguments = get_origin(option), get_args(option)
    if option is Any:
        return True
    if option is None or option is type(None):
        return value is None
    if origin is Literal:
        return any(value is choice or (type(value) is type(choice) and value == choice) for choice in arguments)
    if option is collections.abc.Callable or origin is collections.abc.Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if option is bool:
        return isinstance(value, (bool, np.bool_))
    if option is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if option is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if origin is tuple:
        wanted = [arguments[0]] * len(value) if isinstance(value, (list, tuple)) and ... in arguments else arguments
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(wanted)
            and all(conforms(item, one) for item, one in zip(value, wanted, strict=True))
        )
    if origin in LISTS:
        kinds = (list, tuple, set, frozenset, range)
        return isinstance(value, kinds) and all(conforms(item, arguments[0]) for item in value)
    if origin in MAPPINGS:
        return isinstance(value, collections.abc.Mapping) and all(
            conforms(key, arguments[0]) and conforms(one, arguments[1]) for key, one in value.items()
        )
    return isinstance(option, type) and isinstance(value, option)


def is_a_number(value: Any, depth: int = 10) -> bool:
    """Whether no number in a value, which may contain itself, is nan."""
    if isinstance(value, (float, np.floating)):
        return not math.isnan(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return depth == 0 or all(is_a_number(item, depth - 1) for item in items)


def shown(value: Any) -> str:
    """Return a value as text that is the same in every process."""
    try:
        text = repr(value) if not isinstance(value, int) or abs(value) < 2**100 else "a number of many digits"
    except Exception:  # of an object that raises
        return f"<{type(value).__name__}>"
    text = text if len(text) < 300 else f"{text[:300]}..."
    return text if " at 0x" not in text else f"<{type(value).__name__}>"
