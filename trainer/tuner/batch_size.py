"""The search for a batch size: try sizes until the memory is used up, and measure the samples per second of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from trainer.callback import Callback
from trainer.errors import ConfigError
from trainer.model.compile import compilations
from trainer.model.memory_limit import is_out_of_memory, limited_memory, release_memory

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.runs.resolved_config import ResolvedConfig
    from trainer.trainer import Trainer

LEAST_GROWTH = 1.05
"""A larger batch pays if there are 5 % more samples per second."""


@dataclass
class BatchSizes:
    """The sizes that were tried."""

    throughput: dict[int, float] = field(default_factory=dict)
    """Samples per second of each size that fits, in growing order."""
    too_large: list[int] = field(default_factory=list)
    """Sizes that did not fit into the memory."""
    chosen: int | None = None
    """The largest size that fits, less the margin of a search; None: no size fits."""

    @property
    def worthwhile(self) -> int | None:
        """The size above which the samples per second grow by less than 5 %."""
        sizes = sorted(self.throughput)
        for position, size in enumerate(sizes):
            if all(self.throughput[larger] < LEAST_GROWTH * self.throughput[size] for larger in sizes[position + 1 :]):
                return size
        return None

    def table(self) -> str:
        """Return a line for each size."""
        lines = [f"{size:>8}  {speed:>12,.0f} samples/s" for size, speed in sorted(self.throughput.items())]
        return "\n".join([*lines, *(f"{size:>8}  out of memory" for size in sorted(set(self.too_large)))])


class Stopwatch(Callback):
    """Measures the time of the steps, except for the first, which also allocates, and steps that compile."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.samples = self.first = 0
        """Samples of the measured steps, and of the first step."""
        self._at = 0.0
        self._counted = self._compilations = 0

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.device.type != "cpu":
            torch.accelerator.synchronize(trainer.device)
        now, compiled = time.perf_counter(), compilations()
        if trainer.global_step == 1:
            self.first = trainer.progress.samples
        elif compiled == self._compilations:
            self.samples += trainer.progress.samples - self._counted
            self.seconds += now - self._at
        self._at, self._counted, self._compilations = now, trainer.progress.samples, compiled

    def samples_per_second(self, size: int) -> float:
        """Return the samples per second of a trial with batches of `size`; NaN if each step has compiled.

        Raises:
            NoSuchBatchError: there were no batches of that size.
        """
        if 0 < self.first < size:
            raise NoSuchBatchError
        return self.samples / self.seconds if self.seconds else math.nan


class AgreedStopwatch(Stopwatch):
    """A stopwatch on several processes, for a trial with accumulate_grad_batches="auto", which splits large batches.

    Before the first hook of the training, each process has tried its batch alone, and all have agreed. So no process
    runs out of memory while the others wait for its gradients.
    """

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.fits = True
        """True until the batch of a process does not fit."""
        self.readers = 1
        self._limit = limit
        self._limited = ExitStack()

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._limited.enter_context(limited_memory(self._limit))

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._limited.close()
        self.readers = trainer.strategy.processes.readers
        self.fits = trainer.accumulate_grad_batches == 1
        if not self.fits:
            trainer.stop("the batch does not fit into the memory of every process")

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Take the time of the slowest process, so that all choose alike. Collective."""
        self.seconds = max(trainer.strategy.processes.all_gather_object(self.seconds))

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._limited.close()

    def samples_per_second(self, size: int) -> float:
        """Return the samples per second of all processes, as the base class.

        Raises:
            MemoryError: the batch does not fit.
            NoSuchBatchError: there were no batches of that size.
        """
        if not self.fits:
            raise MemoryError
        return super().samples_per_second(size * self.readers)


class NoSuchBatchError(Exception):
    """Raised by a trial whose batches are smaller than requested, because there are no more samples."""


def search(
    attempt: Callable[[int], float], mode: str, init_val: int, max_trials: int, max_val: int, margin: float
) -> BatchSizes:
    """Find the largest size for which `attempt`, which returns samples per second, does not run out of memory.

    Doubles the size until the memory is used up, and with mode "binsearch" halves the distance between the largest
    size that fits and the smallest that does not.
    """
    found, size, fits, fails = BatchSizes(), min(init_val, max_val), 0, max_val + 1
    for _ in range(max_trials):
        try:
            found.throughput[size] = attempt(size)
            fits = size
        except NoSuchBatchError:
            break
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            found.too_large.append(size)
            fails = size
            del error
            release_memory()
        if fails > max_val and fits < max_val:
            size = min(2 * fits, max_val)
        elif mode == "binsearch" and fails - fits > 1 and fits:
            size = (fits + fails) // 2
        elif not fits and size > 1:
            size //= 2
        else:
            break
    found.throughput = dict(sorted(found.throughput.items()))
    if fits:
        found.chosen = max(1, int(fits * (1 - margin))) if mode == "binsearch" and found.too_large else fits
    return found


def check_search(
    method: str, mode: str, steps_per_trial: int, init_val: int, max_trials: int, max_val: int, margin: float
) -> None:
    """Raise a ConfigError for arguments that allow no search."""
    least = min(steps_per_trial - 1, init_val, max_trials, max_val)
    if method != "fit" or mode not in ("power", "binsearch") or least < 1 or not 0 <= margin < 1:
        raise ConfigError(
            f"scale_batch_size({method=}, {mode=}, {steps_per_trial=}, {init_val=}, {max_trials=}, {max_val=}, "
            f"{margin=}): the method is 'fit', the mode 'power' or 'binsearch'. Give integers from 1, 2 steps, "
            "and a margin from 0 and below 1."
        )


def check_several(config: ResolvedConfig, module: TrainModule) -> None:
    """Raise a ConfigError if a batch cannot be tried on each of several processes."""
    if config.strategy.shards_state or config.device_type in ("xla", "tpu"):
        raise ConfigError(
            "scale_batch_size on several processes needs processes that can run out of memory alone: use "
            f"strategy='ddp' in place of {config.strategy.name!r}, or `trainer estimate` for the samples that fit."
        )
    if not module.automatic_optimization:
        raise ConfigError("scale_batch_size on several processes needs automatic optimization: use devices=1.")
