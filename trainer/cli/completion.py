"""`trainer completion`: a script by which a shell completes commands, options, and values that are one of a few.

shtab writes them from a parser of argparse. Most options are arguments of the Trainer, which the commands' own parsers
never see: so the options of that parser are read from the help.
"""

from __future__ import annotations

import io
import re
from argparse import ArgumentParser
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import fields
from functools import cache
from typing import Any

import shtab

from trainer.cli.checkpoint.command import DTYPES
from trainer.cli.config.wizard import PRESETS
from trainer.cli.init import TEMPLATES
from trainer.cli.main import COMMANDS, main
from trainer.cli.options import DOTTED_HELP, CommandParser, make_parser, reports_errors
from trainer.cli.settings_help import NAMES, arguments_help
from trainer.cli.tune.command import OPTIONS as TUNE_OPTIONS
from trainer.config.plug_names import callbacks, optimizers, precisions, schedulers, strategies
from trainer.distributed.accelerators import ACCELERATORS
from trainer.settings import Settings

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  trainer completion bash >> ~/.bashrc
  trainer completion zsh > ~/.zfunc/_trainer  # in a folder of $fpath
  trainer completion fish > ~/.config/fish/completions/trainer.fish
"""
SECOND_WORDS = {
    "checkpoint": ("ls", "show", "verify", "export", "import"),
    "runs": ("ls",),
    "tune": tuple(TUNE_OPTIONS),
    "completion": SHELLS,
    "help": (*COMMANDS, *callbacks("Callback"), *strategies(), *precisions()),
}
"""Commands whose second word is one of a few."""
WITH_OPTIONS_OF_ITS_OWN = ("checkpoint", "runs", "tune")
"""Commands whose second word decides which options there are."""
OR_A_PATH = ("--ckpt-path",)
"""Options with a few known values, which take any path, too."""


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the script of a shell. Returns the exit code."""
    parser = CommandParser(
        prog="trainer completion",
        description="Print a script that completes commands, options, and values that are one of a few, such as "
        "strategies; file names are completed as everywhere.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")
    shell = parser.parse(arguments).shell
    print(shtab.complete(add_commands(ArgumentParser("trainer", add_help=False), COMMANDS), shell))
    return 0


def add_commands(parser: ArgumentParser, commands: Iterable[str]) -> ArgumentParser:
    """Give commands to a parser that parses nothing, with the options and values that a shell completes; return it."""
    of_commands = parser.add_subparsers()
    for command in commands:
        one = of_commands.add_parser(command, help=COMMANDS[command][1], add_help=False)
        if command in WITH_OPTIONS_OF_ITS_OWN:
            of_words = one.add_subparsers()
            for word in SECOND_WORDS[command]:
                _add_options(of_words.add_parser(word, help=word, add_help=False), options_of(command, word))
            continue
        if command == "launch":  # trainer launch ... trainer fit
            launched = one.add_subparsers().add_parser("trainer", help="a command", add_help=False)
            add_commands(launched, [other for other in COMMANDS if other != command])
        elif command in SECOND_WORDS:
            one.add_argument("word", choices=SECOND_WORDS[command])
        _add_options(one, options_of(command, ""))
    return parser


def _add_options(parser: ArgumentParser, options: Iterable[str]) -> None:
    few = values()
    for name in options:
        option: Any = parser.add_argument(name, choices=few.get(name))
        if name not in few or name in OR_A_PATH:
            option.complete = shtab.FILE


@cache
def options_of(command: str, word: str) -> list[str]:
    """Return the options of a command, or of its second word: with the trainer's arguments, which argparse never sees.

    They are those with which a line of the help begins.
    """
    if command in ("completion", "help"):
        return []
    if command == "tune":
        text = make_parser(command, COMMANDS[command][1]).format_help() + DOTTED_HELP + arguments_help(command, 80)
    else:
        with redirect_stdout(io.StringIO()) as printed:
            main([command, *filter(None, [word]), "--help"])
        text = printed.getvalue()
    heads = [line.strip().split("  ")[0] for line in text.splitlines() if re.match(r" {2}-", line)]
    names = [name for head in heads for name in re.findall(r"(?:^|, )(--[a-z][\w.-]*)", head)]
    found = {name for name in names if not _is_example(name)} | set(TUNE_OPTIONS[word] if command == "tune" else ())
    return sorted(name for name in found if "." in name or name.replace("_", "-") not in found - {name})


def _is_example(name: str) -> bool:
    """Whether the help has an option as an example: those of the user's classes are not known."""
    first, _, rest = name.partition(".")
    return bool(rest) and rest != "help" and (first != "--trainer" or "." in rest)


@cache
def values() -> dict[str, list[str]]:
    """Return the values of each option that takes one of a few."""
    found = {f"--trainer.{name}": list(names()) for name, names in NAMES.items()}
    for field in fields(Settings):
        choices = re.findall(r"'(\w+)'", "".join(re.findall(r"Literal\[(.*?)\]", str(field.type).replace('"', "'"))))
        if choices or "bool" in str(field.type):
            found[f"--trainer.{field.name}"] = choices + ["true", "false"] * ("bool" in str(field.type))
    found["--trainer.accelerator"] = list(ACCELERATORS)
    found |= {"--optimizer": optimizers(), "--lr_scheduler": schedulers(), "--preset": [*PRESETS]}
    for option, base in (("--trainer.callbacks", "Callback"), ("--trainer.logger", "Logger")):
        found |= {option: [*callbacks(base), *found.get(option, ())], f"{option}+": callbacks(base)}
    found |= {name: ["last", "best"] for name in ("--ckpt", *OR_A_PATH)}
    return found | {"--precision": [*precisions()], "--template": [*TEMPLATES], "--dtype": [*DTYPES]}
