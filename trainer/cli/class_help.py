"""Show the arguments of a class: of a callback, a strategy, or of the user's module."""

from __future__ import annotations

import inspect
import textwrap
from itertools import takewhile

from trainer.cli.columns import WIDEST
from trainer.cli.settings_help import shown
from trainer.config.types import allowed, constructor_parameters

PROVIDED = {("optimizer", "params"), ("lr_scheduler", "optimizer")}
"""Arguments that no configuration gives."""


def class_help(cls: type, place: str, width: int = WIDEST) -> str:
    """Return the first paragraph of a class's docstring, and each argument with its type, default and description.

    Args:
        place: where the arguments are written: `trainer.strategy`, `module`, `trainer.logger.N`; or nothing.
        width: characters of a line.
    """
    text = inspect.getdoc(cls) or ""
    described = argument_texts(text)
    lines = [cls.__qualname__, ""]
    if _is_own_text(cls):
        lines += [textwrap.fill(" ".join(text.partition("\n\n")[0].split()), width), ""]
    parameters = {name: p for name, p in constructor_parameters(cls).named.items() if (place, name) not in PROVIDED}
    option = f", or --{place}.NAME" if place else ""
    lines.append(f"arguments (init_args in a file{option}):" if parameters else "It takes no arguments.")
    for name, parameter in parameters.items():
        default = "" if parameter.default in (parameter.empty, ...) else f" (default: {shown(parameter.default)})"
        lines.append(f"  {name}: {allowed(parameter.annotation)}{default}")
        lines += textwrap.wrap(described.get(name, ""), width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def argument_texts(docstring: str) -> dict[str, str]:
    """Return what the section `Args:` of a docstring says of each argument."""
    found: dict[str, str] = {}
    lines = [line for line in docstring.partition("Args:\n")[2].splitlines() if line.strip()]
    name, indent = "", len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    for line in takewhile(lambda line: line.startswith(" " * indent), lines):
        if line[indent] != " ":
            name, _, line = line.strip().partition(":")
        found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def _is_own_text(cls: type) -> bool:
    """Whether the docstring is about the class, or about a base of the same package."""
    owner = next((base for base in cls.__mro__ if vars(base).get("__doc__")), object)
    return owner.__module__.partition(".")[0] == cls.__module__.partition(".")[0]
