"""What a step costs function by function: the calls that only our loop or only a hand-written loop makes.

A profiler counts the Python and C calls of the steps of `overhead`'s model. The counts are exact and do not depend on
what else the machine does. The microseconds of CPU time are the profiler's measurements of a function itself, without
the functions that it calls and without its own time for a call, which is calibrated. They depend on the machine.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import pstats
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import _ours
from benchmarks._task import Task, hand_written, hand_written_validation
from benchmarks._turns import Clock

FEW = 100
"""Steps of the short run: the difference to a longer one leaves out what a run does once."""
SHARE = 0.05
"""Calls per step from which a function is listed: what is done at every flush is above, what is done once is not."""
LOOPS = ("hand_written", "_train_epoch", "train_with", "hand_written_validation", "run_batches")
"""The functions, called once, that are a loop over the steps: their own time counts."""

Function = tuple[str, int, str]
Work = Callable[[Task, Clock, Path], None]


def off(task: Task, clock: Clock, folder: Path) -> None:
    next(c for c in _ours.training(task) if "everything off" in c.name).run(clock, folder)


def one_log(task: Task, clock: Clock, folder: Path) -> None:
    next(c for c in _ours.training(task) if "self.log" in c.name and "off" in c.name).run(clock, folder)


def all_on(task: Task, clock: Clock, folder: Path) -> None:
    next(c for c in _ours.training(task) if "all on" in c.name).run(clock, folder)


def validation(task: Task, clock: Clock, folder: Path) -> None:
    _ours.validation(replace(task, classes=10))[0].run(clock, folder)


def loop_of_validation(task: Task, clock: Clock, folder: Path) -> None:
    hand_written_validation(replace(task, classes=10), clock, folder)


WORKS: dict[str, tuple[Work, Work]] = {
    "off": (hand_written, off),
    "log": (hand_written, one_log),
    "on": (hand_written, all_on),
    "validate": (loop_of_validation, validation),
}
"""The loop written by hand, and ours."""


def per_step(work: Work, steps: int, accumulate: int, loader: bool) -> dict[Function, tuple[float, float]]:
    """Return calls and seconds in the function itself, per step, by function."""
    few = _profiled(work, Task(FEW, accumulate, loader))
    many = _profiled(work, Task(FEW + steps, accumulate, loader))
    return {
        function: ((calls - few.get(function, (0, 0))[0]) / steps, (own - few.get(function, (0, 0))[1]) / steps)
        for function, (calls, own) in many.items()
        if function[2] in LOOPS or (calls - few.get(function, (0, 0))[0]) / steps >= SHARE
    }


def _profiled(work: Work, task: Task) -> dict[Function, tuple[int, float]]:
    clock, profiler = Clock(task.steps), cProfile.Profile(time.process_time)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        profiler.runcall(work, task, clock, Path(folder))
    stats: dict[Function, tuple[int, int, float, float, object]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    return {function: (calls, own) for function, (_, calls, own, _, _) in stats.items()}


def profiler_time() -> float:
    """Return the seconds that the profiler adds to one call of a function."""

    def nothing() -> None:
        pass

    def many() -> None:
        for _ in range(100_000):
            nothing()

    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(many)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    return next(own / calls for (_, _, name), (_, calls, own, _, _) in stats.items() if name == "nothing")


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks functions", description=__doc__)
    parser.add_argument("--what", choices=sorted(WORKS), default="off")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per update; calls are per micro-batch")
    parser.add_argument("--loader", action="store_true", help="batches of a shuffling DataLoader")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("trainer").setLevel(logging.ERROR)
    works = WORKS[options.what]
    for work in works:  # caches, lazy imports
        _profiled(work, Task(FEW, options.accumulate, options.loader))
    loop, ours = (per_step(work, options.steps, options.accumulate, options.loader) for work in works)
    bias = profiler_time()
    print("| calls a step beyond the loop's | microseconds in all | function |\n|---|---|---|")
    rows = []
    for function in {*ours, *loop}:
        (calls, own), (calls_of_loop, own_of_loop) = ours.get(function, (0.0, 0.0)), loop.get(function, (0.0, 0.0))
        if function[2] in LOOPS or abs(calls - calls_of_loop) >= SHARE:
            more = calls - calls_of_loop
            rows.append((own - own_of_loop - more * bias, more, function))
    for seconds, calls, (file, _, name) in sorted(rows, reverse=True):
        place = "" if file == "~" else f" ({'/'.join(Path(file).parts[-2:])})"
        print(f"| {calls:+.2f} | {seconds * 1e6:+.2f} | `{name}`{place} |")
    own_code = [row for row in rows if "trainer" in Path(row[2][0]).parts]
    print(
        f"\n{sum(calls for _, calls, _ in rows):+.1f} calls a step, "
        f"{sum(row[0] for row in rows) * 1e6:+.1f} microseconds. Of this trainer's own functions: "
        f"{sum(row[1] for row in own_code):+.1f} calls, "
        f"{sum(row[0] for row in own_code) * 1e6:+.1f} microseconds."
    )
    return 0
