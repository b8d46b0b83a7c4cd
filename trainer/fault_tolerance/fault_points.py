"""Named points at which a test can break a process on purpose; nothing happens at them unless TRAINER_FAULT is set."""

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
    "after_file": "a file is whole and flushed to the disk; the next one is not begun",
    "before_manifest": "all files but the manifest are there",
    "before_rename": "the checkpoint is complete under its temporary name",
    "after_rename": "the checkpoint has its name; nothing points to it yet",
    "before_pointer": "the new contents of a pointer are on the disk beside it",
    "after_pointer": "a pointer was replaced; checkpoints that are no longer wanted are still there",
    "in_removal": "a checkpoint has lost its name, and its files are not deleted yet",
}
"""The points in the code that writes checkpoints: what has happened there."""

ACTIONS = {
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "int": "SIGINT",
    "error": "a RuntimeError",
    "full": "the OSError of a full disk",
    "hang": "stays there for ever",
}
"""What can happen: to the process that comes to the point."""

_FAULT = re.compile(r"(?P<point>\w+)(:(?P<count>[1-9]\d*))?(@(?P<rank>\d+))?=(?P<action>\w+)")
_LOCK = threading.Lock()


@dataclass(frozen=True)
class Fault:
    """One thing that is to go wrong. `str` of it is what the variable holds: `before_rename:3@0=kill`."""

    point: str
    action: str = "kill"
    count: int = 1
    """At which passing of the point, from 1."""
    rank: int | None = None
    """On which process; None: on each one that comes there."""

    def __str__(self) -> str:
        return f"{self.point}:{self.count}{'' if self.rank is None else f'@{self.rank}'}={self.action}"


def fault_point(name: str) -> None:
    """Do nothing, unless the environment asks for a fault at this point."""
    if VARIABLE in os.environ:
        _pass(name)


def parse_faults(text: str, points: Collection[str] | None = None) -> list[Fault]:
    """The faults of a value of the variable: `POINT[:COUNT][@RANK]=ACTION`, several with commas between them.

    Args:
        points: the names that are allowed; None: any.

    Raises:
        ConfigError: it is not written like that, or names an unknown point or action.
    """
    faults = []
    for part in text.split(",") if text else ():
        match = _FAULT.fullmatch(part.strip())
        if match is None:
            raise ConfigError(
                f"{VARIABLE}: {part!r} is no fault: write POINT:COUNT@RANK=ACTION, as in before_rename:3@0=kill."
            )
        if match["action"] not in ACTIONS:
            raise unknown_name_error("action of a fault", match["action"], ACTIONS)
        if points is not None and match["point"] not in points:
            raise unknown_name_error("point of a fault", match["point"], points)
        rank = None if match["rank"] is None else int(match["rank"])
        faults.append(Fault(match["point"], match["action"], int(match["count"] or 1), rank))
    return faults


def _pass(name: str) -> None:
    """Count down the faults of this point; the counts are kept in the variable itself."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return  # processes that were started again after the fault are left alone
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
