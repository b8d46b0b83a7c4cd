"""`trainer predict`: write a module's predictions to files."""

from __future__ import annotations

from trainer.cli.run import Job, run_command

EXAMPLES = """\
  trainer predict --config runs/version_0/config.yaml --ckpt-path best
  trainer predict --config run.yaml --trainer.callbacks '{class_path: PredictionWriter, format: jsonl}'
"""


def run(arguments: list[str]) -> int:
    """Run prediction and write the files. Returns the exit code."""
    return run_command("predict", arguments, EXAMPLES, _predict)


def _predict(job: Job) -> None:
    from trainer.cli.fit import output_lines

    job.trainer.predict(job.module, datamodule=job.data, ckpt_path=job.ckpt_path, return_predictions=False)
    job.trainer.print("\n".join(output_lines([c for c in job.trainer.callbacks if c not in job.trainer.loggers])))
    job.trainer.print("read them with: trainer.callbacks.read_predictions(FOLDER)")
