"""Cut blocks into the stages of a pipeline, and compute how long its stages wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def cut_blocks(sizes: Sequence[int], stages: int) -> list[int]:
    """Return where each stage ends: the largest sum of a stage is as small as it can be, and no stage is empty."""
    return list(_cut_blocks(tuple(sizes), stages))


@lru_cache(maxsize=256)
def _cut_blocks(sizes: tuple[int, ...], stages: int) -> tuple[int, ...]:
    count, sums = len(sizes), [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(largest, sums[end] - sums[start]), (*ends, end))
                for start, (largest, ends) in best.items()
                if start < end
            )
            for end in range(stage, count - (stages - stage) + 1)
        }
    return best[count][1]


def bubble(stages: int, window: int) -> float:
    """Return the share of a step in which a stage of a 1F1B pipeline waits (https://arxiv.org/abs/2006.09503)."""
    return (stages - 1) / (window + stages - 1)
