"""Extra time from the start of the process to the end of its first step, over a hand-written script.

Python's garbage collector is off in all of them: a pass over torch's objects takes 85 ms, and would happen in some
processes only.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import _ours, _peers
from benchmarks._report import WITH_BYTECODE, Report, Times, Took
from benchmarks._task import Task

LOOP = "hand-written loop"
LEFT_OUT = ("one self.log", "Lightning, barebones", "HF Trainer, defaults", "supervised", "Keras, defaults")
"""Contenders whose start equals another one's."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args(arguments)
    names = [c.name for c in [*_ours.training(Task(1)), *_peers.training(Task(1))]]
    names = [name for name in names if not any(text in name for text in LEFT_OUT)]
    names = [name for name in names if not options.only or any(t.lower() in name.lower() for t in options.only)]
    report = Report(
        "startup",
        "Milliseconds from the start of the process to the end of the first step; `above the loop` is the median over "
        "rounds of the difference to the hand-written script in the same round. The bar for ours: 100 ms of CPU time, "
        "without TensorBoard.",
        unit="ms",
        scale=1e3,
        ratios=False,
        results={name: Times() for name in [LOOP, *names]},
    )
    for name in [LOOP, *names]:  # compiles new files
        _once(name)
    for number in range(options.rounds):
        random.Random(number).shuffle(names)
        took = {name: _once(name) for name in [LOOP, *names]}
        for name, own in took.items():
            report.results[name].add(own, took[LOOP])
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    report.save(options.save)
    return 0


def _once(name: str) -> Took:
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks._first_step", name, folder],
            capture_output=True,
            text=True,
            check=False,
            env={**WITH_BYTECODE, "OMP_NUM_THREADS": "1"},
        )
        wall = time.perf_counter() - began
    found = re.search(r"first step after ([\d.e-]+) s", done.stdout)
    if found is None:
        raise RuntimeError(f"{name} made no step:\n{done.stdout}\n{done.stderr}")
    return Took(float(found[1]), wall)
