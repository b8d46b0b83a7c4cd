"""Batch: what a loader gives for one micro-batch, with how many samples it stands for."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """One micro-batch of one process."""

    data: Any
    """What the loader yielded."""
    samples: int | None
    """How many samples of the epoch it holds; None if unknown. 0 marks a filler: it is there only so that this process
    takes as many steps as the others, and has weight zero."""
    total: int | None
    """Samples of this micro-batch over all processes; None if unknown."""
