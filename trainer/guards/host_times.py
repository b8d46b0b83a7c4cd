"""HostTimes: the seconds that the host spends in the parts of a training run, without asking the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainer.metrics.phases import DATA, LOGGING, TRANSFER

CALLBACKS = "callbacks"
SAVING = "saving"
VALIDATION = "validation"
PROFILER = "the profiler itself"
REST = "the steps and the rest"


class HostTimes:
    """Measure the time of each part without the parts inside it, so that all parts add up to the total.

    The host's waits for its device, such as for logged values, count as time of the steps.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((DATA, TRANSFER, CALLBACKS, LOGGING, SAVING, VALIDATION), 0.0)
        """Seconds of each part until now, without the rest. The loop itself adds its waits for data.

        Of transfers only those through a module's or data module's own hooks are measured.
        """
        self._inside = 0.0  # the time of the parts that have ended within the part in progress
        self._begun: float | None = None

    def begin(self) -> None:
        """Start to measure, from zero."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self._begun = time.perf_counter()

    def shares(self) -> dict[str, float]:
        """Return the share of each part, and of the rest, of the time since the beginning; empty before that."""
        if self._begun is None:
            return {}
        total = time.perf_counter() - self._begun
        rest = max(0.0, total - sum(self.seconds.values()))
        return {part: seconds / total for part, seconds in {**self.seconds, REST: rest}.items()}

    def line(self) -> str:
        """Return the shares in one line, largest first, without those below half a percent; "" without a batch."""
        if self._begun is None or not self.seconds[DATA]:
            return ""
        shares = sorted(self.shares().items(), key=lambda item: -item[1])
        shown = ", ".join(f"{part} {share:.0%}" for part, share in shares if share >= 0.005)
        advised = shares[0][0] == REST or PROFILER in self.seconds
        hint = "" if advised else '; Trainer(profiler="bound") says what to change'
        return f"{time.perf_counter() - self._begun:.1f} s of the host: {shown}{hint}"

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part, which may be a new one."""
        before, self._inside, begun = self._inside, 0.0, time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds - self._inside
            self._inside = before + seconds

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the time of its calls added to a part."""

        def call(*args: Any) -> Any:
            before, self._inside, begun = self._inside, 0.0, time.perf_counter()
            try:
                return function(*args)
            finally:
                seconds = time.perf_counter() - begun
                self.seconds[part] += seconds - self._inside
                self._inside = before + seconds

        return call
