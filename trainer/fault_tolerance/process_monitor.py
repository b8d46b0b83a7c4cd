"""Notice at once when another process of the run on this machine dies without reporting an error."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

from trainer.distributed.environment import detect_environment
from trainer.fault_tolerance.failure import report_dead_process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class LocalProcessMonitor:
    """Watch the processes of the same machine by their process ids (Linux only; elsewhere it notices nothing).

    A killed process cannot report its death, and under NCCL the others would wait for it forever. The processes of the
    same machine see it vanish, and report it in the store.

    Args:
        store: shared by all processes of the run; for one caller at a time.
        rank, world_size: of this process.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._machine = _machine_id()
        self._watched: dict[int, int] = {}  # pidfd of a process: its rank
        self._events = select.poll() if self._machine else None
        environment = detect_environment()
        first = rank - environment.local_rank
        self._unknown = [r for r in range(first, first + environment.local_world_size) if r != rank and r < world_size]
        store.set(f"process/{rank}", f"{self._machine} {os.getpid()}")

    def poll(self) -> None:
        """Report the processes that have ended since the last call without `mark_done`. Does not wait."""
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
            self._report_unless_done(rank)

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()
        self._events = None

    def _open(self, processes: dict[int, bytes]) -> None:
        assert self._events is not None
        for rank, process in processes.items():
            machine, _, pid = process.decode().rpartition(" ")
            if machine != self._machine:
                continue
            try:
                descriptor = os.pidfd_open(int(pid))
            except ProcessLookupError:
                self._report_unless_done(rank)
            except OSError:
                continue  # not supported by the kernel or its sandbox
            else:
                self._watched[descriptor] = rank
                self._events.register(descriptor, select.POLLIN)

    def _report_unless_done(self, rank: int) -> None:
        if not self._store.check([_done_key(rank)]):
            report_dead_process(self._store, rank, self._world_size)


def mark_done(store: Store, rank: int) -> None:
    """Record that a process leaves a run that ended well: from now on it may vanish."""
    store.set(_done_key(rank), "1")


def _done_key(rank: int) -> str:
    return f"done/{rank}"


def _machine_id() -> str:
    """Return an id of the process id namespace (machine or container); empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
