"""Templates for the names of checkpoints, such as "{epoch}-{val_loss:.2f}"."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    rest = _FIELD.sub("", template)
    if "{" in rest or "}" in rest:
        return [f"filename={template!r}: a brace has no partner. Write '{{epoch}}-{{val_loss:.2f}}' or the like."]
    problems = []
    for name, form in _FIELD.findall(template):
        try:
            format(0 if name in ("epoch", "step") else 0.0, form)
        except (ValueError, OverflowError, MemoryError) as error:
            problems.append(f"filename={template!r}: {name!r} cannot be written as {form!r} ({error}). Use '.2f'.")
    if problems:
        return problems
    name = format_name(template, dict.fromkeys([name for name, _ in _FIELD.findall(template)], 0), with_names=True)
    size = len(name.encode("utf-8", "replace"))
    if size > _MAX_NAME or not name.isprintable() or name.startswith(".") or not name.strip():
        return [
            f"filename={template[:40]!r}: give a name of at most {_MAX_NAME} bytes, which does not begin with '.' and "
            "has no control characters."
        ]
    return []


_MAX_NAME = 200
"""Maximum bytes of a checkpoint's name: file systems allow 255, and versions and temporary names need some."""
