"""Parse the options of the commands: fixed ones, and dotted ones that change any value of a configuration."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.arguments import whole_number
from trainer.cli.columns import fitted_text
from trainer.cli.main import usage_error
from trainer.config.tree import COMMAND_LINE, MAX_DEPTH, Diagnostics, Node, appended
from trainer.errors import ConfigError, TrainerError, did_you_mean
from trainer.runs.terminal import columns_of
from trainer.settings import ARGUMENTS

if TYPE_CHECKING:
    from trainer.config.loading import Recipe

ROOTS = ("trainer", "module", "data", "optimizer", "lr_scheduler")
ALIASES = {"seed": "trainer.seed", "seed_everything": "trainer.seed", "model": "module"}
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


class CommandParser(argparse.ArgumentParser):
    """The argument parser of a command: takes no abbreviations, and raises a ConfigError where argparse would exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def format_help(self) -> str:
        """Return the help, in the width of the terminal on stdout."""
        return fitted_text(super().format_help(), columns_of(sys.stdout))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See {self.prog} --help.")

    def parse_with_overrides(
        self, arguments: list[str], findings: Diagnostics
    ) -> tuple[argparse.Namespace, list[tuple[str, Node]]]:
        """Return the options, and the dotted ones as names and values; problems with these go to `findings`."""
        overrides, fixed = overrides_of(arguments, findings)
        return self.parse(fixed), overrides

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Return the options, which may have underscores for hyphens; report words that are not options."""
        given, rest = self.parse_known_args([with_hyphens(word) for word in arguments])
        if rest:
            raise ConfigError(f"{self.unknown(rest[0])} See {self.prog} --help.")
        return given

    def unknown(self, word: str, others: Iterable[str] = ()) -> str:
        """Return the problem of a word that is not an option; `others`: further options that may be meant."""
        option = word.partition("=")[0]
        kind = "unknown option" if word.startswith("-") else "unexpected"
        options = re.findall(r"(?<=[\s,])--[a-z][\w.-]*", super().format_help())
        return f"{kind} {option!r}.{did_you_mean(option, [*options, *others])}"


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


def size(text: str) -> int:
    """Return the number of an option: "80GB", "7B", "350M", "7e9", and "2GiB", whose units are powers of 1024."""
    match = re.fullmatch(r"(\d*\.?\d+(?:e\+?\d+)?)\s*([kmgbt]?)(i?)b?", text.strip().lower())
    amount, unit, binary = match.groups() if match is not None else ("0", "", "")
    number = float(amount) * (1024.0 if binary else 1000.0) ** " kmgt".index(unit.replace("b", "g") or " ")
    if not 1 <= number < 2**62:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number with its unit, such as 5GB, 2GiB, 350M or 7e9")
    return round(number)


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


def make_parser(command: str, summary: str) -> CommandParser:
    """Return the parser of the fixed options, which accepts no abbreviated options."""
    parser = CommandParser(
        prog=f"trainer {command}",
        usage=f"trainer {command} --config FILE [FILE ...] [OPTIONS]",
        description=summary[0].upper() + summary[1:] + ".",
    )
    config_option(parser, "configuration (.yaml, .json, .toml); later files are laid over the first")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration, and run nothing")
    parser.add_argument("--ckpt-path", metavar="CHECKPOINT", help="last, best, or the path of a checkpoint or a run")
    parser.add_argument("--name", metavar="NAME", help="the name of the run, which last and best look for")
    if command == "fit":
        words = "what may differ from the run that wrote the checkpoint, such as dataset or optimizers"
        parser.add_argument("--allow-changes", metavar="NAME", nargs="+", help=words)
        words = "pretrained weights to start from: a folder of save_pretrained, or a .safetensors file"
        parser.add_argument("--weights", metavar="PATH", help=words)
        words = "check a training on many processes, and start none: trainer fit --dry-run --help"
        parser.add_argument("--dry-run", action="store_true", help=words)
        parser.add_argument("--ray", metavar="NAME=VALUE", nargs="+", help=RAY_HELP)
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    return parser


def recipe_of(
    files: list[str], overrides: list[tuple[str, Node]], findings: Diagnostics, command: str = "fit"
) -> Recipe:
    """Read files and command line, and check them.

    Raises:
        ConfigError: lists the problems of names, before torch is imported; else of classes and values.
    """
    from trainer.config.read import read

    tree = read(files, overrides, findings)
    from trainer.config.loading import load

    return load(tree, findings, command)


def overrides_of(arguments: list[str], findings: Diagnostics) -> tuple[list[tuple[str, Node]], list[str]]:
    """Return the dotted options of a command line as names and values, and all other words."""
    fixed: list[str] = []
    overrides = []
    for option, name, value in _split(arguments, fixed):
        name = with_underscores(ALIASES.get(name, name))
        if value is None:
            findings.add(COMMAND_LINE, f"{option} needs a value: {option} VALUE.")
        elif not all(name.split(".")) or name.count(".") > MAX_DEPTH:
            findings.add(COMMAND_LINE, f"{option[:60]} is not a name: write --trainer.max_epochs.")
        else:
            from trainer.config.files import read_value

            node = read_value(value, option)
            overrides.append((name.removesuffix("+"), appended(node) if name.endswith("+") else node))
    return overrides, fixed


def with_hyphens(word: str) -> str:
    """Return an option with hyphens, `--ckpt-path` for `--ckpt_path`; anything else unchanged."""
    option, equals, value = word.partition("=")
    return f"{option.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def with_underscores(name: str) -> str:
    """Return a dotted name with the underscores of Python's names: `trainer.max_epochs` for `trainer.max-epochs`.

    Deeper names may be keys of a user's mapping, which are left alone.
    """
    parts = name.split(".")
    deep = 4 if parts[0] == "trainer" else 2
    return ".".join([part.replace("-", "_") for part in parts[:deep]] + parts[deep:])


def parse(parser: CommandParser, arguments: list[str], findings: Diagnostics) -> argparse.Namespace:
    """Return the options of a command line; problems go to `findings`.

    Added to the parser's options are `overrides`, dotted names and values, among which are `--ckpt-path` and the like;
    and `help_of`: "module" or "data" to show the arguments of that class.
    """
    from trainer.config.files import as_node

    helps = {f"--{root}.help": root for root in ("module", "data")}
    overrides, fixed = overrides_of([word for word in arguments if word not in helps], findings)
    try:
        options, rest = parser.parse_known_args([with_hyphens(word) for word in fixed])
    except ConfigError as error:
        findings.add(COMMAND_LINE, str(error))
        options, rest = parser.parse_known_args([])
    given = vars(options)
    options.overrides = overrides
    for name in ("ckpt_path", "name", "weights", "allow_changes"):
        if given.get(name) is not None:
            overrides.append((name, as_node(given[name], COMMAND_LINE)))
    options.help_of = next((helps[word] for word in arguments if word in helps), None)
    words, options.ray = given.get("ray"), None
    if words is not None:
        from trainer.cli.ray import read_ray

        options.ray = read_ray(words, findings)
    for problem in _unknown(parser, rest):
        findings.add(COMMAND_LINE, problem)
    return options


def _split(arguments: list[str], fixed: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield the overrides as (option, name, value or None); all other words go to `fixed`."""
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        option, equals, value = argument.partition("=")
        name = option.removeprefix("--")
        dotted = "." in name or name in ALIASES or name.replace("-", "_") in ROOTS
        if not option.startswith("--") or not dotted:
            fixed.append(argument)
        elif equals:
            yield option, name, value
        elif waiting and not waiting[0].startswith("--"):
            yield option, name, waiting.pop(0)
        else:
            yield option, name, None


def _unknown(parser: CommandParser, rest: list[str]) -> Iterator[str]:
    """Yield a problem for each unknown option, together with its value, and for each stray word."""
    after_option = False
    for word in rest:
        if word.startswith("-"):
            known = [f"--trainer.{name}" for name in ARGUMENTS]
            yield f"{parser.unknown(word, known)} Those of the module are written --module.NAME."
        elif not after_option:
            yield f"unexpected {word!r}. Write --config {word}, or --NAME VALUE."
        after_option = word.startswith("-") and "=" not in word
