"""A clock that a test moves, so that what depends on time does not depend on the machine's load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Stands in for the module `time` in a module under test."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def advance(self, seconds: float) -> None:
        self.now += seconds
