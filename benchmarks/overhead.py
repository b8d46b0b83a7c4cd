"""Extra time of a step over a hand-written loop: a tiny model, batches in memory, everything off and on.

A multilayer perceptron 32-64-1 in batches of 32, SGD, one thread. The model's forward pass reads the clocks, so
that set-up and tear-down do not count; the first tenth of the steps is left out. Every contender runs between two
runs of the loop, in a new order each round; its ratio is the median over rounds of its time by theirs. Bars are drawn
on a pseudo-terminal that another process reads.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import _ours, _peers
from benchmarks._report import Report
from benchmarks._task import Task, hand_written
from benchmarks._turns import Contender, arguments_of, take_turns

WHAT = (
    "CPU and wall time per step (of 32 samples) of a perceptron 32-64-1 with SGD, {data}; one thread. `above the loop` "
    "and the ratios are medians over rounds of each run against the two runs of the loop around it; the next column "
    "compares 10th percentiles of the CPU time of pieces of 50 steps, which other processes disturb least."
)


def compare(name: str, task: Task, data: str, arguments: list[str], text: str | None, rounds: int = 9) -> int:
    """Compare training in one process: the loop, ours, and the peers that are installed."""
    parser = arguments_of(name, text, task.steps, rounds)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = Task(options.steps, task.accumulate, task.loader)
    report = Report(name, WHAT.format(data=data))
    loop = Contender("hand-written loop", partial(hand_written, task))
    contenders = [*_ours.training(task), *_peers.training(task)]
    take_turns(report, loop, contenders, task.steps, options.rounds, options.only)
    report.save(options.save)
    return 0


def main(arguments: list[str]) -> int:
    return compare("overhead", Task(5000), "batches in memory", arguments, __doc__)
