"""Run fit, validate, test or predict: read the command line, check, build, run, report errors."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.cli.collisions import collisions
from trainer.cli.columns import help_width, in_columns, print_fitted
from trainer.cli.main import COMMANDS, usage_error
from trainer.cli.options import DOTTED_HELP, make_parser, parse, recipe_of
from trainer.cli.settings_help import arguments_help
from trainer.config.tree import Diagnostics, relative
from trainer.errors import ConfigError, MissingPackageError, TrainerError, printable
from trainer.launchers.restarts import LAUNCHED

if TYPE_CHECKING:
    from trainer.config.loading import Recipe
    from trainer.data.datamodule import DataModule
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

_NOTED = "TRAINER_NOTED"
"""Environment variable: the process id of the command that has printed its notes before it starts others."""


@dataclass(frozen=True)
class Job:
    """The objects of a command, all built."""

    trainer: Trainer
    module: TrainModule
    data: DataModule | None
    ckpt_path: str | None
    allow_changes: list[str]
    weights: str | None


Act = Callable[[Job], None]
Reader = Callable[..., "Recipe"]


def run_command(command: str, arguments: list[str], examples: str, act: Act, read: Reader = recipe_of) -> int:
    """Run a command. Returns the exit code.

    Args:
        examples: text for `--help`.
        act: function that runs the job and prints the result.
        read: function that reads the configuration, as `recipe_of`; another one has defaults for what is not given.
    """
    parser = make_parser(command, COMMANDS[command][1])
    if "-h" in arguments or "--help" in arguments:
        print(parser.format_help())
        print_fitted(f"{DOTTED_HELP}\n{arguments_help(command, help_width())}\nexamples:\n{examples}")
        return 0

    findings = Diagnostics()
    options = parse(parser, arguments, findings)
    try:
        if options.help_of is not None:
            from trainer.config.read import merged

            findings.report()
            tree = merged(options.config, options.overrides, findings)
            from trainer.cli.class_help import class_help
            from trainer.config.loading import chosen_class

            chosen = chosen_class(tree, options.help_of)
            print_fitted(class_help(chosen, options.help_of, help_width()))
            return 0
        configuration = _load(command, options, findings, read)
        if options.print_config:
            from trainer.config.files import yaml_for

            print(yaml_for(sys.stdout.encoding or "utf-8", configuration.resolved), end="")
            return 0
        if options.ray is not None:
            from trainer.cli.ray import fit_on_ray

            return fit_on_ray(options.ray, configuration)
        if command == "predict":
            from trainer.callbacks.prediction_writer import PredictionWriter

            configuration.add_callback(PredictionWriter)
        from trainer.config.chosen_run import choose_run
        from trainer.config.from_checkpoint import take_hyperparameters

        for line in choose_run(configuration, options.config, command):
            _print_note(line)
        if command != "fit":
            for line in take_hyperparameters(configuration):
                _print_note(line)
        trainer, module, data = configuration.build()
    except (ConfigError, MissingPackageError) as error:
        return _with_traceback(error, 2) if options.traceback else usage_error(str(error))
    if command in ("validate", "test", "predict") and configuration.ckpt_path is None:
        note = "no --ckpt-path was given: the weights are those that the module begins with, not trained ones"
        _print_note(f"{note} (--ckpt-path best, last, or a path).")
    start = configuration.ckpt_path, configuration.allow_changes, configuration.weights
    return _run(act, Job(trainer, module, data, *start), options.traceback)


def _load(command: str, options: argparse.Namespace, findings: Diagnostics, read: Reader) -> Recipe:
    if read is recipe_of and not (options.config or options.overrides or findings.problems):
        raise ConfigError(f"nothing to {command}: give --config run.yaml, or --module file.py:Class.")
    configuration = read(options.config, options.overrides, findings, command)
    for note in [*collisions(), *configuration.notes]:
        _print_note(note)
    return configuration


def _print_note(note: str) -> None:
    """Print a note, once for all processes of a job: by rank 0, or by the process that starts them from here."""
    if "RANK" not in os.environ:
        os.environ[_NOTED] = str(os.getpid())
    elif os.environ["RANK"] != "0" or os.environ.get(_NOTED, "") == os.environ.get(LAUNCHED):
        return
    print(f"note: {printable(note)}", file=sys.stderr)


def _run(act: Act, job: Job, traced: bool) -> int:
    """Run a job. Errors that name their fix are printed without a traceback; all others propagate."""
    try:
        act(job)
    except TrainerError as error:
        if job.trainer.world_size > 1:
            raise  # the launcher finds the process that failed first
        code = 2 if isinstance(error, ConfigError) else 1
        if traced:
            return _with_traceback(error, code)
        from trainer.config.classes import user_frame

        where = user_frame(error)
        usage_error(f"{error}{f' ({where})' if where else ''}")
        return code
    return 0


def _with_traceback(error: Exception, code: int) -> int:
    """Print an error with its traceback. Returns the exit code that it has without one, too."""
    traceback.print_exception(error)
    return code


def print_results(job: Job, title: str, results: list[dict[str, float]]) -> None:
    """Print the values of an evaluation, and the run directory into which its loggers have written."""
    trainer = job.trainer
    where = f"\nrun directory:  {relative(trainer.run_dir)}" if trainer.loggers and trainer.run_dir.is_dir() else ""
    trainer.print(f"{title}:\n{table(results)}{where}")


def table(results: list[dict[str, float]]) -> str:
    """Return the values of all loaders as lines of name and value."""
    rows = [(name, f"{value:.6g}") for name, value in {k: v for one in results for k, v in one.items()}.items()]
    return "\n".join(f"  {line}" for line in in_columns(rows, right=[]))
