"""`trainer completion`: a script that makes a shell complete commands, options, and values that are one of a few.

shtab writes them from a parser of argparse. Most options are arguments of the Trainer, which the commands' own parsers
never see: so the options of that parser are read from the help.
"""

from __future__ import annotations

import io
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
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
REPLACED = {
    "bash": {
        # Complete files for other words: shtab leaves that out on purpose, github.com/tqdm/shtab/issues/65.
        "-o bashdefault": "-o bashdefault -o default",
        # Options may follow the `--` of `trainer launch -- trainer fit`.
        "pos_only=1": "pos_only=0",
    },
    "zsh": {
        '"(*)::path:_files"': '"*:path:_files"',  # shtab offers one path only
        # `launch` is followed by a program and its arguments: shtab has either those or the commands of `trainer`.
        '"(-)*::program:_files"': "",
        "': :_shtab_trainer_launch_commands'": "': :_files'",
        "_shtab_trainer_launch_trainer ;;": "_shtab_trainer_launch_trainer ;; *) _files ;;",
    },
    "fish": {},
}
"""Words in the scripts of shtab, and those that take their place."""


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
    script = shtab.complete(add_commands(ArgumentParser("trainer", add_help=False), COMMANDS), shell)
    for words, others in REPLACED[shell].items():
        script = script.replace(words, others)
    print(script)
    return 0


def add_commands(parser: ArgumentParser, commands: Iterable[str]) -> ArgumentParser:
    """Give commands to a parser that parses nothing, with the options and values that a shell completes; return it."""
    of_commands = parser.add_subparsers()
    for command in commands:
        one = of_commands.add_parser(command, help=COMMANDS[command][1], add_help=False)
        if command in WITH_OPTIONS_OF_ITS_OWN:
            of_words = one.add_subparsers()
            for word in SECOND_WORDS[command]:
                of_word = of_words.add_parser(word, help=word, add_help=False)
                _add_paths(of_word, "path", "*")
                _add_options(of_word, options_of(command, word))
            continue
        if command == "launch":  # trainer launch ... trainer fit
            _add_paths(one, "program", "...")
            launched = one.add_subparsers().add_parser("trainer", help="a command", add_help=False)
            add_commands(launched, [other for other in COMMANDS if other != command])
        elif command in SECOND_WORDS:
            one.add_argument("word", choices=SECOND_WORDS[command])
        else:
            _add_paths(one, "path", "*")
        _add_options(one, options_of(command, ""))
    return parser


def _add_paths(parser: ArgumentParser, name: str, count: str) -> None:
    paths: Any = parser.add_argument(name, nargs=count)
    paths.complete = shtab.FILE


def _add_options(parser: ArgumentParser, options: Mapping[str, bool]) -> None:
    few = values()
    for name, takes_a_value in options.items():
        if not takes_a_value:
            parser.add_argument(name, action="store_true")
            continue
        option: Any = parser.add_argument(name, choices=few.get(name))
        if name in OR_A_PATH:
            option.complete = _or_a_path(few[name])
        elif name not in few:
            option.complete = shtab.FILE


def _or_a_path(words: Iterable[str]) -> dict[str, Any]:
    """Return what completes words and files, in shtab's form."""
    few = " ".join(words)
    return {
        "bash": "_shtab_few_or_file",  # with "_file" in its name: so a folder is completed with a slash
        "zsh": f"{{compadd {few}; _files}}",
        "fish": f"{few} {shtab.FILE['fish']}",
        "preamble": {"bash": f'_shtab_few_or_file() {{ compgen -W "{few}" -f -- "$1"; }}'},
    }


@cache
def options_of(command: str, word: str) -> dict[str, bool]:
    """Return the options of a command, or of its second word, and whether they take a value.

    They are read from the lines of the help, which also has the trainer's arguments, unlike argparse.
    """
    if command == "tune":
        text = make_parser(command, COMMANDS[command][1]).format_help() + DOTTED_HELP + arguments_help(command, 80)
    else:
        with redirect_stdout(io.StringIO()) as printed:
            main([command, *filter(None, [word]), "--help"])
        text = printed.getvalue()
    heads = [line.strip().split("  ")[0] for line in text.splitlines() if re.match(r" {2}-", line)]
    names = [pair for head in heads for pair in re.findall(r"(?:^|, )(--[a-z][\w.-]*)(,?)", head + ",")]
    found = {name: not ends for name, ends in names if not _is_example(name)}
    found |= dict.fromkeys(TUNE_OPTIONS[word] if command == "tune" else (), True)
    return {
        name: takes_a_value
        for name, takes_a_value in sorted(found.items())
        if "." in name or name.replace("_", "-") not in found.keys() - {name}
    }


def _is_example(name: str) -> bool:
    """Whether the help has an option as an example: the options of the user's classes are not known."""
    first, _, rest = name.partition(".")
    return bool(rest) and rest != "help" and (first != "--trainer" or "." in rest)


@cache
def values() -> dict[str, list[str]]:
    """Return the values of each option that takes one of a few."""
    found = {f"--trainer.{name}": list(names()) for name, names in NAMES.items()}
    for field in fields(Settings):
        choices = re.findall(r"'(\w+)'", "".join(re.findall(r"Literal\[(.*?)\]", str(field.type).replace('"', "'"))))
        if "bool" in str(field.type):
            choices += ["true", "false"]
        if choices:
            found[f"--trainer.{field.name}"] = choices
    found["--trainer.accelerator"] = list(ACCELERATORS)
    found |= {"--optimizer": optimizers(), "--lr_scheduler": schedulers(), "--preset": [*PRESETS]}
    for option, base in (("--trainer.callbacks", "Callback"), ("--trainer.logger", "Logger")):
        found |= {option: [*callbacks(base), *found.get(option, ())], f"{option}+": callbacks(base)}
    found |= {name: ["last", "best"] for name in ("--ckpt", *OR_A_PATH)}
    return found | {"--precision": [*precisions()], "--template": [*TEMPLATES], "--dtype": [*DTYPES]}
