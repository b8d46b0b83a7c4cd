"""Other names of the same thing."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

SHORT_PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Short names of precisions -> the full ones."""


class Overridable:
    """A property that an instance may replace with an attribute."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self.read(instance)


class Alias(Overridable):
    """An attribute whose value is at the path `path` of its object."""

    def __init__(self, path: str) -> None:
        self.path, self.read, self.__doc__ = path, attrgetter(path), f"The same as `{path}`."
