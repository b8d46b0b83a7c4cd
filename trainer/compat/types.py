"""Types that Lightning's users annotate with."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypedDict, Union, runtime_checkable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

EVALUATE_OUTPUT = list[Mapping[str, float]]
PATH = Union[str, "os.PathLike[str]"]
OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]
IS_WINDOWS = sys.platform == "win32"
IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)


@runtime_checkable
class Optimizable(Protocol):
    """An object like an optimizer."""

    param_groups: list[dict[Any, Any]]

    def step(self, closure: Callable[[], float] | None = None) -> float | None: ...


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
