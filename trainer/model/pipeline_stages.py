"""Cut blocks into the stages of a pipeline, and compute how long its stages wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_Cut = tuple[int, tuple[int, ...]]
"""The largest sum of a stage, and where each stage ends."""


def cut_blocks(sizes: Sequence[int], stages: int) -> list[int]:
    """Return where each stage ends: the largest sum of a stage is as small as it can be, and no stage is empty."""
    return list(_cut_blocks(tuple(sizes), stages))


@lru_cache(maxsize=256)
def _cut_blocks(sizes: tuple[int, ...], stages: int) -> tuple[int, ...]:
    count, sums = len(sizes), [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    best: dict[int, _Cut] = {0: (0, ())}
    for stage in range(1, stages + 1):
        best = {end: _last_cut(sums, best, stage - 1, end) for end in range(stage, count - (stages - stage) + 1)}
    return best[count][1]


def _last_cut(sums: list[int], before: dict[int, _Cut], first: int, end: int) -> _Cut:
    """Return the best cut of the blocks up to `end`, from the cuts of one stage less that end at `first` or later."""
    found: _Cut | None = None
    for start in range(min(end - 1, max(before)), first - 1, -1):
        last = sums[end] - sums[start]
        if found is not None and last > found[0]:
            break  # a stage that begins earlier is larger still
        largest, ends = before[start]
        cut = (max(largest, last), (*ends, end))
        found = cut if found is None else min(found, cut)
    assert found is not None
    return found


def bubble(stages: int, window: int) -> float:
    """Return the share of a step that a stage of a 1F1B pipeline spends waiting (https://arxiv.org/abs/2006.09503)."""
    return (stages - 1) / (window + stages - 1)
