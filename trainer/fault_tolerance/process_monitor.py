"""The other processes of a run on this machine: noticing at once that one of them has ended without a word."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING

from trainer.distributed.environment import detect_environment
from trainer.fault_tolerance.failure import report_dead_process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class LocalProcessMonitor:
    """Watches the processes of the same machine by their process ids (Linux; elsewhere it sees nothing).

    A process that was killed can tell nobody, and under NCCL those that wait for it would wait for ever. Its siblings
    see it vanish, and say so for it in the store.

    Args:
        store: shared by all processes of the run; for one caller at a time.
        rank, world_size: of this process.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._place = _this_machine()
        self._watched: dict[int, int] = {}  # file descriptor of a process: its rank
        self._events = select.poll() if self._place else None
        environment = detect_environment()
        first = rank - environment.local_rank
        self._unknown = [r for r in range(first, first + environment.local_world_size) if r != rank and r < world_size]
        store.set(f"process/{rank}", f"{self._place} {os.getpid()}")

    def look(self) -> None:
        """Report those that have ended since the last look and had not said that they are done. Does not wait."""
        if self._events is None:
            return
        keys = [f"process/{rank}" for rank in self._unknown]
        if keys and self._store.check(keys):
            self._open(dict(zip(self._unknown, self._store.multi_get(keys), strict=True)))
            self._unknown = []
        for descriptor, _ in self._events.poll(0):
            rank = self._watched.pop(descriptor)
            self._events.unregister(descriptor)
            os.close(descriptor)
            if not self._store.check([_done(rank)]):
                report_dead_process(self._store, rank, self._world_size)

    def close(self) -> None:
        """Watch no longer."""
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
        self._events = None

    def _open(self, processes: dict[int, bytes]) -> None:
        assert self._events is not None
        for rank, process in processes.items():
            place, _, pid = process.decode().rpartition(" ")
            if place != self._place:
                continue
            try:
                descriptor = os.pidfd_open(int(pid))
            except ProcessLookupError:
                if not self._store.check([_done(rank)]):
                    report_dead_process(self._store, rank, self._world_size)
            except OSError:
                continue  # the kernel, or its sandbox, does not know how
            else:
                self._watched[descriptor] = rank
                self._events.register(descriptor, select.POLLIN)


def mark_done(store: Store, rank: int) -> None:
    """Before a process leaves a run that ended well: from now on it may vanish."""
    store.set(_done(rank), "1")


def _done(rank: int) -> str:
    return f"done/{rank}"


def _this_machine() -> str:
    """What tells process ids of different machines and containers apart; empty where nothing does."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
