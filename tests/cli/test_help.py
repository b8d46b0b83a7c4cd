"""`--help`: every command has one with an example, for which nothing heavy is imported."""

from __future__ import annotations

import json
from dataclasses import fields

from tests.helpers.processes import run_python
from tests.helpers.project import Command
from trainer.cli import main
from trainer.cli.checkpoint.command import SUBCOMMANDS as OF_CHECKPOINT
from trainer.cli.class_help import argument_texts
from trainer.cli.settings_help import TRAINING_ONLY
from trainer.settings import ARGUMENTS, Settings

COMMANDS = [
    [],
    *([name] for name in main.COMMANDS),
    ["fit", "--dry-run"],
    *(["checkpoint", name] for name in OF_CHECKPOINT),
]
ALL = f"""\
import contextlib, io, json, sys
for name in ("torch", "numpy", "pydantic", "yaml", "deepspeed", "ray"):
    sys.modules[name] = None  # importing it is an error from now on
from trainer.__main__ import main
texts = []
for command in {COMMANDS!r}:
    sys.argv = ["trainer", *command, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main() == 0, command
    texts.append(text.getvalue())
assert len(sys.modules) < 300, sorted(sys.modules)
print(json.dumps(texts))
"""


def test_every_command_has_help_with_an_example_and_no_torch() -> None:
    texts = json.loads(run_python(ALL).check().stdout)
    for command, text in zip(COMMANDS, texts, strict=True):
        examples = [line.split() for line in text.partition("examples:\n")[2].splitlines()]
        typed = ["trainer", *command]
        assert any(set(typed) <= set(words) for words in examples), typed


def test_the_arguments_are_described_in_full_and_an_evaluation_has_its_own(command: Command) -> None:
    of_fit, of_test = (" ".join(command(name, "--help")[1].split()) for name in ("fit", "test"))
    for field in fields(Settings):
        assert " ".join(field.metadata["help"].split()) in of_fit, field.name
        assert (f"--trainer.{field.name} " in of_test) == (field.name not in TRAINING_ONLY), field.name
    assert set(ARGUMENTS) > TRAINING_ONLY
    assert "--dry-run check a training on many processes" in of_fit
    assert "--dry-run" not in of_test


def test_arguments_are_described_up_to_the_end_of_their_section() -> None:
    """Blank lines between arguments are within it, and another section may follow at once."""
    docstring = """A class.

    Args:
        a: the first,
            in two lines

        b: the second
    Returns:
        x: not an argument
    """
    assert argument_texts(docstring) == {"a": "the first, in two lines", "b": "the second"}
