"""Events that disturb a training: one class per kind, with the exit codes that it may cause."""

from __future__ import annotations

import random
import resource
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from benchmarks._chaos_processes import Processes
from trainer.testing import POINTS, fault

LONGEST_S = 1.5
"""Seconds from the beginning of training to an event, and from one event to the next."""
BALLAST = "ballast"


@dataclass(frozen=True)
class Event:
    """A drawn event."""

    kind: Kind
    rank: int
    delay: float
    """Seconds from the beginning of training, or from the event before, or (`early`) from the start of the process."""
    early: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return the options for starting the training."""
        return self.details.get("options", {})

    def environment(self) -> dict[str, str]:
        return self.details.get("environment", {})

    def __str__(self) -> str:
        details = "".join(f" {value}" for value in self.details.values())
        when = "early, " if self.early else ""
        return f"{self.kind.name}{details} (rank {self.rank}, {when}{self.delay:.2f} s)"


class Kind:
    """A kind of event."""

    name: ClassVar[str]
    expected: ClassVar[set[int]] = set()

    def possible(self, options: dict[str, Any], processes: int, place: str) -> bool:
        """Whether the event can happen to a training with these options."""
        return True

    def draw(self, rng: random.Random, processes: int) -> Event:
        rank, delay, early = rng.randrange(processes), rng.uniform(0, LONGEST_S), rng.random() < 0.15
        if early:
            delay = rng.uniform(0, 6)
        return Event(self, rank, delay, early, self.details(rng))

    def details(self, rng: random.Random) -> dict[str, Any]:
        return {}

    def codes(self, event: Event) -> set[int]:
        """Return the exit codes that it may cause, besides 0, as a shell shows them."""
        return self.expected

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        """Do it."""

    def undo(self, event: Event, processes: Processes, folder: Path) -> None:
        """Undo anything that would disturb the next start."""


KILLED = {128 + signal.SIGKILL, 1}
"""1 if the other ranks report the failure before the launcher notices it."""


class KillRank(Kind):
    name = "kill a rank"
    expected = KILLED

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        processes.send(signal.SIGKILL, processes.rank(event.rank))


class KillRanks(Kind):
    name = "kill all ranks"
    expected = KILLED

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        processes.send(signal.SIGKILL, *[processes.rank(rank) for rank in range(processes.world_size)])


class KillLauncher(Kind):
    name = "kill the launcher"
    expected = KILLED

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        processes.send(signal.SIGKILL, processes.running.pid)


class KillEverything(Kind):
    name = "kill everything"
    expected = KILLED

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        processes.send(signal.SIGKILL, *processes.all())


class KillWorker(Kind):
    name = "kill a data worker"
    expected = {1}

    def possible(self, options: dict[str, Any], processes: int, place: str) -> bool:
        return options["workers"] > 0

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        processes.send(signal.SIGKILL, *processes.workers(event.rank)[:1])


STOPS = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 75}


class Stop(Kind):
    name = "stop by"

    def details(self, rng: random.Random) -> dict[str, Any]:
        return {"signal": rng.choice(list(STOPS)), "to": rng.choice(["launcher", "rank"]), "times": rng.choice([1, 2])}

    def codes(self, event: Event) -> set[int]:
        name = event.details["signal"]
        # Before the script has created its Trainer, the signal has its default action. Only SIGUSR1's code differs.
        return {STOPS[name], 128 + signal.Signals[name]} if event.early else {STOPS[name]}

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        to = processes.running.pid if event.details["to"] == "launcher" else processes.rank(event.rank)
        for time_ in range(event.details["times"]):
            time.sleep(0.3 * time_)
            if processes.is_running():
                processes.send(signal.Signals[event.details["signal"]], to)


class Pause(Kind):
    name = "pause a rank"

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        pid = processes.rank(event.rank)
        processes.send(signal.SIGSTOP, pid)
        time.sleep(1.0)
        processes.send(signal.SIGCONT, pid)


class Hang(Kind):
    """Hang longer than the watchdog waits. In a rank that was saving, nothing has to happen."""

    name = "hang a rank"
    expected = {1, 137}

    def possible(self, options: dict[str, Any], processes: int, place: str) -> bool:
        return processes > 1

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        pid = processes.rank(event.rank)
        processes.send(signal.SIGSTOP, pid)
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline and processes.is_running():
            time.sleep(0.1)
        processes.send(signal.SIGCONT, pid)


class FullDisk(Kind):
    """Fill the small disk; make room again after a second, or when the training has ended."""

    name = "fill the disk"
    expected = {1}

    def possible(self, options: dict[str, Any], processes: int, place: str) -> bool:
        return place == "small disk"

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        with suppress(OSError), open(folder / BALLAST, "wb") as file:
            for _ in range(64 * 2**20 // 65536 if folder.is_mount() else 0):
                file.write(b"x" * 65536)
                file.flush()
        time.sleep(1.0)
        self.undo(event, processes, folder)

    def undo(self, event: Event, processes: Processes, folder: Path) -> None:
        (folder / BALLAST).unlink(missing_ok=True)


class SmallFiles(Kind):
    """Make writes beyond some bytes of a file fail, in a running rank."""

    name = "limit the size of files"
    expected = {1, 120}
    """120 by Python, when its output goes to a file, which is limited too."""

    def details(self, rng: random.Random) -> dict[str, Any]:
        return {"bytes": rng.choice([3000, 6000, 20000])}

    def happen(self, event: Event, processes: Processes, folder: Path) -> None:
        pid = processes.rank(event.rank)
        if pid is not None:
            with suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (event.details["bytes"], resource.RLIM_INFINITY))


class Fault(Kind):
    """A fault in the writing of checkpoints, by trainer.testing."""

    name = "fault"

    def details(self, rng: random.Random) -> dict[str, Any]:
        action = rng.choice(["kill", "kill", "term", "int", "error", "full"])
        point, count = rng.choice(list(POINTS)), rng.randint(1, 40)
        return {"environment": fault(point, action, count, rng.choice([None, 0, 0, 1]))}

    def codes(self, event: Event) -> set[int]:
        return {*KILLED, 143, 130, 1}


class ClockJump(Kind):
    name = "clock jumps"

    def details(self, rng: random.Random) -> dict[str, Any]:
        return {"options": {"clock_jump": rng.choice([-1, 1]) * rng.choice([5.0, 4000.0, 200_000.0, 4e7])}}


FROM_THE_START: tuple[Kind, ...] = (Fault(), Fault(), ClockJump())
DURING: tuple[Kind, ...] = (
    KillRank(),
    KillRanks(),
    KillLauncher(),
    KillEverything(),
    KillWorker(),
    Stop(),
    Stop(),
    Pause(),
    Hang(),
    FullDisk(),
    SmallFiles(),
)
