"""`python -m benchmarks._first_step NAME FOLDER`: run a contender until its first step is done, and print the time."""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from pathlib import Path

import torch

from benchmarks._task import Task, hand_written
from benchmarks._turns import Clock


class StopAtOnce(Clock):
    """End the process at the second forward pass, and print the CPU time since its start."""

    def tick(self) -> None:
        self.count += 1
        if self.count == 1:
            return
        os.write(1, f"\nfirst step after {time.process_time()} s\n".encode())
        os._exit(0)


def main(name: str, folder: str) -> None:
    gc.disable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task, clock = Task(16), StopAtOnce(16)
    if name == "hand-written loop":
        hand_written(task, clock, Path(folder))
        return
    if name.startswith("ours"):
        from benchmarks._ours import training
    else:
        from benchmarks._peers import training
    next(contender for contender in training(task) if contender.name == name).run(clock, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
