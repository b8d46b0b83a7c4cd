"""The trainer's arguments for `--help`, read from the source of settings.py, so that torch need not be imported."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Argument:
    """One argument of the Trainer as its source has it."""

    name: str
    annotation: str
    default: str
    sentence: str
    """The first sentence of its docstring."""


def trainer_arguments() -> list[Argument]:
    """All arguments of `Trainer`, in the order of the class `Settings`."""
    path = Path(__file__).parents[1] / "settings.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    settings = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    arguments = []
    for field, following in zip(settings.body, [*settings.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        arguments.append(
            Argument(
                field.target.id,
                re.sub(
                    r"Literal\[(.*?)\]", lambda choice: choice[1].replace(", ", " | "), ast.unparse(field.annotation)
                ),
                _as_yaml(field.value),
                re.split(r"(?<=\.)\s", text, maxsplit=1)[0],
            )
        )
    return arguments


def _as_yaml(default: ast.expr | None) -> str:
    """A default as it would stand in a configuration."""
    if isinstance(default, ast.Constant):
        words = {None: "null", True: "true", False: "false"}
        if default.value is None or isinstance(default.value, bool):
            return words[default.value]
        return str(default.value)
    return "" if default is None else ast.unparse(default)


def arguments_help(width: int = 110) -> str:
    """The list of the trainer's arguments as `trainer fit --help` shows it."""
    lines = ["trainer arguments (under `trainer:` in a file, or as options):"]
    for argument in trainer_arguments():
        lines.append(f"  --trainer.{argument.name} {argument.annotation} (default: {argument.default})")
        lines += textwrap.wrap(argument.sentence, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"
