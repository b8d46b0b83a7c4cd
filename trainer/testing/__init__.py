"""Tools to test that a run survives faults: break processes, files and disks, then compare runs bit by bit.

    from trainer.testing import FaultCallback, compare_runs, each_damage, fault, run_python, start_python

See docs/testing.md. Training imports nothing from here.
"""

from __future__ import annotations

from trainer.fault_tolerance.fault_points import ACTIONS, POINTS, Fault
from trainer.testing.compare import compare_runs
from trainer.testing.damage import each_damage, flip_byte, largest_file, small_disk, truncate
from trainer.testing.faults import FaultCallback, fault
from trainer.testing.processes import (
    Result,
    Running,
    Storm,
    alive,
    descendants,
    kill_at_random,
    rank_of,
    run_python,
    start_python,
    wait_until,
)

__all__ = [
    "ACTIONS",
    "POINTS",
    "Fault",
    "FaultCallback",
    "Result",
    "Running",
    "Storm",
    "alive",
    "compare_runs",
    "descendants",
    "each_damage",
    "fault",
    "flip_byte",
    "kill_at_random",
    "largest_file",
    "rank_of",
    "run_python",
    "small_disk",
    "start_python",
    "truncate",
    "wait_until",
]
