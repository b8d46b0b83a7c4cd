"""Run one command: only the module of that command is imported, and nothing in this file imports torch."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO, cast

import trainer

COMMANDS = {
    "fit": ("trainer.cli.fit", "train a module"),
    "validate": ("trainer.cli.validate", "run the validation of a module"),
    "test": ("trainer.cli.test", "run the test of a module"),
    "predict": ("trainer.cli.predict", "write a module's predictions"),
    "estimate": (
        "trainer.cli.estimate.command",
        "say how much memory a training will need on each process, for every strategy, or which layouts fit",
    ),
    "tune": ("trainer.cli.tune.command", "find settings: tune lr, tune batch-size, tune throughput"),
    "config": (
        "trainer.cli.config.command",
        "write a configuration: by questions, a preset, or from Accelerate's or DeepSpeed's",
    ),
    "init": ("trainer.cli.init", "begin a project from a template: digits, gpt, bert, vit, causal-lm, gan, ..."),
    "launch": ("trainer.cli.launch", "start a script, a module or a command on several devices or machines"),
    "env": ("trainer.cli.env", "show how this process was started, versions and devices"),
    "doctor": (
        "trainer.cli.doctor.command",
        "try what a training needs on this machine, and say what is wrong and how to fix it",
    ),
    "checkpoint": ("trainer.cli.checkpoint.command", "look into checkpoints: ls, show, verify, export, import"),
    "runs": (
        "trainer.cli.runs.command",
        "list runs below a folder: state, steps, metrics, hyperparameters that differ",
    ),
    "plot": ("trainer.cli.plot", "draw the logged curves of runs: PNG, SVG, PDF or HTML"),
    "migrate": ("trainer.cli.migrate.command", "rewrite a project of Lightning's to this package"),
    "run-as-lightning": ("trainer.cli.run_as_lightning", "run a program that was written for Lightning, unchanged"),
    "schema": ("trainer.cli.schema", "print a JSON schema of configurations, for editors"),
    "completion": ("trainer.cli.completion", "print a script that completes commands and options: bash, zsh, fish"),
    "help": ("trainer.cli.help", "show a command's help, or the arguments of a class: trainer help ModelCheckpoint"),
}
"""Name: the module with its `run(arguments)`, which returns the exit code, and a summary."""

USAGE = """\
usage: trainer COMMAND [OPTIONS]

Train PyTorch modules from a configuration file.

commands:
{commands}

options:
  -h, --help            show this help, or that of a command: trainer fit --help
  --version             show the version

examples:
  trainer init --template digits my_digits
  trainer fit --config run.yaml --trainer.max_epochs 3
  trainer validate --config runs/version_0/config.yaml --ckpt-path best

exit codes: 0 done, 1 error, 2 wrong configuration or usage,
            75 stopped before a deadline or by SIGUSR1, 130 by Ctrl-C, 143 by SIGTERM,
            141 the reader of the output has gone
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 error, 2 wrong usage or configuration, 130 interrupted.

    Args:
        arguments: the command line without the program's name; default: `sys.argv[1:]`.
    """
    _prepare_streams()
    before, output = sys.stdout, _Output(sys.stdout)
    sys.stdout = cast(TextIO, output)
    end: SystemExit | None = None
    code = 0
    try:
        try:
            code = dispatch(list(sys.argv[1:] if arguments is None else arguments))
        except SystemExit as stopped:  # after --help, or a signal
            end = stopped
        sys.stdout.flush()
    except KeyboardInterrupt:
        return interrupted()
    except OSError as error:
        if error is not output.error:
            raise
        code = code or 141
    finally:
        sys.stdout = before
    if output.error is not None:
        _drop_output()
        if not isinstance(output.error, BrokenPipeError):  # whose reader, such as `head`, has seen enough
            print(f"error: the output could not be written: {output.error.strerror}", file=sys.stderr)
            code = 1 if code in (0, 141) else code
    if end is not None and end.code:
        raise end
    return code


def interrupted() -> int:
    """Say, once for all processes of a machine, that Ctrl-C has ended the command. Returns the exit code."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("interrupted", file=sys.stderr)
    return 130


class _Output:
    """A stream that remembers an error in writing to it, which a progress bar or argparse passes over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """The latest error."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _drop_output() -> None:
    """Let what is still to be printed go nowhere: Python would fail again when it flushes stdout at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _prepare_streams() -> None:
    """Let output go nowhere where the caller has closed it, as `>&-` does: Python has no stream there then.

    Print `\\xe4` for a character that the encoding of stdout has not, as Python does on stderr.
    """
    for name in ("stdout", "stderr"):
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def dispatch(arguments: list[str]) -> int:
    """Run the command that the arguments name. Returns the exit code."""
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help", ""):
        commands = "\n".join(f"  {name:<22}{summary}" for name, (_, summary) in COMMANDS.items())
        from trainer.cli.columns import print_fitted

        print_fitted(USAGE.format(commands=commands), sys.stdout if first else sys.stderr)
        return 0 if first else 2
    if first in ("--version", "-V", "version"):
        print(f"trainer {trainer.__version__}")
        return 0
    if first not in COMMANDS:
        from trainer.errors import did_you_mean

        close = did_you_mean(first, COMMANDS)
        return usage_error(f"unknown command {first!r}.{close} Commands: {', '.join(COMMANDS)}.")
    run = importlib.import_module(COMMANDS[first][0]).run
    code: int = run(arguments[1:])
    return code


def in_colour(stream: TextIO) -> bool:
    """Whether to colour what is printed: on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def usage_error(message: str) -> int:
    """Print an error, once for all processes of a machine (a file may be missing on one of several machines).

    A line that a long word of the user has made too long is shortened. Returns the exit code of usage errors.
    """
    from trainer.errors import printable, shortened

    if os.environ.get("LOCAL_RANK", "0") == "0" or "RANK" not in os.environ:
        begin = "\033[1;31merror:\033[0m" if in_colour(sys.stderr) else "error:"
        lines = map(shortened, printable(message).split("\n"))
        print(begin, "\n".join(lines), file=sys.stderr)
    return 2
