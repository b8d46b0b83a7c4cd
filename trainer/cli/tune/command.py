"""`trainer tune`: run a search with the options given, and print the result."""

from __future__ import annotations

from typing import Any

from trainer.arguments import local_path, make_folder
from trainer.cli.columns import print_fitted
from trainer.cli.main import usage_error
from trainer.cli.options import CommandParser, size
from trainer.cli.run import Job, run_command
from trainer.distributed.environment import detect_environment
from trainer.errors import ConfigError, did_you_mean

EXAMPLES = """\
  trainer tune lr --config run.yaml
  trainer tune lr --config run.yaml --min-lr 1e-6 --max-lr 1 --steps 100 --plot lr.png
  trainer tune batch-size --config run.yaml
  trainer tune batch-size --config run.yaml --mode binsearch --memory-limit 8GB
  trainer tune throughput --config run.yaml
"""
HELP = f"""\
usage: trainer tune {{lr,batch-size,throughput}} --config FILE [OPTIONS] [--trainer.x ...]

Find a learning rate, a batch size, or faster settings, by short trainings. Only the picture is
written.

options of lr:
  --min-lr X, --max-lr X    the first and the last learning rate (1e-8, 1)
  --steps N                 steps from one to the other (100); half as many with each of some constant rates
  --mode MODE               exponential or linear
  --plot FILE               write the curve as a picture (needs matplotlib)

options of batch-size:
  --mode MODE               power: double it until the memory is used up; binsearch: also sizes between
  --name NAME               the argument of the module or the data that is the batch size (batch_size)
  --steps N                 steps of each trial (3)
  --first N, --max N        the first and the largest size to try (2, 8192)
  --memory-limit SIZE       on CPUs: memory of a trial, such as 8GB; default: nine tenths of what is free,
                            split among the processes

options of throughput:
  --steps N                 steps of each trial (20)

`trainer fit --help` lists the options of the configuration.

examples:
{EXAMPLES}"""


def run(arguments: list[str]) -> int:
    """Run the search that the arguments name. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help") or "--help" in arguments:
        print_fitted(HELP)
        return 0 if arguments else 2
    which, *rest = arguments
    if which not in SEARCHES:
        hint = did_you_mean(which, SEARCHES)
        return usage_error(f"trainer tune {which}: give lr, batch-size or throughput.{hint}")
    parser = CommandParser(prog=f"trainer tune {which}", add_help=False)
    for option, (argument, kind) in OPTIONS[which].items():
        parser.add_argument(option, dest=argument, type=kind)
    try:
        own, others = parser.parse_known_args(rest)
    except ConfigError as error:
        return usage_error(str(error))
    given = {name: value for name, value in vars(own).items() if value is not None}
    return run_command("tune", others, EXAMPLES, lambda job: SEARCHES[which](job, **given))


OPTIONS: dict[str, dict[str, tuple[str, Any]]] = {
    "lr": {
        "--min-lr": ("min_lr", float),
        "--max-lr": ("max_lr", float),
        "--steps": ("num_training", int),
        "--mode": ("mode", str),
        "--plot": ("plot", str),
    },
    "batch-size": {
        "--mode": ("mode", str),
        "--name": ("batch_arg_name", str),
        "--steps": ("steps_per_trial", int),
        "--first": ("init_val", int),
        "--max": ("max_val", int),
        "--memory-limit": ("memory_limit", size),
    },
    "throughput": {"--steps": ("steps_per_trial", int)},
}
"""Options of each search -> the argument of the tuner's method, and the type of its value."""


def _tune_lr(job: Job, plot: str | None = None, **given: Any) -> None:
    from trainer.tuner import Tuner

    if plot:
        make_folder(local_path(plot, "--plot").absolute().parent, "--plot")
    found = Tuner(job.trainer).lr_find(job.module, datamodule=job.data, update_attr=False, **given)
    if detect_environment().rank != 0:  # the trainer itself has not joined the others: its trials have
        return
    suggestion, points = found.suggestion(), len(found.results["lr"])
    if plot:
        found.plot(suggest=True).savefig(local_path(plot))
        print(f"curve: {local_path(plot)}")
    if suggestion is None:
        raise ConfigError(f"{found.stopped}.")
    print(f"learning rate: {suggestion:.3g}  ({points} points, {len(found.falls)} constant rates)")


def _tune_batch_size(job: Job, **given: Any) -> None:
    from trainer.tuner import Tuner

    tuner = Tuner(job.trainer)
    largest = tuner.scale_batch_size(job.module, datamodule=job.data, **given)
    assert tuner.batch_sizes is not None
    if detect_environment().rank != 0:
        return
    print(tuner.batch_sizes.table())
    if largest is None:
        raise ConfigError("not even one sample fits into the memory.")
    print(f"largest: {largest}")
    print(f"above {tuner.batch_sizes.worthwhile}, the samples per second grow by less than 5 %")


def _tune_throughput(job: Job, **given: Any) -> None:
    from trainer.tuner import Tuner

    found = Tuner(job.trainer).throughput(job.module, datamodule=job.data, **given)
    if detect_environment().rank != 0:
        return
    print(found.table())
    if not found.pays:
        print("none of these gives 5 % more samples per second")


SEARCHES = {"lr": _tune_lr, "batch-size": _tune_batch_size, "throughput": _tune_throughput}
