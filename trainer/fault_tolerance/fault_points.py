"""Named points where tests inject faults; they do nothing unless TRAINER_FAULT is set."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from trainer.errors import ConfigError, unknown_name_error

VARIABLE = "TRAINER_FAULT"

POINTS = {
    "in_file": "a part of a file of a checkpoint, or of a pointer, was written",
    "after_file": "a file is complete and flushed to the disk; the next one is not begun",
    "before_manifest": "all files except the manifest are written",
    "before_rename": "the checkpoint is complete under its temporary name",
    "after_rename": "the checkpoint has its name; nothing points to it yet",
    "before_pointer": "the new contents of a pointer are on the disk, under a temporary name",
    "after_pointer": "a pointer was replaced; checkpoints that are no longer wanted are still there",
    "in_removal": "a checkpoint has lost its name, and its files are not deleted yet",
}
"""The points in the code that writes checkpoints, and what has happened before each."""

ACTIONS = {
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "int": "SIGINT",
    "error": "a RuntimeError",
    "full": "the OSError of a full disk",
    "hang": "an endless wait",
}
"""The faults that can hit the process that reaches the point."""

_FAULT = re.compile(r"(?P<point>\w+)(:(?P<count>[1-9]\d*))?(@(?P<rank>\d+))?=(?P<action>\w+)")
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Fault:
    """A fault to inject. Its `str` is the syntax of the variable: `before_rename:3@0=kill`."""

    point: str
    action: str = "kill"
    count: int = 1
    """The number of the pass that gets the fault, from 1."""
    rank: int | None = None
    """The process that gets the fault; None: each one that reaches the point."""

    def __str__(self) -> str:
        return f"{self.point}:{self.count}{'' if self.rank is None else f'@{self.rank}'}={self.action}"


def fault_point(name: str) -> None:
    """Inject the fault that the environment asks for at this point; normally do nothing."""
    if VARIABLE in os.environ:
        _pass(name)


def parse_faults(text: str, points: Collection[str] | None = None) -> list[Fault]:
    """Parse the value of the variable: `POINT[:COUNT][@RANK]=ACTION`, separated by commas.

    Args:
        points: the allowed names; None: any.

    Raises:
        ConfigError: the syntax is wrong, or a point or action is unknown.
    """
    faults = []
    for part in text.split(",") if text else ():
        match = _FAULT.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{VARIABLE}: {part!r} is not a fault: write POINT:COUNT@RANK=ACTION, as in before_rename:3@0=kill."
            )
        if match["action"] not in ACTIONS:
            raise unknown_name_error("action of a fault", match["action"], ACTIONS)
        if points is not None and match["point"] not in points:
            raise unknown_name_error("point of a fault", match["point"], points)
        rank = None if match["rank"] is None else int(match["rank"])
        faults.append(Fault(match["point"], match["action"], int(match["count"] or 1), rank))
    return faults


def _pass(name: str) -> None:
    """Count down the faults of this point, in the variable itself, and trigger the one that is due."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return  # not in processes that were restarted after the fault
    rank = int(os.environ.get("RANK", "0"))
    due = None
    with _LOCK:
        waiting = []
        for fault in parse_faults(os.environ.get(VARIABLE, "")):
            if fault.point != name or fault.rank not in (None, rank):
                waiting.append(fault)
            elif fault.count > 1:
                waiting.append(replace(fault, count=fault.count - 1))
            else:
                due = fault
        os.environ[VARIABLE] = ",".join(map(str, waiting))
    if due is not None:
        _trigger(due)


def _trigger(fault: Fault) -> None:
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
    if fault.action in signals:
        os.kill(os.getpid(), signals[fault.action])
    elif fault.action == "error":
        raise RuntimeError(f"a fault at {fault.point}, as {VARIABLE} asked for")
    elif fault.action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        while True:
            time.sleep(1)
