"""Deadline: a time of day before which a run has stopped and saved."""

from __future__ import annotations

import logging
import threading
import time
from datetime import datetime

from trainer.fault_tolerance.stop import DEADLINE, StopCoordinator

log = logging.getLogger("trainer")

_UNKNOWN_SAVE_S = 60.0
"""What writing a checkpoint is supposed to take while none has been written."""
_RESERVE_S = 5.0


class Deadline:
    """A thread that asks all processes to stop when what is left is just enough for this step and a checkpoint.

    Args:
        when: to have ended before, with a time zone.
        margin: seconds before it to ask; None: learnt from this run: the longest time between two places where it can
            stop (validations and saves lie between them), and one and a half times the longest save.
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
        """Seconds before the deadline at which the run is asked to stop, as far as is known now."""
        if self._margin is not None:
            return self._margin
        save = _UNKNOWN_SAVE_S if self._longest_save is None else 1.5 * self._longest_save
        return self._longest_stretch + save + _RESERVE_S

    def saved(self, seconds: float) -> None:
        """Remember how long a checkpoint took."""
        self._longest_save = max(seconds, self._longest_save or 0.0)

    def start(self, switch: StopCoordinator) -> None:
        """Begin to watch the clock for the run that `switch` stops."""
        self._closed = threading.Event()
        self._longest_stretch = 0.0
        self._thread = threading.Thread(target=self._watch, args=(switch, self._closed), name="deadline", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer. Does nothing the second time."""
        if self._thread is not None:
            self._closed.set()
            self._thread.join(timeout=2.0)
            self._thread = None

    def _watch(self, switch: StopCoordinator, closed: threading.Event) -> None:
        boundary, since = switch.boundaries, time.monotonic()
        while True:
            left = self.when.timestamp() - time.time() - self.margin
            if left <= 0:
                break
            if closed.wait(min(0.5, left)):
                return
            now = time.monotonic()
            # The stretch before the first step is not like the others: it may hold compilation.
            if switch.boundaries > 2:
                self._longest_stretch = max(self._longest_stretch, now - since)
            if switch.boundaries != boundary:
                boundary, since = switch.boundaries, now
        log.info("the deadline %s is %.0f s away: stopping", self.when.isoformat(" ", "seconds"), self.margin)
        switch.request(DEADLINE)
