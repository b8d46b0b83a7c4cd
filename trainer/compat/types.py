"""Types that Lightning's users annotate with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, Union

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

EVALUATE_OUTPUT = list[Mapping[str, float]]
_PATH = Union[str, "os.PathLike[str]"]
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]


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
