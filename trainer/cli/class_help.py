"""Show the arguments of a class: of a callback, a strategy, or of the user's module."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from trainer.config.types import allowed, constructor_parameters

WIDTH = 110
PROVIDED = {("optimizer", "params"), ("lr_scheduler", "optimizer")}
"""Arguments that no configuration gives."""


def class_help(cls: type, place: str) -> str:
    """Return the first paragraph of a class's docstring, and each argument with its type, default and description.

    Args:
        place: where the arguments are written: `trainer.strategy`, `module`, `trainer.callbacks.N`.
    """
    text = inspect.getdoc(cls) or ""
    described = argument_texts(text)
    lines = [cls.__qualname__, "", *textwrap.wrap(" ".join(text.partition("\n\n")[0].split()), WIDTH), ""]
    parameters = {name: p for name, p in constructor_parameters(cls).named.items() if (place, name) not in PROVIDED}
    lines.append(f"arguments (init_args in a file, or --{place}.NAME):" if parameters else "It takes no arguments.")
    for name, parameter in parameters.items():
        default = "" if parameter.default is parameter.empty else f" (default: {_shown(parameter.default)})"
        kind = "" if parameter.annotation is parameter.empty else f" {allowed(parameter.annotation)}"
        lines.append(f"  {name}{':' if kind else ''}{kind}{default}")
        lines += textwrap.wrap(described.get(name, ""), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def argument_texts(docstring: str) -> dict[str, str]:
    """Return what the section `Args:` of a docstring says of each argument."""
    found: dict[str, str] = {}
    name, indent = "", None
    for line in docstring.partition("Args:\n")[2].splitlines():
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        if depth < indent:
            break
        if depth == indent:
            name, _, line = line.strip().partition(":")
        found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def _shown(default: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}.get(default, repr(default))
        if _hashable(default)
        else repr(default)
    )


def _hashable(value: Any) -> bool:
    return isinstance(value, (str, int, float, bool, type(None)))
