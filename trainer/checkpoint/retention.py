"""Decide which checkpoints to keep and which to delete; templates for their names, such as "{epoch}-{val_loss:.2f}"."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

Kept = Mapping[str, "float | None"]
"""Names of checkpoints, oldest first, with the monitored value at the time of each."""


@dataclass(frozen=True)
class Retention:
    """The rule that decides which checkpoints are kept.

    Args:
        by_value: keep the best instead of the newest; ties keep the older. A missing value, nan, and an infinity that
            nothing could beat are never the best.
        mode: "min" or "max", the better value.
        top_k: number of checkpoints to keep; -1: all.
        last: also keep the newest one.
    """

    by_value: bool
    mode: Literal["min", "max"]
    top_k: int
    last: bool

    def best(self, kept: Kept, nonfinite: Collection[str] = ()) -> list[str]:
        """Return the `top_k` checkpoints with the best values, best first; ties keep the older checkpoint.

        Args:
            nonfinite: names of the checkpoints whose states are not finite, which are never among the best.
        """
        sign = 1 if self.mode == "min" else -1
        known = {
            name: sign * value
            for name, value in kept.items()
            # Neither nan, nor the infinity that no later value could beat.
            if value is not None and sign * value > -math.inf and name not in nonfinite
        }
        return sorted(known, key=known.__getitem__)[: None if self.top_k == -1 else self.top_k]

    def to_delete(self, kept: Kept, nonfinite: Collection[str] = ()) -> list[str]:
        """Return the checkpoints that are not kept, oldest first.

        Args:
            nonfinite: names of the checkpoints whose states are not finite. They do not count towards `top_k`, and only
                one that is the newest of all checkpoints is kept.
        """
        if self.top_k == -1:
            return []
        finite = {name: value for name, value in kept.items() if name not in nonfinite}
        newest_first, newest = [*reversed(finite)], [*kept][-1:]
        wanted = self.best(finite) if self.by_value else newest_first[: self.top_k]
        if nonfinite:
            wanted += newest
        if self.last or {*newest} & {*nonfinite}:
            wanted += newest_first[:1]
        return [name for name in kept if name not in wanted]


_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
"""A placeholder and its format."""


def logged_names(template: str) -> list[str]:
    """Return the logged names in a template: all placeholders but the trainer's own counts."""
    return [name for name, _ in _FIELD.findall(template) if name not in ("epoch", "step")]


def format_name(template: str, values: Mapping[str, float], with_names: bool) -> str:
    """Format a checkpoint's name: "{epoch}-{val_loss:.2f}" -> "epoch=3-val_loss=0.17", or "3-0.17" without names."""

    def fill(match: re.Match[str]) -> str:
        name, text = match[1], format(values[match[1]], match[2] or "")
        return f"{name}={text}" if with_names else text

    return _FIELD.sub(fill, template).replace("/", "_")


def template_problems(template: str | None) -> list[str]:
    """Return the mistakes in a template, to be reported before the first checkpoint is written."""
    if not template:
        return []
    fields = {name: 0 if name in ("epoch", "step") else 0.0 for name, _ in _FIELD.findall(template)}
    try:
        name = format_name(template, fields, with_names=True)
    except (ValueError, OverflowError, MemoryError):
        name = ""
    if len(name.encode("utf-8", "replace")) <= _MAX_NAME and name.isprintable() and _NAME.fullmatch(name):
        return []
    return [
        f"filename={template[:40]!r}: give a name such as '{{epoch}}-{{val_loss:.2f}}', of at most {_MAX_NAME} bytes, "
        "that does not begin with '.' and has no control characters, single braces or unknown formats."
    ]


_NAME = re.compile(r"(?!\s*$)[^.{}][^{}]*")
"""A name that is not empty or blank, begins with no dot, and has no braces left of a placeholder."""
_MAX_NAME = 200
"""Maximum bytes of a checkpoint's name: file systems allow 255, and versions and temporary names need some."""
