"""`trainer test`: compute the test metrics of a checkpoint."""

from __future__ import annotations

from trainer.cli.run import Job, print_results, run_command

EXAMPLES = """\
  trainer test --config runs/version_0/config.yaml --ckpt-path best
  trainer test --config run.yaml --ckpt-path runs/version_0/checkpoints/NAME
"""


def run(arguments: list[str]) -> int:
    """Run the test loop and print the metrics. Returns the exit code."""
    return run_command("test", arguments, EXAMPLES, _test)


def _test(job: Job) -> None:
    results = job.trainer.test(job.module, datamodule=job.data, ckpt_path=job.ckpt_path, verbose=False)
    print_results(job, "test", results)
