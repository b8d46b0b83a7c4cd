"""`trainer validate`: compute the validation metrics of a checkpoint."""

from __future__ import annotations

from trainer.cli.run import Job, print_results, run_command

EXAMPLES = """\
  trainer validate --config runs/version_0/config.yaml --ckpt-path best
  trainer validate --config run.yaml --ckpt-path runs/version_0/checkpoints/NAME
  trainer validate --config run.yaml --data.batch_size 512 --trainer.limit_val_batches 10
"""


def run(arguments: list[str]) -> int:
    """Run validation and print the metrics. Returns the exit code."""
    return run_command("validate", arguments, EXAMPLES, _validate)


def _validate(job: Job) -> None:
    results = job.trainer.validate(job.module, datamodule=job.data, ckpt_path=job.ckpt_path, verbose=False)
    print_results(job, "validation", results)
