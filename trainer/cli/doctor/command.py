"""`trainer doctor`: check what a training needs on this machine, and say how to fix what is wrong."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from trainer.arguments import local_path
from trainer.cli.columns import print_fitted
from trainer.cli.doctor.results import CheckResult, as_json, failed, summary
from trainer.cli.main import COMMANDS
from trainer.cli.options import CommandParser, config_option, positive, recipe_of, reports_errors
from trainer.config.tree import Diagnostics, Node
from trainer.settings import Settings

if TYPE_CHECKING:
    from trainer.config.loading import Recipe

EXAMPLES = """\
examples:
  trainer doctor                                          this machine
  trainer doctor --config run.yaml                        and one step of the module, as the configuration says
  trainer doctor --config run.yaml --trainer.devices 1    its values can be changed as in trainer fit
  trainer doctor --devices 8                              collectives between eight processes
  torchrun --nnodes 2 --nproc-per-node 8 ... -m trainer doctor    between all processes of two machines
  trainer doctor --json                                   for programs
"""
ONE_STEP = ("fast_dev_run=true", "detect_anomaly=true", "overfit_batches=0", "max_restarts=0")


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the results. Returns the exit code: 1 when a check failed, 2 for a wrong configuration."""
    from trainer.distributed.environment import detect_environment

    results, output = [], sys.stdout
    findings, configuration = Diagnostics(), None
    given, overrides = _parser().parse_with_overrides(arguments, findings)
    with redirect_stdout(sys.stderr):  # whatever the user's files print: stdout has nothing but the results
        if given.config or overrides:
            configuration = recipe_of(given.config, overrides, findings)
        findings.report()
        environment = detect_environment()
        for result in _checks(given, overrides, configuration, environment.local_rank == 0):
            results.append(result)
            if not given.json and (environment.rank == 0 or result.status != "OK"):
                of_rank = f"rank {environment.rank}: " if environment.rank else ""
                print_fitted(f"{of_rank}{result.line()}\n", output)
    if environment.rank == 0:
        print(as_json(results) if given.json else f"\n{summary(results)}", flush=True)
    return int(failed(results))


def _parser() -> CommandParser:
    summary = COMMANDS["doctor"][1]
    parser = CommandParser(
        prog="trainer doctor",
        usage="trainer doctor [--config FILE [FILE ...]] [OPTIONS]",
        description=f"{summary[0].upper()}{summary[1:]}. It removes all that it writes.",
        epilog=EXAMPLES,
    )
    config_option(parser, "a configuration to try, too")
    add = parser.add_argument
    add("--devices", metavar="N", type=positive, default=2, help="processes that exchange tensors (default: 2)")
    add("--root", metavar="FOLDER", help="where runs write (default: as the configuration says, or runs)")
    add("--timeout", metavar="SECONDS", type=float, default=900.0, help="for the step of the module (default: 900)")
    add("--json", action="store_true", help="print JSON, at the end")
    return parser


def _checks(
    given: argparse.Namespace, overrides: list[tuple[str, Node]], configuration: Recipe | None, first_here: bool
) -> Iterator[CheckResult]:
    """Run all checks; `first_here`: also those that one process does for its machine."""
    from trainer.cli.doctor.collectives import collectives
    from trainer.cli.doctor.disk import disk
    from trainer.cli.doctor.machine import machine

    if first_here:
        yield from machine()
        planned = {} if configuration is None else configuration.trainer
        yield from disk(local_path(given.root or planned.get("default_root_dir", Settings.default_root_dir)))
    yield collectives(given.devices)
    if configuration is not None:
        yield _one_step(given, overrides)


def _one_step(given: argparse.Namespace, overrides: list[tuple[str, Node]]) -> CheckResult:
    """Run a batch of training and of validation in separate processes, with `trainer fit`."""
    command = [sys.executable, "-m", "trainer", "fit"]
    command += ["--config", *given.config] if given.config else []
    command += [f"--{name}={json.dumps(node.plain())}" for name, node in overrides]
    command += [f"--trainer.{setting}" for setting in (*ONE_STEP, "enable_progress_bar=false")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=given.timeout, check=False)
    except subprocess.TimeoutExpired:
        fix = "The first step of compile= and of DeepSpeed may compile: wait longer with --timeout 3600."
        return CheckResult("FAIL", "one step", f"was not done after {given.timeout:g} s.", fix)
    if done.returncode == 0:
        return CheckResult("OK", "one step", "a batch of training, and of validation where there is one, went through")
    lines = done.stderr.rstrip().splitlines()
    said = [line for line in lines if line.startswith("error: ")] or lines[-1:]
    end = f"was killed by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "failed"
    found = f"trainer fit {end}: {' '.join(said)}"
    return CheckResult("FAIL", "one step", found, f"To see all of it: python {' '.join(command[1:])}")
