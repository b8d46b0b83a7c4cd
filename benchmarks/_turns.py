"""Run contenders in one process in turns, each between two runs of the hand-written loop, in rounds."""

from __future__ import annotations

import argparse
import fcntl
import gc
import logging
import os
import random
import struct
import subprocess
import sys
import tempfile
import termios
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks._report import Report, Times, Took

FIRST = 0.1
"""Share of the steps that is not measured, for caches, lazy imports and allocators to warm up."""
PIECE = 50
"""Steps of a piece, for the percentile over pieces: values are flushed as often."""


class Clock:
    """Count forward passes, and read the clocks at every 50th: set-up and tear-down are not timed."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.piece = min(PIECE, max(1, passes // 4))
        self.count = 0
        self.marks: list[tuple[float, float]] = []

    def tick(self) -> None:
        self.count += 1
        if self.count % self.piece == 0:
            self.marks.append((time.process_time(), time.perf_counter()))

    def took(self) -> Took:
        """Return the time of each pass, without the first ones."""
        assert self.count >= self.passes, f"only {self.count} of {self.passes} forward passes were made"
        marks = self.marks[int(len(self.marks) * FIRST) : self.passes // self.piece]
        passes = self.piece * (len(marks) - 1)
        pieces = [(b[0] - a[0]) / self.piece for a, b in pairwise(marks)]
        return Took((marks[-1][0] - marks[0][0]) / passes, (marks[-1][1] - marks[0][1]) / passes, pieces)


@dataclass
class Contender:
    """One way of doing the same work."""

    name: str
    run: Callable[[Clock, Path], None]
    """Do the work in the given folder, ticking the clock at each forward pass."""
    bar: float | None = None
    above: float | None = None
    """Microseconds of CPU time above the loop that are accepted, for a loop of 100."""


def arguments_of(prog: str, text: str | None, steps: int, rounds: int) -> argparse.ArgumentParser:
    """Parse the options that these benchmarks share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {prog}", description=text)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="contenders whose name contains it")
    parser.add_argument("--save", type=Path, default=None, help="folder for NAME.md and NAME.json")
    return parser


def take_turns(
    report: Report,
    loop: Contender,
    contenders: Sequence[Contender],
    passes: int,
    rounds: int,
    only: Sequence[str] = (),
) -> None:
    """Fill the report: each contender between two runs of the loop, in a new order every round.

    A failed contender is left out, and the report says why.
    """
    wanted = [c for c in contenders if not only or any(text.lower() in c.name.lower() for text in only)]
    report.results = {loop.name: Times(), **{c.name: Times() for c in wanted}}
    report.bars = {c.name: c.bar for c in wanted if c.bar is not None}
    report.bars_above = {c.name: c.above for c in wanted if c.above is not None}
    shuffled = random.Random(0)
    with terminal():
        _once(loop, passes)
        for number in range(rounds):
            shuffled.shuffle(wanted)
            before = _once(loop, passes)
            for contender in list(wanted):
                try:
                    own = _once(contender, passes)
                except Exception as error:
                    if number:
                        raise
                    report.left_out[contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                    if not isinstance(error, ImportError):
                        traceback.print_exc(file=sys.__stderr__)
                    del report.results[contender.name]
                    wanted.remove(contender)
                    continue
                after = _once(loop, passes)
                around = Took((before.cpu + after.cpu) / 2, (before.wall + after.wall) / 2)
                report.results[contender.name].add(own, around)
                report.results[loop.name].add(after, after)
                before = after
            print(f"round {number + 1} of {rounds}", file=sys.__stderr__, flush=True)


def _once(contender: Contender, passes: int) -> Took:
    clock = Clock(passes)
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        contender.run(clock, Path(folder))
    return clock.took()


@contextmanager
def terminal() -> Iterator[None]:
    """Make stdout and stderr a terminal of 120 columns that another process reads, so that a bar costs as much as on
    a screen. Warnings and log messages are switched off."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(master)
    before = sys.stdout, sys.stderr
    screen = open(slave, "w", buffering=1)  # noqa: SIM115
    sys.stdout = sys.stderr = screen
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout, sys.stderr = before
        logging.disable(logging.NOTSET)
        screen.close()
        reader.kill()
        reader.wait()
