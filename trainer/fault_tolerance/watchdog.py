"""Show where each process of a hanging run stands, and end them all."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import format_ranks
from trainer.fault_tolerance.failure import first_failure, write_error
from trainer.fault_tolerance.flight_recorder import waiting_in
from trainer.fault_tolerance.process_monitor import mark_done
from trainer.fault_tolerance.stacks import stacks, where

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SLOW_LIMIT_S = 1800.0
"""The least limit while `allow_slow`: as long as a collective waits."""
_EXPIRED, _REPORTED = "watchdog/expired", "watchdog/reported"


class Watchdog:
    """A thread in every process that checks that the main thread makes progress.

    The main thread only increments `heartbeats`. A process without a heartbeat for the limit reports it in the store;
    then all processes print the stacks of their Python threads to stderr, the first one names the rank that is behind,
    and all end with exit code 1. A process that cannot even do that, because something holds the interpreter's lock,
    is ended by `faulthandler`, which prints its stacks as well.
    """

    def __init__(self) -> None:
        self.heartbeats = 0
        """All processes pass the same places in the same order: the one with the fewest heartbeats is behind."""
        self.allow_slow = True
        """True during what may take longer than a step: the first step (compilation), a checkpoint, the end."""
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        limit: float | None,
        step: Callable[[], int],
        folder: Path | None = None,
    ) -> None:
        """Start to watch; do nothing for a single process (`store` None) or without a limit.

        Args:
            store: shared by the processes of this run (`StopCoordinator.store`).
            rank, world_size: of this process.
            limit: seconds without a heartbeat after which the run counts as hung.
            step: returns the number of steps done.
            folder: for what torch has recorded of the collectives, if the run hangs.
        """
        self.allow_slow = True
        if store is None or limit is None:
            return
        own: Any = store  # torch's stubs do not know `clone`
        self._store, self._rank, self._world_size, self._limit = own.clone(), rank, world_size, limit
        self._step, self._folder = step, folder
        self._since = time.monotonic()
        """The time of the latest sign of life."""
        self._interval = min(2.0, limit / 10)
        """Seconds between two looks."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._closed,), name="watchdog", daemon=True)
        self._thread.start()
        # A daemon thread that returns from C++ while Python exits would abort the process.
        atexit.register(self.stop)

    def expect_slow_work(self) -> None:
        """Wait longer for the next heartbeat, from now on."""
        self.allow_slow = True

    def stop(self) -> None:
        """Stop watching. Does nothing the second time."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join(timeout=2.0)
            self._thread = None
            faulthandler.cancel_dump_traceback_later()
            atexit.unregister(self.stop)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _watch(self, closed: threading.Event) -> None:
        try:
            self._look_until(closed)
        except Exception:
            # Without the store (its process is gone) nothing can be found out; processes that need it will fail.
            faulthandler.cancel_dump_traceback_later()

    def _look_until(self, closed: threading.Event) -> None:
        seen = (-1, True)
        while True:
            now = (self.heartbeats, self.allow_slow)
            if now != seen:
                seen, self._since = now, time.monotonic()
            limit = max(self._limit, _SLOW_LIMIT_S) if self.allow_slow else self._limit
            # The file descriptor, because sys.stderr may be an object without one.
            faulthandler.dump_traceback_later(limit + 3 * self._interval, file=2, exit=True)
            if closed.wait(self._interval):
                return
            if first_failure(self._store) is not None:
                continue  # the run is ending already
            now = (self.heartbeats, self.allow_slow)
            if time.monotonic() - self._since > limit and seen == now:
                self._store.compare_set(_EXPIRED, "", f"{self._rank} {limit:g}")
            if self._store.check([_EXPIRED]):
                self._end()

    def _end(self) -> None:
        """Print where this process stands, wait until all processes have done so, and exit."""
        faulthandler.cancel_dump_traceback_later()
        try:
            rank, limit = self._store.get(_EXPIRED).decode().split()
            silent = time.monotonic() - self._since
            state = {"step": self._step(), "heartbeats": self.heartbeats, "silent": silent, "where": where()}
            state["collective"] = waiting_in(self._folder, self._rank)
            head = f"rank {self._rank} of {self._world_size}, {silent:.0f} s after its last sign of life:\n"
            write_error(head + stacks())
            self._store.set(f"watchdog/{self._rank}", json.dumps(state))
            # The launcher ends the other processes as soon as one exits.
            deadline = time.monotonic() + 3 * self._interval + 3.0
            if self._rank == int(rank):
                self._wait_for([f"watchdog/{other}" for other in range(self._world_size)], deadline)
                write_error(self._report(float(limit)))
                self._store.set(_REPORTED, "1")
            else:
                self._wait_for([_REPORTED], deadline + 1.0)
        finally:
            with suppress(Exception):
                mark_done(self._store, self._rank)
            os._exit(1)

    def _wait_for(self, keys: list[str], deadline: float) -> None:
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _report(self, limit: float) -> str:
        keys = {rank: f"watchdog/{rank}" for rank in range(self._world_size)}
        states = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        silent = [rank for rank in keys if rank not in states]
        least = min(state["heartbeats"] for state in states.values())
        behind = [rank for rank, state in states.items() if state["heartbeats"] == least]
        if silent:
            who = f"{format_ranks(silent)} did not answer: stopped, or something there holds Python's interpreter lock."
        elif len(behind) < self._world_size:
            who = f"behind the others: {format_ranks(behind)}."
        else:
            who = "No rank is behind the others; the stacks above show what each one waits for."
        if len({state["collective"] for state in states.values()}) > 1:
            who += " The processes are not in the same collective."
        lines = [f"the run hangs: no progress for {limit:g} s (watchdog_seconds). {who}"]
        for rank, state in sorted(states.items(), key=lambda one: one[1]["heartbeats"])[:16]:
            place = "; ".join(filter(None, (state["where"], state["collective"])))
            lines.append(
                f"  rank {rank}: {state['step']} steps done, last sign of life {state['silent']:.1f} s ago, in {place}"
            )
        return "\n".join(lines) + "\n"
