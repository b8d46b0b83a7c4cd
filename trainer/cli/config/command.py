"""`trainer config`: write a configuration from a few answers, a preset, or another program's file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.arguments import local_path
from trainer.checkpoint.disk import atomic_file
from trainer.cli.columns import print_fitted
from trainer.cli.config.draft import ConfigDraft, launch_line
from trainer.cli.config.wizard import PRESETS, ask_all
from trainer.cli.options import CommandParser, reports_errors
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.cli.config.translation import Translation

EXAMPLES = """\
examples:
  trainer config                                  a few questions; writes run.yaml
  trainer config --preset fsdp --output fsdp.yaml
  trainer config --preset bf16 --output -         to the terminal, to no file
  trainer config --from ~/.cache/huggingface/accelerate/default_config.yaml
  trainer config --from ds_config.json --output zero.yaml
  trainer fit --config module.yaml run.yaml       module.yaml says what to train, run.yaml where and how
"""
PRESET_LINES = [f"{name:<15}{words}" for name, (words, _) in PRESETS.items()]


@reports_errors
def run(arguments: list[str]) -> int:
    """Write a configuration. Returns the exit code: 2 when nothing was written, 130 after Ctrl-C."""
    try:
        return _write(_parser().parse(arguments))
    except KeyboardInterrupt:
        print("\nnothing was written", file=sys.stderr)
        return 130


def _parser() -> CommandParser:
    presets = "".join(f"  {line}\n" for line in PRESET_LINES)
    parser = CommandParser(
        prog="trainer config",
        usage="trainer config [--preset NAME | --from FILE] [--output FILE] [--force]",
        description="Write a commented configuration for trainer fit. Without --preset and --from it asks.",
        epilog=f"presets:\n{presets}\n{EXAMPLES}",
    )
    given = parser.add_mutually_exclusive_group()
    words = "answers that are given in advance, see below"
    given.add_argument("--preset", metavar="NAME", choices=PRESETS, help=words)
    words = "translate an Accelerate configuration or a DeepSpeed JSON, and say what became of every key"
    given.add_argument("--from", dest="source", metavar="FILE", help=words)
    parser.add_argument("-o", "--output", metavar="FILE", default="run.yaml", help="default: run.yaml; -: the terminal")
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument("--list", action="store_true", help="list the presets, write nothing")
    return parser


def _write(options: argparse.Namespace) -> int:
    if options.list:
        print_fitted("".join(f"{line}\n" for line in PRESET_LINES))
        return 0
    _check_options(options)
    file = "run.yaml" if options.output == "-" else options.output
    if options.source is not None:
        report = translate(options.source)
        by = f"From {options.source}, by `trainer config --from {shlex.quote(options.source)}`."
        _write_output(report.draft.text([by, *_usage_lines(report.start(_fit_command(file)))]), options)
        print(report.text(file), end="", file=sys.stderr if options.output == "-" else sys.stdout)
        return 0
    if options.preset is not None:
        draft, by = ConfigDraft(), f"`trainer config --preset {options.preset}`"
        draft.add(PRESETS[options.preset][1])
    else:
        draft, by = ask_all(), "`trainer config`"
    start = launch_line(_fit_command(file), draft.settings.get("num_nodes", 1), draft.settings.get("devices"))
    _write_output(draft.text([f"Written by {by}: where and how to train.", *_usage_lines(start)]), options)
    if options.output != "-":
        print(f"\nwritten: {options.output}\n{_next_steps(draft.settings, start, _fit_command(file))}")
    return 0


def translate(name: str) -> Translation:
    """Translate another program's file, and account for each of its keys.

    Raises:
        ConfigError: the file cannot be read, or has no known format.
    """
    from trainer.cli.config.from_accelerate import from_accelerate
    from trainer.cli.config.from_deepspeed import from_deepspeed
    from trainer.cli.config.translation import Translation, read_plain
    from trainer.config.files import TRANSLATED

    path = local_path(name)
    given, kind = read_plain(path)
    if kind is None or kind not in TRANSLATED:
        raise ConfigError(f"{name} is not an Accelerate (distributed_type) or DeepSpeed (zero_optimization) file.")
    translation = Translation(path, kind)
    (from_deepspeed if "DeepSpeed" in kind else from_accelerate)(translation, given)
    return translation


def _check_options(options: argparse.Namespace) -> None:
    """Raise a ConfigError for wrong options, before the first question."""
    if options.source is not None:
        translate(options.source)  # a wrong source is reported before a file that exists
    elif options.output == "-" and options.preset is None:
        raise ConfigError("--output - goes with --preset or --from: questions need the terminal for themselves.")
    path = local_path(options.output)
    if options.output != "-" and path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError(f"--output {options.output}: YAML is written; give a name that ends with .yaml.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output {options.output}: there is no folder {path.parent}.")
    if path.exists() and not options.force:
        raise ConfigError(f"{options.output} exists: give another name with --output, or --force to replace it.")


def _fit_command(file: str) -> str:
    return f"trainer fit --config module.yaml {shlex.quote(file)}"


def _usage_lines(start: str) -> list[str]:
    several = ["The same on each machine, with the name of the first one as HOST:", ""] if "HOST" in start else []
    words = "Put the model and its data into another file (module.yaml), or into this one, as module and data."
    return [words, *several, "", f"    {start}"]


def _next_steps(settings: Mapping[str, Any], start: str, fit: str) -> str:
    if settings.get("accelerator") == "tpu":  # the one program for all its cores can be tried there only
        return f"use it with: {start}\ntry it there:  {fit.replace(' fit ', ' doctor ', 1)}"
    number = "" if isinstance(settings.get("devices"), int) else f" --world-size {8 * settings.get('num_nodes', 1)}"
    return f"use it with: {start}\ncheck it with: {fit} --dry-run{number}"


def _write_output(text: str, options: argparse.Namespace) -> None:
    if options.output == "-":
        print(text, end="")
        return

    try:
        with atomic_file(local_path(options.output).absolute()) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.output} cannot be written: {error.strerror}.") from error
