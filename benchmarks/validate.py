"""Extra time of a validation batch over a hand-written loop: loss, and accuracy with torchmetrics.

A perceptron 32-64-10, 5,000 batches of 32 in memory, one thread. The loop does the same work: the mean loss weighted by
samples, and torchmetrics' `MulticlassAccuracy.update`. Timed as in `overhead`.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import _ours, _peers
from benchmarks._report import Report
from benchmarks._task import Task, hand_written_validation
from benchmarks._turns import Contender, arguments_of, take_turns


def main(arguments: list[str]) -> int:
    options = arguments_of("validate", __doc__, 5000, 9).parse_args(arguments)
    torch.set_num_threads(1)
    task = Task(options.steps, classes=10)
    report = Report("validate", (__doc__ or "").split("\n\n")[0] + " CPU and wall time per batch.")
    loop = Contender("hand-written loop", partial(hand_written_validation, task))
    contenders = [*_ours.validation(task), *_peers.validation(task)]
    take_turns(report, loop, contenders, task.steps, options.rounds, options.only)
    report.save(options.save)
    return 0
