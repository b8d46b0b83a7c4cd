"""The same as `overhead` with a DataLoader: rows of a TensorDataset, shuffled, num_workers=0."""

from __future__ import annotations

from benchmarks._task import Task
from benchmarks.overhead import compare


def main(arguments: list[str]) -> int:
    task = Task(5000, loader=True)
    return compare("dataloader", task, "a shuffling DataLoader over a TensorDataset", arguments, __doc__)
