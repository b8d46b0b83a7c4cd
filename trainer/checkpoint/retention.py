"""Decide which checkpoints to keep and which to delete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kept = Mapping[str, "float | None"]
"""Names of checkpoints, oldest first, with the monitored value at the time of each."""


@dataclass(frozen=True)
class Retention:
    """The rule for which checkpoints are kept.

    Args:
        by_value: keep the best, the older of equals, instead of the newest; a missing value or nan is never the best.
        mode: "min" or "max", the better value.
        top_k: number of checkpoints to keep; -1: all.
        last: also keep the newest one.
    """

    by_value: bool
    mode: Literal["min", "max"]
    top_k: int
    last: bool

    def best(self, kept: Kept) -> str | None:
        """Return the checkpoint with the best value, the oldest among equals; None if none has a value."""
        known = {name: value for name, value in kept.items() if value is not None and value == value}
        if not known:
            return None
        return (min if self.mode == "min" else max)(known, key=known.__getitem__)

    def to_delete(self, kept: Kept) -> list[str]:
        """Return the checkpoints that are not kept, oldest first."""
        if self.top_k == -1:
            return []
        newest_first = list(reversed(list(kept)))
        if self.by_value:
            sign = 1 if self.mode == "min" else -1
            known = [name for name in kept if (value := kept[name]) is not None and value == value]
            wanted = sorted(known, key=lambda name: sign * (kept[name] or 0.0))[: self.top_k]
        else:
            wanted = newest_first[: self.top_k]
        if self.last:
            wanted.append(newest_first[0])
        return [name for name in kept if name not in wanted]
