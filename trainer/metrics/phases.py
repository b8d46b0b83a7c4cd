"""Notify profilers when each phase of a run starts and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

DATA = "data wait"
TRANSFER = "transfer to device"
FORWARD = "forward (training_step)"
BACKWARD = "backward"
OPTIMIZER = "optimizer step"
LOGGING = "logging"
CHECKPOINT = "checkpoint"
EVALUATION_DATA = "validation data wait"
EVALUATION = "validation_step"

Phase = Callable[[str], AbstractContextManager[None]]
"""`with phase(FORWARD): ...`. Phases nest; hooks are phases too, named `"Class.hook"` and `"module.hook"`."""

Item = TypeVar("Item")
Returned = TypeVar("Returned")


@runtime_checkable
class PhaseListener(Protocol):
    """Listener interface: a callback with these methods is notified of all phases of its runs."""

    def begin_phase(self, name: str) -> None: ...
    def end_phase(self, name: str) -> None: ...


def phase_of(callbacks: Iterable[Any]) -> Phase:
    """Return the `phase` of a run, which notifies the callbacks that are listeners."""
    able = (callback for callback in callbacks if issubclass(type(callback), PhaseListener))
    listeners = tuple(callback for callback in able if getattr(callback, "hears_phases", True))
    return partial(_AnnouncedPhase, listeners) if listeners else unheard


def unheard(name: str) -> AbstractContextManager[None]:
    """Return a context that notifies no listener."""
    return _SILENT


def during(phase: Phase, name: str, function: Callable[..., Returned]) -> Callable[..., Returned]:
    """Return a function that reports each call as a phase; the function itself if nothing listens."""
    if phase is unheard:
        return function

    def call(*args: Any, **options: Any) -> Returned:
        with phase(name):
            return function(*args, **options)

    return call


def each_wait(phase: Phase, name: str, items: Iterator[Item]) -> Iterator[Item]:
    """Yield `items`; each wait for the next item is a phase."""
    return items if phase is unheard else _each_wait(phase, name, items)


def _each_wait(phase: Phase, name: str, items: Iterator[Item]) -> Iterator[Item]:
    while True:
        with phase(name):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


_SILENT = nullcontext()


class _AnnouncedPhase:
    def __init__(self, listeners: tuple[PhaseListener, ...], name: str) -> None:
        self.listeners = listeners
        self.name = name

    def __enter__(self) -> None:
        for listener in self.listeners:
            listener.begin_phase(self.name)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for listener in self.listeners:
            listener.end_phase(self.name)


class PhaseClock:
    """Counts the time of phases, each without the phases inside it.

    Args:
        clock: returns the time, in seconds.
        outside: the name of the time outside of all phases.
    """

    def __init__(self, clock: Callable[[], float], outside: str) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by phase."""
        self._clock, self._outside = clock, outside
        self._inside: list[str] = []
        self._last = 0.0
        self.runs = False
        """True between `start` and `stop`, when time outside of all phases is counted, too."""

    def start(self) -> None:
        """Begin again, outside of all phases."""
        self.seconds.clear()
        self._inside.clear()
        self._last, self.runs = self._clock(), True

    def stop(self) -> None:
        """Leave out what follows, except for phases."""
        self.count()
        self.runs = False

    def begin(self, name: str) -> None:
        """Count what follows as time of the phase, until another one begins inside it."""
        self.count()
        self._inside.append(name)

    def end(self, name: str) -> None:
        """Count what follows as time of the phase around this one."""
        self.count()
        if name in self._inside:
            # The phases inside it have ended, too, even where an exception skipped their end.
            while self._inside.pop() != name:
                pass

    def count(self) -> None:
        """Add the time since the last call to the innermost phase."""
        now = self._clock()
        if self._inside or self.runs:
            name = self._inside[-1] if self._inside else self._outside
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
