"""Count compilations, and warn of code that is compiled again and again."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Hashable

log = logging.getLogger("trainer")

MOST_WARNINGS = 10


class RecompilationMonitor:
    """Counters of a run, for a compiler's subclass, which reads its records and calls `add_recompilation`.

    Args:
        threshold: recompilations for one cause until a warning.
    """

    def __init__(self, threshold: int = 1) -> None:
        self.threshold = threshold
        self.compilations = 0
        """Number of graphs compiled in this process."""
        self.recompilations: Counter[Hashable] = Counter()
        """Number of recompilations by cause."""

    def add_recompilation(self, cause: Hashable, warning: str) -> None:
        """Count a recompilation, and log the warning if it is time for it."""
        self.recompilations[cause] += 1
        warned = sum(count >= self.threshold for count in self.recompilations.values())
        if self.recompilations[cause] == self.threshold and warned <= MOST_WARNINGS:
            last = " That was the last warning of this kind." if warned == MOST_WARNINGS else ""
            log.warning("%s%s", warning, last)


def compilations() -> int:
    """Return how many graphs torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
