"""ThroughputMonitor: log samples, tokens and floating-point operations per second."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from trainer.arguments import Limit, PositiveInt, number_of
from trainer.callback import Callback, problem_of_several
from trainer.model.compile import compilations
from trainer.model.peak_flops import peak_of

if TYPE_CHECKING:
    from trainer.loop.progress import Progress
    from trainer.module import TrainModule
    from trainer.runs.resolved_config import ResolvedConfig
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class Snapshot(NamedTuple):
    """The progress at the end of a step. Validation does not count in `time` (seconds)."""

    time: float
    steps: int
    batches: int
    samples: int
    items: int


class ThroughputMonitor(Callback):
    """Log rates over the last `window_size` steps of training, every `log_every_n_steps`, without validation.

    The clock is the host's, and the device is never synchronized: a device that lags behind the host by a few steps
    makes a rate noisier, not biased. The window begins after the first step, and after each step that torch.compile
    compiles in. Logs `throughput/steps_per_s`, `throughput/batches_per_s`, `throughput/samples_per_s` (if the number of
    samples is known) and, on request, `throughput/tokens_per_s`, `throughput/flops_per_s` and `throughput/mfu`. All
    rates are sums over the processes. MFU (model FLOPs utilization, https://arxiv.org/abs/2204.02311) is the fraction
    of the devices' peak.

    Args:
        batch_size_fn: function of a batch; returns the samples in one micro-batch of one process. Default: the
            DataLoader's number.
        length_fn: Lightning's name of `items_per_batch`; sets `items_name` to "items".
        window_size: the number of steps in a rate.
        items_per_batch: tokens (or other items) in one micro-batch of one process: a number, or a function of the
            batch. The function should use shapes only: reading a value from a tensor waits for the device.
        items_name: the items' name in `throughput/<items_name>_per_s`. Default: "tokens".
        flops_per_sample: floating-point operations of training on one sample, forward and backward (about 6 x
            parameters x tokens for a transformer): a number, or a function of the module, called once.
        separator: text between "throughput" and the rate in the names of the values.
        peak_flops: the peak of one device in FLOP/s. Default: the vendor's, from a table of NVIDIA cards, for the
            run's precision. `trainer doctor` measures a peak for every other device.
    """

    agree_on = ("items_name",)

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: PositiveInt = 100,
        separator: str = "/",
        items_per_batch: PositiveInt | Callable[[Any], int] | None = None,
        items_name: str | None = None,
        flops_per_sample: float | Callable[[TrainModule], float] | None = None,
        peak_flops: Annotated[float, Limit("above", 0)] | None = None,
    ) -> None:
        super().__init__()
        self.batch_size_fn, self.length_fn = batch_size_fn, length_fn
        self.items_per_batch = items_per_batch if length_fn is None else length_fn
        self.items_name = items_name or ("tokens" if length_fn is None else "items")
        self.flops_per_sample, self.separator = flops_per_sample, separator
        self.peak_flops = peak_flops
        self._marks: deque[Snapshot] = deque(maxlen=window_size + 1)
        self._step = 0
        self._batches = 0
        self._items = 0
        self._samples = 0
        """Counted by `batch_size_fn`, on this process."""
        self._compilations = 0
        self._left_out = 0.0
        self._validation_began = 0.0
        self._flops: float | None = None
        self._peak: float | None = None

    def problems(self, config: ResolvedConfig, module: TrainModule, stage: str) -> list[str]:
        return problem_of_several(self, config, ThroughputMonitor, "ThroughputMonitors would mix their values")

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._marks.clear()
        self._batches = self._items = self._samples = 0
        self._flops = self._flops_of(pl_module)
        if self._flops is not None:
            dtype = trainer.precision.autocast or trainer.precision.weights  # of matrix products
            self._peak = self.peak_flops or peak_of(trainer.device, dtype)
            if self._peak is None:
                log.info(
                    "ThroughputMonitor logs no MFU: the peak of this device is not in its table. Pass peak_flops=..., "
                    "in FLOP/s of one device; `trainer doctor` measures it with a matrix product."
                )
        self._step, self._compilations = trainer.progress.step, compilations()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if callable(self.items_per_batch):
            self._items += int(number_of("ThroughputMonitor(items_per_batch", self.items_per_batch, batch))
        else:
            self._items += self.items_per_batch or 0
        if self.batch_size_fn is not None:
            samples = number_of("ThroughputMonitor(batch_size_fn", self.batch_size_fn, batch)
            self._samples += trainer.strategy.processes.readers * int(samples)
        if trainer.global_step > self._step:
            # The last micro-batch of a step: what is logged now belongs to that step.
            self._mark(trainer.progress)
            if trainer.settings.logs_at(trainer.global_step):
                self._log(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._left_out += time.perf_counter() - self._validation_began

    def _flops_of(self, module: TrainModule) -> float | None:
        if not callable(self.flops_per_sample):
            return self.flops_per_sample
        return number_of("ThroughputMonitor(flops_per_sample", self.flops_per_sample, module)

    def _mark(self, progress: Progress) -> None:
        self._step = progress.step
        if (compiled := compilations()) != self._compilations:
            self._compilations = compiled
            self._marks.clear()
        now = time.perf_counter() - self._left_out
        samples = progress.samples if self.batch_size_fn is None else self._samples
        self._marks.append(Snapshot(now, progress.step, self._batches, samples, self._items))

    def _log(self, trainer: Trainer) -> None:
        first, last = self._marks[0], self._marks[-1]
        seconds = last.time - first.time
        if seconds <= 0:
            return
        world = trainer.world_size
        rates = {
            "steps_per_s": (last.steps - first.steps) / seconds,
            "batches_per_s": (last.batches - first.batches) * trainer.strategy.processes.readers / seconds,
        }
        if last.samples > first.samples:
            rates["samples_per_s"] = (last.samples - first.samples) / seconds
            if self._flops is not None:
                rates["flops_per_s"] = rates["samples_per_s"] * self._flops
                if self._peak is not None:
                    rates["mfu"] = rates["flops_per_s"] / (world * self._peak)
        for name, rate in rates.items():
            trainer.log(f"throughput{self.separator}{name}", rate, on_step=True, on_epoch=False, weight=1)
        if self.items_per_batch is not None:
            items = (last.items - first.items) / seconds
            name = f"throughput{self.separator}{self.items_name}_per_s"
            # Only this process's own items are known here; the sum over processes is made when the log is read.
            trainer.log(name, items, on_step=True, on_epoch=False, reduce_fx="sum", weight=1)
