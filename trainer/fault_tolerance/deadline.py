"""Stop and save a run before a given time."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime

from trainer.fault_tolerance.stop import DEADLINE, StopCoordinator

log = logging.getLogger("trainer")

_UNKNOWN_SAVE_S = 60.0
"""Assumed duration of a checkpoint before the first one."""
_RESERVE_S = 5.0


class Deadline:
    """A thread that asks all processes to stop when just enough time is left for the current step and a checkpoint.

    Args:
        when: the time before which the run has to end, with a time zone.
        margin: how many seconds before it to stop; None: measured in this run, as the longest time between two places
            where it can stop (validations and saves lie between them) plus one and a half times the longest save.
    """

    def __init__(self, when: datetime, margin: float | None = None) -> None:
        self.when = when
        self._margin = margin
        self._longest_save: float | None = None
        self._longest_stretch = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def margin(self) -> float:
        """Seconds before the deadline when the run is asked to stop, by the measurements so far."""
        if self._margin is not None:
            return self._margin
        save = _UNKNOWN_SAVE_S if self._longest_save is None else 1.5 * self._longest_save
        return self._longest_stretch + save + _RESERVE_S

    def saved(self, seconds: float) -> None:
        """Record how long a checkpoint took."""
        self._longest_save = max(seconds, self._longest_save or 0.0)

    def start(self, coordinator: StopCoordinator) -> None:
        """Start to watch the clock for the run that `coordinator` stops."""
        self._closed = threading.Event()
        self._longest_stretch = 0.0
        self._thread = threading.Thread(
            target=self._watch, args=(coordinator, self._closed), name="deadline", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Does nothing the second time."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join(timeout=2.0)
            self._thread = None

    def _watch(self, coordinator: StopCoordinator, closed: threading.Event) -> None:
        boundary, since = coordinator.boundaries, time.monotonic()
        while True:
            left = self.when.timestamp() - time.time() - self.margin
            if left <= 0:
                break
            if closed.wait(min(0.5, left)):
                return
            now = time.monotonic()
            # The first stretch is not like the others: it may include compilation.
            if coordinator.boundaries > 2:
                self._longest_stretch = max(self._longest_stretch, now - since)
            if coordinator.boundaries != boundary:
                boundary, since = coordinator.boundaries, now
        log.info("the deadline %s is %.0f s away: stopping", self.when.isoformat(" ", "seconds"), self.margin)
        coordinator.request(DEADLINE)
