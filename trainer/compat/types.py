"""Types that Lightning's users annotate with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict, Union

EVALUATE_OUTPUT = list[Mapping[str, float]]
_PATH = Union[str, "os.PathLike[str]"]


class LRSchedulerConfigType(TypedDict, total=False):
    """A scheduler with its stepping schedule, as `configure_optimizers` returns it."""

    scheduler: Any
    name: str | None
    interval: str
    frequency: int
    reduce_on_plateau: bool
    monitor: str | None
    strict: bool


class OptimizerConfig(TypedDict):
    """An optimizer, as `configure_optimizers` may return it."""

    optimizer: Any


class OptimizerLRSchedulerConfig(TypedDict):
    """An optimizer and its scheduler, as `configure_optimizers` may return them."""

    optimizer: Any
    lr_scheduler: Any
