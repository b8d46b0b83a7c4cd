"""The processes of one start of a training: its launcher, ranks and data workers, and their leftovers (Linux)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from trainer.testing import Running, alive, descendants, rank_of

READY_S = 900.0
GONE_S = 30.0
"""Seconds in which processes have to end after their parent has ended."""
LISTENS = "0A"
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc shows them."""


class Processes:
    """All processes that inherited the mark in their environment, whatever their current parent."""

    def __init__(self, running: Running, mark: str, launched: bool, world_size: int) -> None:
        self.running, self.launched, self.world_size = running, launched, world_size
        self._mark = mark.encode()

    def all(self) -> list[int]:
        """Return the running processes of this start."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self._mark in file.read_bytes().split(b"\0") and alive(int(file.parent.name)):
                    found.append(int(file.parent.name))
        return found

    def rank(self, number: int) -> int | None:
        """Return the process of a rank; None if there is not one now."""
        if not self.launched:
            return self.running.pid if self.is_running() else None
        try:
            return rank_of(self.running.pid, number)
        except AssertionError:
            return None

    def workers(self, rank: int) -> list[int]:
        """Return the data workers of a rank."""
        pid = self.rank(rank)
        return [] if pid is None else [child for child in descendants(pid) if alive(child)]

    def is_running(self) -> bool:
        return self.running.process.poll() is None

    def wait_for_ready(self, early: bool) -> bool:
        """Wait until training has begun, unless `early`; return False if the processes ended before."""
        deadline = time.monotonic() + READY_S
        while self.is_running() and not early and "ready" not in self.running.stdout:
            if time.monotonic() > deadline:
                raise AssertionError(f"training has not begun after {READY_S:.0f} s\n{self.running}")
            time.sleep(0.02)
        return self.is_running()

    def send(self, number: int, *pids: int | None) -> None:
        """Send a signal to the processes that still exist."""
        for pid in pids:
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def reachable(self) -> list[str]:
        """Return the addresses, in the notation of /proc, where these processes listen to other machines."""
        sockets = {link for pid in self.all() for link in _links(Path(f"/proc/{pid}/fd")) if link.startswith("socket:")}
        found = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, address, _, state, *_, inode = line.split()[:10]
                is_ours = state == LISTENS and f"socket:[{inode}]" in sockets
                if is_ours and address.partition(":")[0] not in LOOPBACK:
                    found.append(address)
        return found

    def left_behind(self) -> list[str]:
        """Wait for all processes to end; kill the others, and return their command lines."""
        deadline = time.monotonic() + GONE_S
        while (left := self.all()) and time.monotonic() < deadline:
            time.sleep(0.1)
        lines = []
        for pid in left:
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                lines.append(f"{pid} (child of {_parent(pid)}): {command[:200]}")
            self.send(9, pid)
        return lines

    @staticmethod
    def left_in_shared_memory(before: set[str]) -> list[str]:
        """Return new segments that stay in /dev/shm; other programs' segments disappear soon."""
        deadline = time.monotonic() + 5
        while (new := Processes.shared_memory() - before) and time.monotonic() < deadline:
            time.sleep(0.5)
        return sorted(new)

    @staticmethod
    def shared_memory() -> set[str]:
        """Return the segments in /dev/shm that no process has open.

        Without Python's semaphores: a kill between their creation and their removal from the folder, which follows at
        once, leaves 32 bytes, whatever the program.
        """
        kinds = ("torch_*", "psm_*", "deepspeed*", "gloo*")
        names = {str(path) for kind in kinds for path in Path("/dev/shm").glob(kind)}
        if not names:
            return names
        used: set[str] = set()
        for process in Path("/proc").glob("[0-9]*"):
            used |= names & set(_links(process / "fd"))
            with suppress(OSError):
                used |= {name for name in names if name in (process / "maps").read_text()}
        return names - used


def _links(folder: Path) -> list[str]:
    found = []
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                found.append(os.readlink(entry))
    return found


def _parent(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
