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
    if template is None:
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
    if not problems:
        values = {name: 0 if name in ("epoch", "step") else 0.0 for name, _ in _FIELD.findall(template)}
        problems = _wrong_name(template, format_name(template, values, with_names=True))
    return problems


_MAX_NAME = 200
"""Maximum bytes of a checkpoint's name: file systems allow 255, and versions and temporary names need some."""


def _wrong_name(template: str, name: str) -> list[str]:
    """Return a message for each reason for which no folder can have this name, which was made from the template."""
    size = len(name.encode("utf-8", "replace"))
    if size > _MAX_NAME:
        return [f"filename={template[:40]!r}...: a name of {size} bytes is too long, give one of {_MAX_NAME} at most."]
    if "\0" in name or not name.isprintable() or name.encode("utf-8", "ignore").decode() != name:
        return [f"filename={template!r}: no file can have this name. Leave out control characters."]
    if template and (name.startswith(".") or not name.strip()):
        return [f"filename={template!r}: give a name that does not begin with '.'."]
    return []
