"""`trainer fit`: train, then print the last metrics and the paths of the run's files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from trainer.cli.columns import fitted_text
from trainer.cli.run import Job, run_command, table
from trainer.config.tree import relative
from trainer.runs.terminal import columns_of

if TYPE_CHECKING:
    from trainer.callback import Callback

EXAMPLES = """\
  trainer fit --config examples/digits/config.yaml
  trainer fit --config base.yaml big.yaml --trainer.max_epochs 3 --module.lr 0.1
  trainer fit --config run.yaml --ckpt-path last          go on where the last run stopped
  trainer fit --config run.yaml --weights llama/          start from pretrained weights (safetensors)
  trainer fit --module mymodel.py:MyModule --data mymodel.py:MyData --trainer.max_steps 100
  trainer fit --config run.yaml --trainer.strategy ddp --trainer.devices 2
  trainer fit --config run.yaml --dry-run --world-size 1024       check everything, start nothing; --dry-run --help
  trainer fit --config run.yaml --ray num_workers=2 max_failures=1 storage_path=/shared/runs
"""


def run(arguments: list[str]) -> int:
    """Train as the arguments say. Returns the exit code."""
    if {"--dry-run", "--dry_run"} & set(arguments):
        from trainer.cli.dry_run import run as dry_run

        return dry_run(arguments)
    return run_command("fit", arguments, EXAMPLES, _fit)


def _fit(job: Job) -> None:
    from trainer.fault_tolerance.signals import ignore_sigusr1_if, keep_exit_code

    ignore_sigusr1_if(lambda: job.trainer.has_fit and job.trainer.stage is None)
    try:
        job.trainer.fit(
            job.module,
            datamodule=job.data,
            ckpt_path=job.ckpt_path,
            allow_changes=job.allow_changes,
            weights=job.weights,
        )
    except SystemExit:
        # A run that a signal stopped has saved everything; its paths are printed, too.
        _print(job)
        raise
    keep_exit_code()
    _print(job)


def _print(job: Job) -> None:
    trainer = job.trainer
    if trainer.has_fit and trainer.is_global_zero:
        lines = closing_lines(trainer.callback_metrics, trainer.global_step, trainer.run_dir, trainer.callbacks)
        lines += next_command(trainer.run_dir) if job.module.overrides("validation_step") else []
        trainer.print(fitted_text("\n".join(lines), columns_of(sys.stdout)))
        sys.stdout.flush()


def closing_lines(metrics: Mapping[str, Any], steps: int, run_dir: Path, callbacks: list[Callback]) -> list[str]:
    """Return the last metrics, and the paths of the run's files."""
    lines = []
    if metrics:
        values = {name: float(value) for name, value in metrics.items()}
        lines += [f"after {steps} {'step' if steps == 1 else 'steps'}:", table([values])]
    if not run_dir.is_dir():  # fast_dev_run writes no files
        return lines
    places = {"run directory:": "", "configuration:": "config.yaml", "checkpoints:": "checkpoints"}
    found = {label: run_dir / name for label, name in places.items() if (run_dir / name).exists()}
    lines += [f"{label:<15} {relative(path)}" for label, path in found.items()]
    return lines + output_lines(callbacks)


def next_command(run_dir: Path) -> list[str]:
    """Return a line with the command that validates the run's weights, if there is what that needs."""
    from trainer.checkpoint.directory import CheckpointDirectory

    config, checkpoints = run_dir / "config.yaml", run_dir / "checkpoints"
    if not (config.is_file() and checkpoints.is_dir()):
        return []
    which = "best" if CheckpointDirectory(checkpoints).pointer("best") is not None else "last"
    return [f"validate it:    trainer validate --config {quote(relative(config))} --ckpt-path {which}"]


def output_lines(callbacks: list[Callback]) -> list[str]:
    """Return a line for each callback that has written something to look at."""
    found = [location for callback in callbacks if (location := callback.output_location()) is not None]
    # Some labels are commands, to be typed with the path.
    return [f"{label:<15} {quote(relative(path))}" for label, path in found]
