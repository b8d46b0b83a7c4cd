"""Compare values, and their types."""

from __future__ import annotations

import dataclasses
from typing import Any


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, and all their parts of the same types."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        return all(alike(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, dict):
        return alike([*one], [*other]) and alike([*one.values()], [*other.values()])
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
