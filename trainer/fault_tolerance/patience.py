"""Patience: for how long a run may do nothing, learnt from how long it has done nothing before."""

from __future__ import annotations

LEAST_S = 60.0
"""The shortest limit that is learnt."""
TIMES = 10.0
"""How many times the longest pause so far is too long."""
TRAINING = "training"
"""The moment in which a run is most of the time: between the first step of an epoch and its last one."""


class LearntLimit:
    """How long a pause may be, by the moment of the run in which it is: training, validation, the end of an epoch, ...

    The limit is `TIMES` the longest pause of that moment and of the first step, which may have compiled, and `LEAST_S`
    at least. A moment that the run has not yet been through, as a whole and back to training, has no limit yet:
    nobody knows how long the first validation takes.

    Args:
        unknown: seconds, where nothing is learnt yet.
    """

    def __init__(self, unknown: float) -> None:
        self._unknown = unknown
        self._longest: dict[str, float] = {}
        self._first = 0.0
        self._begun = False
        self._known = {TRAINING}
        self._new: set[str] = set()

    def seen(self, moment: str, allow_slow: bool, pause: float) -> None:
        """A pause of so many seconds has ended, in which the run was in `moment`. `allow_slow`: as in `Watchdog`."""
        if allow_slow:
            if not self._begun:
                self._first = max(self._first, pause)
            return
        self._longest[moment] = max(self._longest.get(moment, 0.0), pause)
        if moment == TRAINING:
            self._known |= self._new
            self._new.clear()
        else:
            self._new.add(moment)

    def limit(self, moment: str, allow_slow: bool) -> float:
        """Seconds after which a pause in `moment` is too long."""
        self._begun = self._begun or not allow_slow
        if allow_slow or moment not in self._known:
            return self._unknown
        return max(LEAST_S, TIMES * max(self._first, self._longest.get(moment, 0.0)))
