"""Other names of the same thing."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

SHORT_PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""Short names of precisions -> the full ones."""


class Alias:
    """An attribute whose value is at the path `path` of its object."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._read = attrgetter(path)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self._read(instance)
