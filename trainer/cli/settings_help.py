"""List the trainer's arguments for `--help`."""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields
from typing import Any

from trainer.config.plug_names import precisions, strategies
from trainer.settings import Settings

NAMES = {"strategy": strategies, "precision": precisions}
"""The arguments that take a name of a table."""


def arguments_help(width: int) -> str:
    """Return the list of the trainer's arguments for `trainer fit --help`."""
    lines = ["trainer arguments (under `trainer:` in a file, or as options):"]
    for field in fields(Settings):
        lines.append(f"  --trainer.{field.name} {_readable(str(field.type))} (default: {_as_yaml(field.default)})")
        sentence = re.split(r"(?<=\.)\s", field.metadata["help"], maxsplit=1)[0]
        if field.name in NAMES:
            sentence += f" The names are {', '.join(NAMES[field.name]())}."
        lines += textwrap.wrap(sentence, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def _readable(annotation: str) -> str:
    """Return an annotation in which a `Literal` is replaced by its values."""
    return re.sub(r"Literal\[(.*?)\]", lambda choice: choice[1].replace(", ", " | "), annotation)


def _as_yaml(default: Any) -> str:
    """Return a default as YAML."""
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default)
