"""The same as `overhead` with an update for every 4 micro-batches; times are per micro-batch."""

from __future__ import annotations

from benchmarks._task import Task
from benchmarks.overhead import compare


def main(arguments: list[str]) -> int:
    task = Task(5000, accumulate=4)
    return compare("accumulate", task, "batches in memory, 4 micro-batches per update", arguments, __doc__)
