"""Background calls: a separate thread makes the calls of a tracker's client, in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("trainer")

LONGEST_QUEUE = 100_000
"""Calls that wait at most, for a client that hangs; what comes later is left out, with an error."""


class BackgroundCalls:
    """Makes calls in order, in a separate thread, so that a slow client delays no step.

    An error of a call is logged, once for each kind, and the calls after it are made: a tracker that cannot be reached
    ends no training.

    Args:
        owner: the name of the logger, for messages.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...], Any]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._reported: set[str] = set()
        self.failed = self.left_out = 0
        """Calls that raised an error, and calls for which there was no room."""

    def call(self, function: Callable[..., object], *args: Any, keep: Any = None) -> None:
        """Queue a call of `function` for the thread; `unfinished` holds `keep` until the call is done."""
        with self._changed:
            if len(self._waiting) >= LONGEST_QUEUE:
                self.left_out += 1
                return
            self._waiting.append((function, args, keep))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"{self.owner}-calls", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def unfinished(self) -> list[Any]:
        """Return what was to be kept of the calls that are not done."""
        with self._changed:
            return [keep for _, _, keep in self._waiting if keep is not None]

    def wait(self, seconds: float) -> bool:
        """Wait until all calls are done, and end the thread; return False if they are not after so many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting, max(0.0, deadline - time.monotonic()))
            if done:
                self._thread = None
                self._changed.notify_all()
            waiting = len(self._waiting)
        if not done:
            log.error("%s: %d calls are not done after %.0f s, and are given up.", self.owner, waiting, seconds)
        if self.failed or self.left_out:
            lost = f"{self.failed} calls failed, and for {self.left_out} there was no room"
            log.error("%s: %s: the tracker lacks what they had.", self.owner, lost)
            self.failed = self.left_out = 0
        return done

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._thread is not me)
                if self._thread is not me:  # ended by `wait`; calls since then are another thread's
                    return
                function, args, _ = self._waiting[0]
            try:
                function(*args)
            except Exception as error:
                self.failed += 1
                kind = f"{type(error).__name__} in {getattr(function, '__name__', function)}"
                if kind not in self._reported:
                    self._reported.add(kind)
                    log.warning("%s: %s: %s. Training goes on. (Logged once.)", self.owner, kind, error)
            del function, args
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
