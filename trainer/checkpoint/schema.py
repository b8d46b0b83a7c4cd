"""Check the types of values from a checkpoint, which anybody may have written, before they are used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch

from trainer.errors import CheckpointError

_MAX = 2**63


@dataclass(frozen=True)
class Integer:
    """An integer from `least` to `most`."""

    least: int = 0
    most: int = _MAX - 1

    def fits(self, value: object) -> bool:
        """Whether a value is such an integer."""
        return type(value) is int and self.least <= value <= self.most


@dataclass(frozen=True)
class Array:
    """A tensor, or an array of numpy, of this dtype and shape."""

    dtype: Any
    shape: tuple[int, ...]

    def fits(self, value: Any) -> bool:
        """Whether a value is such a tensor or array."""
        array = isinstance(value, (torch.Tensor, np.ndarray))
        return array and (value.dtype, tuple(value.shape)) == (self.dtype, self.shape)


class _Number:
    def fits(self, value: object) -> bool:
        return type(value) is float or (type(value) is int and abs(value) < _MAX)


NUMBER = _Number()
"""A number that fits a float."""

Kind = Any
"""Describes the values that are allowed. One of:

- a type, an `Integer`, an `Array`, or `NUMBER`
- a value, such as None or "mean": this value only
- a tuple of kinds: any of them
- `[kind]`: a list with items of a kind
- `{str: kind}`: a dict from str to values of a kind
- `{"name": kind, "other?": kind}`: a dict with these keys; keys with "?" may be missing, others are allowed
"""


def require(value: object, kind: Kind, where: str) -> None:
    """Raise CheckpointError if a value is not of a kind; the message begins with `where`, the name of the value."""
    found = wrong(value, kind, where)
    if found is not None:
        raise CheckpointError(f"{found}: the checkpoint is damaged, or of another version of this package")


def wrong(value: Any, kind: Kind, where: str) -> str | None:
    """Return a message for the first part of a value that is not of its kind; None if all fit."""
    if isinstance(kind, tuple):
        return None if any(wrong(value, one, where) is None for one in kind) else _found_value(value, where)
    if isinstance(kind, (list, dict)) and isinstance(value, type(kind)):
        return _wrong_inside(value, kind, where)
    return None if _fits(value, kind) else _found_value(value, where)


def _wrong_inside(value: Any, kind: Any, where: str) -> str | None:
    """Return a message for the first item of a list or dict that is not of its kind."""
    if isinstance(kind, list):
        parts = [(number, one, kind[0]) for number, one in enumerate(value)]
    elif str in kind:
        if not all(map(_is_text, value)):
            return _found_value(value, where)
        parts = [(key, one, kind[str]) for key, one in value.items()]
    else:
        missing = next((name for name in kind if not name.endswith("?") and name not in value), None)
        if missing is not None:
            return f"{where} has no {missing!r}"
        named = {name.removesuffix("?"): one for name, one in kind.items()}
        parts = [(name, value[name], one) for name, one in named.items() if name in value]
    return _first(wrong(one, its_kind, f"{where}[{name!r:.100}]") for name, one, its_kind in parts)


def _fits(value: Any, kind: Kind) -> bool:
    """Return True if a value is of a kind, which is neither a tuple nor a list or dict of kinds."""
    if isinstance(kind, (Integer, Array, _Number)):
        return kind.fits(value)
    if kind is str:
        return _is_text(value)
    if isinstance(kind, type):
        return isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
    return type(value) is type(kind) and bool(value == kind)


def _is_text(value: Any) -> bool:
    """Return True for a str that can be encoded, which one with a lone surrogate cannot."""
    try:
        return type(value) is str and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _first(found: Iterator[str | None]) -> str | None:
    return next((one for one in found if one is not None), None)


def _found_value(value: Any, where: str) -> str:
    plain = value is None or isinstance(value, (bool, float)) or NUMBER.fits(value)
    return f"{where} is {value if plain else f'of type {type(value).__name__}'}"


def unlike(saved: Any, current: Any, where: str, reserved: type | None = None) -> str | None:
    """Return a message for the first part of a saved value whose type differs from the current one; None if all fit.

    All numbers are of one type here, including numpy's and tensors of one element. A current value of None fits
    anything, and a saved None fits a bool. Of dicts only the keys that both have are compared.

    Args:
        where: the name of the value, for the message.
        reserved: the class whose instance takes the keys as attributes; new keys may not be attributes of the class.
    """
    if isinstance(current, dict):
        return _unlike_dict(saved, current, where, reserved)
    if isinstance(current, (list, tuple)):
        return _unlike_items(saved, current, where, reserved)
    if isinstance(current, bool):
        fits = isinstance(saved, (bool, NoneType))
    elif isinstance(current, (int, float)) or _is_number(current):
        fits = NUMBER.fits(saved) or _is_number(saved)
    else:
        fits = current is None or isinstance(saved, type(current))
    return None if fits else _found_value(saved, where)


def _unlike_dict(saved: Any, current: dict[Any, Any], where: str, reserved: type | None) -> str | None:
    if not isinstance(saved, dict):
        return _found_value(saved, where)
    if reserved is not None:
        taken = [key for key in saved if key not in current and hasattr(reserved, str(key))]
        if taken:
            return f"{where} has a {taken[0]!r:.100}"
    both = [key for key in current if key in saved]
    return _first(unlike(saved[key], current[key], f"{where}[{key!r:.100}]", reserved) for key in both)


def _unlike_items(saved: Any, current: Any, where: str, reserved: type | None) -> str | None:
    """Compare each item with the one at its place in a tuple, or with the first one of a list."""
    is_tuple = isinstance(current, tuple)
    if not isinstance(saved, (list, tuple)) or (is_tuple and len(saved) != len(current)):
        return _found_value(saved, where)
    likes = current if is_tuple else [*current[:1]] * len(saved)
    pairs = enumerate(zip(saved, likes, strict=False))
    return _first(unlike(one, like, f"{where}[{number}]", reserved) for number, (one, like) in pairs)


def _is_number(value: Any) -> bool:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
