"""Inject faults at named points: while writing checkpoints, and at every hook of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from trainer.callback import HOOKS, Callback
from trainer.fault_tolerance.fault_points import POINTS, VARIABLE, Fault, fault_point, parse_faults


def fault(point: str, action: str = "kill", count: int = 1, rank: int | None = None) -> dict[str, str]:
    """Return the environment that makes a process fail: `run_python(script, env=fault("before_rename", count=3))`.

    Args:
        point: one of `POINTS`, which are in the writing of checkpoints; or, if the script has a `FaultCallback`, a
            hook, such as "on_validation_batch_end" (all are listed at the top of trainer/callback.py).
        action: one of `ACTIONS`.
        count: inject the fault in this pass, counted from 1.
        rank: inject the fault in this process; None: in each process that reaches the point.

    Raises:
        ConfigError: the point or the action does not exist.
    """
    text = str(Fault(point, action, count, rank))
    parse_faults(text, (*POINTS, *HOOKS))
    return {VARIABLE: text}


class FaultCallback(Callback):
    """Make every hook of the run a point for `fault`. Hooks without a fault cost nothing.

    Its position in the list of callbacks counts: those before it have run when the fault is injected.

    Raises:
        ConfigError: the variable TRAINER_FAULT names an unknown point or action.
    """

    def __init__(self) -> None:
        for planned in parse_faults(os.environ.get(VARIABLE, ""), (*POINTS, *HOOKS)):
            if planned.point in HOOKS:
                setattr(self, planned.point, _at(planned.point))


def _at(point: str) -> Callable[..., None]:
    def passing(*args: Any) -> None:
        fault_point(point)

    return passing
