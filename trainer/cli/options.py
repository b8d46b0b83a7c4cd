"""Parse the options of the commands: fixed ones, and dotted ones that change any value of a configuration."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.arguments import whole_number
from trainer.cli.columns import fitted_text
from trainer.cli.main import usage_error
from trainer.config.tree import COMMAND_LINE, Diagnostics, Node, appended
from trainer.errors import ConfigError, TrainerError, did_you_mean
from trainer.names.misses import words_for
from trainer.runs.terminal import columns_of
from trainer.settings import ARGUMENTS

if TYPE_CHECKING:
    from trainer.cli.ray import RayOptions

ROOTS = ("trainer", "module", "data", "optimizer", "lr_scheduler")
ALIASES = {"seed": "trainer.seed"}
DRY_RUN = ("world_size", "nproc_per_node", "device_memory", "no_data", "json")
"""Options of `fit --dry-run` alone."""
RAY_HELP = (
    "train in Ray's workers: num_workers=2 max_failures=1; also use_gpu=true, resources_per_worker='{CPU: 4}', "
    "storage_path=/shared/runs, address=auto"
)

DOTTED_HELP = """\
any value of the configuration (read as YAML; laid over the files):
  --trainer.devices 2                 an argument of the trainer; see below
  --module.lr 0.1                     an argument of the module's class
  --data.batch_size 64                an argument of the data's class
  --module NAME, --data NAME          another class: package.module.Class or file.py:Class
  --trainer.strategy ddp              another strategy; its arguments are --trainer.strategy.NAME
  --trainer.callbacks.0.patience 5    an argument of the first callback in the file
  --trainer.callbacks+=NAME           one more callback; without the +, the file's list is replaced
  --module.lr '${data.lr}'            the value of another place; '${env:NAME}' of an environment variable
  --optimizer torch.optim.AdamW       for modules without configure_optimizers; its arguments: --optimizer.lr 0.1
  --lr_scheduler StepLR               the scheduler of that optimizer; its arguments: --lr_scheduler.step_size 3
  --seed 3                            short for --trainer.seed 3
  --module.help, --data.help          the arguments of the class; of others: trainer help NAME
"""


@dataclass
class Options:
    """A parsed command line."""

    config: list[str] = field(default_factory=list)
    print_config: bool = False
    traceback: bool = False
    """Errors are shown with their traceback."""
    help_of: str | None = None
    """"module" or "data": show the arguments of that class, and run nothing."""
    overrides: list[tuple[str, Node]] = field(default_factory=list)
    """Dotted names and values; `--ckpt-path` is one of them."""
    ray: RayOptions | None = None
    """Options of `fit --ray`: train in Ray's workers."""


class CommandParser(argparse.ArgumentParser):
    """The argument parser of a command: takes no abbreviations, and raises a ConfigError where argparse would exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def format_help(self) -> str:
        """Return the help, in the width of the terminal on stdout."""
        return fitted_text(super().format_help(), columns_of(sys.stdout))

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"(--[\w-]+)/--\w+", r"\1", message)  # not its spelling with underscores, too
        if choice := re.fullmatch(r"argument (\S+): (invalid choice: '(.*)') \(choose from (.*)\)", message):
            known = [word.strip(" '") for word in choice[4].split(",")]
            hint = did_you_mean(choice[3], known)
            message = f"{choice[1]}: {choice[2]}.{hint} Known: {', '.join(known)}."
        elif number := re.fullmatch(r"(argument \S+): invalid (?:int|float) value: (.*)", message):
            message = f"{number[1]}: {number[2]}: give a number"
        elif missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
            one_of = (
                f" (one of {', '.join(name for action in commands for name in action.choices)})" if commands else ""
            )
            is_are = "are" if ", " in missing[1] else "is"
            message = f"{missing[1]}{one_of} {is_are} missing. For example: {self._example()}"
        raise ConfigError(message)

    def _example(self) -> str:
        """Return the first of the examples in the help, without what is said beside it."""
        lines = [line.strip() for line in (self.epilog or "").splitlines()]
        return next(re.split(" {2,}", line)[0] for line in lines if line.startswith(f"{self.prog} "))

    def parse_with_overrides(
        self, arguments: list[str], findings: Diagnostics
    ) -> tuple[argparse.Namespace, list[tuple[str, Node]]]:
        """Return the options, and the dotted ones as names and values; problems with these go to `findings`."""
        if "-h" in arguments or "--help" in arguments:
            return self.parse_args(["--help"]), []  # prints it and exits
        known = {option for action in self._actions for option in action.option_strings}
        overrides, fixed = overrides_of(arguments, findings, known)
        return self.parse(fixed), overrides

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return the options, which may have underscores for hyphens; report words that are not options."""
        commands = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        parsers = [self, *(one for command in commands for one in command.choices.values())]
        known = {option for one in parsers for action in one._actions for option in action.option_strings}
        given, rest = self.parse_known_args([with_hyphens(word, known) for word in arguments])
        if rest:
            parser: argparse.ArgumentParser = self
            for command in commands:
                parser = command.choices[getattr(given, command.dest)]
            options = [option for action in parser._actions for option in action.option_strings]
            word = rest[0].partition("=")[0]
            problem = f"unknown option {word!r}.{did_you_mean(word, options)}"
            if not word.startswith("-"):
                number = "--params" in options and re.fullmatch(r"[\d.]+(e\d+|[KMBT])?", word, re.IGNORECASE)
                problem = f"unexpected {rest[0]!r}.{f' Write --params {word}.' if number else ''}"
            raise ConfigError(f"{problem} See {parser.prog} --help.")
        return given


def config_option(container: argparse._ActionsContainer, help: str) -> None:
    """Add `--config FILE [FILE ...]`, and `-c`."""
    container.add_argument("-c", "--config", metavar="FILE", nargs="+", action="extend", default=[], help=help)


def whole(text: str, least: int = 0) -> int:
    """Return the number of an option, from 0."""
    number = whole_number(text)
    if number is None or number < least:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from {least}")
    return number


def positive(text: str) -> int:
    """Return the number of an option, from 1."""
    return whole(text, 1)


def quantity(thousand: int, words: str = "give a number such as 80G, 7e9 or 32k") -> Callable[[str], int]:
    """Return a parser of numbers such as `80G`, `7e9`, `7B` and `32k`, whose k is a `thousand`; `words`: its error."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9._]+(?:[eE]\+?\d+)?)\s*([kKmMbBgGtT]?)[bB]?", text)
        number = 0.0
        if match is not None:
            power = " kmgt".index(match[2].lower().replace("b", "g") or " ")
            with suppress(ValueError, OverflowError):
                number = float(match[1]) * float(thousand**power)
        if not 1 <= number < 1e18:
            raise argparse.ArgumentTypeError(f"{text!r}: {words}")
        return round(number)

    return parse


def byte_count(text: str, option: str, needs_unit: bool = False) -> int:
    """Return the bytes of a size such as "8GB", "1.5 MiB", "3k" or, without a unit, "100".

    Args:
        option: the option, for the error.
        needs_unit: refuse a number without a unit.

    Raises:
        ConfigError: the text is no such size.
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(?:([kmgt])(i?))?(b?)", text.strip(), re.IGNORECASE)
    size = 0.0
    if match is not None and (match[2] or match[4] or not needs_unit):
        thousand = 1024.0 if match[3] else 1000.0
        size = float(match[1]) * thousand ** " kmgt".index((match[2] or " ").lower())
    if not 1 <= size < 2**62:
        number = "a number and a unit" if needs_unit else "a size"
        raise ConfigError(f"{option} {text}: give {number}, such as 5GB, 500MB or 2GiB.")
    return int(size)


def reports_errors(run: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Let a command return an exit code in place of an error: 2 after a ConfigError, 1 after another TrainerError."""

    @wraps(run)
    def command(arguments: list[str]) -> int:
        try:
            return run(arguments)
        except SystemExit as end:  # argparse exits after --help
            return int(end.code or 0)
        except TrainerError as error:
            code = usage_error(str(error))
            return code if isinstance(error, ConfigError) else 1

    return command


def make_parser(command: str, summary: str) -> argparse.ArgumentParser:
    """Return the parser of the fixed options, which accepts no abbreviated options."""
    parser = CommandParser(
        prog=f"trainer {command}",
        usage=f"trainer {command} --config FILE [FILE ...] [OPTIONS]",
        description=summary[0].upper() + summary[1:] + ".",
    )
    config_option(parser, "configuration (.yaml, .json, .toml); later files are laid over the first")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration, and run nothing")
    parser.add_argument("--ckpt-path", metavar="CHECKPOINT", help="last, best, or the path of a checkpoint or a run")
    parser.add_argument("--name", metavar="NAME", help="the name of the run, by which last and best find it again")
    if command == "fit":
        words = "what may differ from the run that wrote the checkpoint, such as dataset or optimizers"
        parser.add_argument("--allow-changes", metavar="NAME", nargs="+", help=words)
        words = "pretrained weights to start from: a folder of save_pretrained, or a .safetensors file"
        parser.add_argument("--weights", metavar="PATH", help=words)
        words = "check a training on many processes, and start none: trainer fit --dry-run --help"
        parser.add_argument("--dry-run", action="store_true", help=words)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.set_defaults(ray=None)
    if command == "fit":
        parser.add_argument("--ray", metavar="NAME=VALUE", nargs="+", help=RAY_HELP)
    return parser


def overrides_of(
    arguments: list[str], findings: Diagnostics, own: Collection[str] = ()
) -> tuple[list[tuple[str, Node]], list[str]]:
    """Return the dotted options of a command line as names and values, and all other words.

    Args:
        own: options of the command itself, which have the name of a part of a configuration.
    """
    from trainer.config.files import MAX_DEPTH, read_value

    fixed: list[str] = []
    overrides = []
    for option, name, value in _split(arguments, fixed, own):
        name = with_underscores(ALIASES.get(name, name))
        if value is None:
            findings.add(COMMAND_LINE, _without_value(option))
        elif not all(name.split(".")):
            findings.add(
                COMMAND_LINE, f"{option} is not a name: write --trainer.max_epochs, with one dot between names."
            )
        elif name.count(".") > MAX_DEPTH:
            findings.add(COMMAND_LINE, f"{option[:60]}... has more than {MAX_DEPTH} names, one inside of another.")
        else:
            node = read_value(value, option)
            if name.endswith("+") and isinstance(node.value, list) and not name.startswith("trainer."):
                _note_elements(option, value, node, findings)
            overrides.append((name.removesuffix("+"), appended(node) if name.endswith("+") else node))
    return overrides, fixed


def _note_elements(option: str, typed: str, node: Node, findings: Diagnostics) -> None:
    """Note which texts are added to a list by a text that YAML reads as a list, as it does `[MASK]`."""
    items = node.plain()
    if all(isinstance(item, str) for item in items):
        whole = shlex.quote(f"{option}={json.dumps([typed])}")
        findings.notes.append(
            f"{option}={typed} is a list, whose elements are added: {', '.join(map(repr, items)) or 'none'}. To add "
            f"the text itself, write {whole}."
        )


def _without_value(option: str) -> str:
    if option.endswith(".help"):
        of_trainer = "those of Trainer are listed by trainer fit --help"
        return f"{option}: {of_trainer}, those of a class by its name: trainer help ModelCheckpoint, fsdp, AdamW."
    return f"{option} needs a value: {option} VALUE."


def with_hyphens(word: str, known: Collection[str]) -> str:
    """Return a known option with hyphens, `--ckpt-path` for `--ckpt_path`; anything else as it is."""
    option, equals, value = word.partition("=")
    option = option.replace("_", "-")
    return f"{option}{equals}{value}" if option in known else word


def with_underscores(name: str) -> str:
    """Return a dotted name with the underscores of Python's names: `trainer.max_epochs` for `trainer.max-epochs`.

    Deeper names may be keys of a user's mapping, which are left alone.
    """
    parts = name.split(".")
    deep = 4 if parts[0] == "trainer" else 2
    return ".".join([part.replace("-", "_") for part in parts[:deep]] + parts[deep:])


def is_assignment(word: str) -> bool:
    """Whether a word is `trainer.max_epochs=3`, as other programs' command lines have it."""
    name, equals, _ = word.partition("=")
    return bool(equals) and name.partition(".")[0] in ROOTS


def parse(parser: argparse.ArgumentParser, arguments: list[str], findings: Diagnostics) -> Options:
    """Parse a command line; problems go to `findings`."""
    from trainer.config.files import as_node

    options, own = Options(), {option for action in parser._actions for option in action.option_strings}
    helps = {f"--{root}.help": root for root in ("module", "data")}
    options.help_of = next((helps[word] for word in arguments if word in helps), None)
    options.overrides, fixed = overrides_of([word for word in arguments if word not in helps], findings)
    try:
        known, rest = parser.parse_known_args([with_hyphens(word, own) for word in fixed])
    except ConfigError as error:
        findings.add(COMMAND_LINE, f"{str(error).removesuffix('.')}.")
        return options
    options.config = [word for word in known.config if not is_assignment(word)]
    options.print_config, options.traceback = known.print_config, known.traceback
    rest += [word for word in known.config if is_assignment(word)]
    for name in ("ckpt_path", "name", "weights", "allow_changes"):
        if (value := getattr(known, name, None)) is not None:
            options.overrides.append((name, as_node(value, COMMAND_LINE)))
    if known.ray is not None:
        from trainer.cli.ray import read_ray

        options.ray = read_ray(known.ray, findings)
    for problem in _unknown(rest, own):
        findings.add(COMMAND_LINE, problem)
    return options


def _split(arguments: list[str], fixed: list[str], own: Collection[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the overrides as (option, name, value or None); all other words go to `fixed`."""
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--")
        root = name.replace("-", "_") in ROOTS
        dotted = "." in name or name in ALIASES or (root and option not in own)
        if not option.startswith("--") or not dotted:
            fixed.append(argument)
        elif equals:
            yield option, name, value
        elif waiting and not waiting[0].startswith("--"):
            yield option, name, waiting.pop(0)
        else:
            yield option, name, None


def _unknown(rest: list[str], own: Collection[str]) -> Iterator[str]:
    """Yield a problem for each unknown option, together with its value, and for each stray word."""
    known = {name: f"--trainer.{name}" for name in ARGUMENTS}
    known.update({name.lstrip("-"): f"--{name.lstrip('-')}" for name in (*own, *ROOTS, *ALIASES) if len(name) > 2})
    known["seed_everything"] = "--seed"
    after_option = False
    for word in rest:
        option = word.partition("=")[0]
        if word.startswith("-"):
            close = get_close_matches(option.lstrip("-"), known, n=1)
            name = option.lstrip("-").replace("-", "_")
            hint = (
                f"Did you mean {known[close[0]]}?"
                if close
                else f"An argument of the module is written --module.{name}, of the data --data.{name}."
            )
            if name in DRY_RUN:
                hint = f"It goes with --dry-run: trainer fit --config FILE --dry-run {option} VALUE."
            if (words := words_for("Trainer()", [name])) and name not in ARGUMENTS:
                hint = f"Use {words[name]} of the trainer: --trainer.NAME VALUE."
            yield f"unknown option {option!r}. {hint}"
        elif not after_option:
            is_file = word.endswith((".yaml", ".yml", ".json", ".toml"))
            hint = f"Write --config {word}." if is_file else "Options begin with --."
            if is_assignment(word):
                hint = "Write --" + word.replace("=", " ", 1) + "."
            yield f"unexpected {word!r}. {hint}"
        after_option = word.startswith("-") and "=" not in word
