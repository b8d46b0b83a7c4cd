"""Faults at named points: in the writing of checkpoints, and at every hook."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from trainer.callback import HOOKS, Callback
from trainer.fault_tolerance.fault_points import POINTS, VARIABLE, Fault, fault_point, parse_faults


def fault(point: str, action: str = "kill", count: int = 1, rank: int | None = None) -> dict[str, str]:
    """The environment of a process that is to break: `run_python(script, env=fault("before_rename", count=3))`.

    Args:
        point: one of `POINTS`, which are in the writing of checkpoints; or, if the script has a `FaultCallback`, a
            hook, such as "on_validation_batch_end" (every hook stands at the top of trainer/callback.py).
        action: one of `ACTIONS`.
        count: at which passing of the point, from 1.
        rank: on which process; None: on each that comes there.

    Raises:
        ConfigError: there is no such point or action.
    """
    text = str(Fault(point, action, count, rank))
    parse_faults(text, (*POINTS, *HOOKS))
    return {VARIABLE: text}


class FaultCallback(Callback):
    """Make every hook a point for `fault`. A hook without a fault does nothing and costs nothing.

    It stands where it is in the list of callbacks: those before it have done their part when the fault strikes.

    Raises:
        ConfigError: the variable TRAINER_FAULT asks for something that does not exist.
    """

    def __init__(self) -> None:
        for planned in parse_faults(os.environ.get(VARIABLE, ""), (*POINTS, *HOOKS)):
            if planned.point in HOOKS:
                setattr(self, planned.point, _at(planned.point))


def _at(point: str) -> Callable[..., None]:
    def passing(*args: Any) -> None:
        fault_point(point)

    return passing
