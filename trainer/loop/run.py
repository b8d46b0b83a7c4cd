"""What is alive during a run, and the small services that modules and callbacks ask of it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.optim import Optimizer

from trainer.callback import Callback, CallbackList, Checkpoint, Logger
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup, StoreProcessGroup
from trainer.data.datamodule import DataModule
from trainer.data.loader import BatchLoader
from trainer.errors import ConfigError, unknown_name_error
from trainer.fault_tolerance.collective_check import CollectiveCheck
from trainer.fault_tolerance.deadline import Deadline
from trainer.fault_tolerance.file_lock import FolderLock
from trainer.fault_tolerance.stop import StopCoordinator
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.loop.accumulation import Divisor, checked_loss
from trainer.loop.resolved_config import make_plan
from trainer.loop.training_state import full_state
from trainer.metrics.metric_log import MetricLog, ReducedMetrics
from trainer.module import TrainModule
from trainer.optimizers import ManualOptimizer, SchedulerConfig
from trainer.profiling import BACKWARD, LOGGING, OPTIMIZER, TRANSFER, Phase, unheard
from trainer.progress import Progress
from trainer.seed import set_rng_state
from trainer.settings import DEFAULT_MAX_EPOCHS, Settings

_WRITE_TIMEOUT_S = 1800.0
"""How long a process that has written its part of a checkpoint waits for the others."""


class RunState:
    """The objects of a run, from the settings. Users and callbacks read them as attributes of the `Trainer`."""

    module: TrainModule
    metrics: MetricLog

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.plan = make_plan(settings)
        self.strategy, self.precision = self.plan.strategy, self.plan.precision
        self.callbacks: list[Callback] = self.plan.callbacks
        self.loggers: list[Logger] = self.plan.loggers
        self.hooks = CallbackList(self.callbacks)
        self.progress = Progress()
        self.accumulate_grad_batches = settings.accumulate_grad_batches
        self.seed = settings.seed or 0
        self.run_dir = Path(settings.default_root_dir)
        self.locks: list[FolderLock] = []
        self.resolved_config: str | None = None
        self.stage: str | None = None
        self.training = self.validating = self.sanity_checking = self.has_fit = False
        self.stop_coordinator = StopCoordinator(None)
        self.watchdog = Watchdog()
        self.meeting: CollectiveCheck | None = None
        self.shutting_down = False
        """The last collective of a run is all that is left to do."""
        self.deadline = Deadline(settings.latest_end, settings.deadline_margin) if settings.latest_end else None
        self.stop_reason: str | None = None
        self.undo_deterministic: Callable[[], None] = lambda: None
        self.undo_compile: Callable[[], None] = lambda: None
        self.phase: Phase = unheard
        self.datamodule: DataModule | None = None
        self.optimizers: list[Optimizer] = []
        self.manual_optimizers: list[ManualOptimizer] = []
        self.scheduler_configs: list[SchedulerConfig] = []
        self.manual_backwards = self.manual_steps = 0
        self.manual_loss_divisor: Divisor = None
        self.closure_needed = self.weights_loss_by_items = False
        self.clips = False
        self.has_transfer_hooks = False
        self.rng_to_restore: dict[str, Any] | None = None
        self.train_loader: BatchLoader | None = None
        self.val_loaders: dict[str, BatchLoader] = {}
        self.test_loaders: dict[str, BatchLoader] = {}
        self.predict_loaders: dict[str, BatchLoader] = {}
        self.dataloader_names: list[str] = []
        """The loaders of the evaluation in progress, by name."""
        self.callback_metrics: dict[str, float] = {}
        """The latest value of everything logged, as of the last flush: what `monitor=` looks at."""
        self.logged_metrics: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}

    # -- who writes ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_group(self) -> ProcessGroup:
        """The processes that write a checkpoint together: all of them where the state is divided, else rank 0 alone."""
        return self.strategy.processes if self.strategy.shards_state else SINGLE_PROCESS

    def background_checkpoint_group(self, name: str) -> ProcessGroup:
        """The same, for a thread beside the training. `name`: of what they write, not used before."""
        store: Any = self.stop_coordinator.store  # torch's stubs do not know `clone`
        if not self.strategy.shards_state or store is None:
            return SINGLE_PROCESS
        return StoreProcessGroup(store.clone(), self.rank, self.world_size, name, timeout=_WRITE_TIMEOUT_S)

    def full_state_dict(self, everywhere: bool = False) -> dict[str, torch.Tensor]:
        """The module's weights and buffers, whole, in the CPU's memory, under the keys of the plain module.

        On rank 0, and on the other processes an empty dict; with `everywhere` on all of them. Collective: every process
        calls it, during a run or after it. For files rather than memory: `trainer checkpoint export`.

        Raises:
            ConfigError: nothing has run yet.
        """
        if "module" not in vars(self):
            raise ConfigError("full_state_dict: nothing has run yet: call fit or another stage first.")
        self.meet("full_state_dict")
        return full_state(self.strategy, everywhere)

    # -- how far -------------------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Steps done: one per window, however many optimizers there are."""
        return self.progress.step

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.progress.epoch

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train; None: no limit."""
        settings = self.settings
        if settings.fast_dev_run:
            return 1
        if settings.max_epochs is None:
            return DEFAULT_MAX_EPOCHS if self.max_steps is None and settings.max_time is None else None
        return None if settings.max_epochs == -1 else settings.max_epochs

    @property
    def max_steps(self) -> int | None:
        """Steps to train; None: no limit."""
        return None if self.settings.max_steps == -1 else self.settings.max_steps

    @property
    def val_check_interval(self) -> int | float:
        """Batches (int) or share of an epoch (float) from validation to validation; a fast_dev_run ends with one."""
        return 1.0 if self.settings.fast_dev_run else self.settings.val_check_interval

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of one epoch on this process; None: the loader does not tell."""
        return self.train_loader.length if self.train_loader is not None else None

    @property
    def num_val_batches(self) -> list[int | None]:
        return [feed.length for feed in self.val_loaders.values()]

    @property
    def num_test_batches(self) -> list[int | None]:
        return [feed.length for feed in self.test_loaders.values()]

    @property
    def num_predict_batches(self) -> list[int | None]:
        return [feed.length for feed in self.predict_loaders.values()]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Steps of the whole `fit`, for schedules; `math.inf` if there is no end in sight."""
        limit = math.inf if self.max_steps is None else self.max_steps
        if self.num_training_batches is None or self.max_epochs is None:
            return limit
        return min(limit, self.max_epochs * math.ceil(self.num_training_batches / self.accumulate_grad_batches))

    @property
    def should_stop(self) -> bool:
        """Whether the run is stopping. To stop it, call `stop(reason)`."""
        return self.stop_reason is not None

    @should_stop.setter
    def should_stop(self, value: object) -> None:
        raise ConfigError("trainer.should_stop cannot be set: call trainer.stop('why'), and give the reason.")

    @property
    def evaluating(self) -> bool:
        """Whether validation or test is in progress."""
        return self.validating or self.stage == "test"

    # -- where ---------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.strategy.device

    @property
    def rank(self) -> int:
        return self.strategy.processes.rank

    global_rank = rank

    @property
    def local_rank(self) -> int:
        """Of this process among those of its machine."""
        return self.strategy.processes.local_rank

    @property
    def world_size(self) -> int:
        return self.strategy.processes.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this process writes files and prints."""
        return self.strategy.processes.is_global_zero

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @property
    def checkpoint_callback(self) -> Checkpoint | None:
        """The first callback that writes checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    def hyperparameters(self) -> dict[str, Any]:
        """What module and data module were built with."""
        data = self.datamodule.hparams if self.datamodule is not None else {}
        return {"module": dict(self.module.hparams), "data": dict(data)}

    def restore_rng(self) -> None:
        """Go on with the checkpoint's random numbers, if this is a resumed run that has not done so yet."""
        if self.rng_to_restore is not None:
            set_rng_state(self.rng_to_restore, self.device)
            self.rng_to_restore = None

    # -- logging -------------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Any, **options: Any) -> None:
        """For callbacks: the same as `TrainModule.log`."""
        self.module.log(name, value, **options)

    def read_metrics(self) -> dict[str, float]:
        """Everything logged that can be known now, reduced over processes. Collective: every process must call it.

        At the end of an epoch or an evaluation that is final, and goes to the loggers. In the middle of an epoch it is
        looked at only: the epoch's value does not depend on who has looked, when.
        """
        self.meet("read_metrics")
        self.update_metrics(self.metrics.read_step())
        if (self.progress.epoch_ended or self.evaluating) and not self.sanity_checking:
            self.log_to_loggers(self.metrics.read_epoch(self.metrics.hook_metrics))
        else:
            self.update_metrics(self.metrics.peek_epoch(self.metrics.hook_metrics))
        return self.callback_metrics

    def log_to_loggers(self, values: ReducedMetrics) -> dict[str, float]:
        """Remember reduced values and send them to the loggers; return them by name."""
        self.update_metrics(values)
        if values.logger and self.is_global_zero:
            with self.phase(LOGGING):
                for logger in self.loggers:
                    logger.log_metrics(values.logger, self.global_step)
        return values.all

    def update_metrics(self, values: ReducedMetrics) -> None:
        self.callback_metrics.update(values.all)
        self.logged_metrics.update(values.logger)
        self.progress_bar_metrics.update(values.progress_bar)

    def begin_save(self) -> float:
        """Writing a checkpoint begins, which may take long; returns the time for `end_save`."""
        self.watchdog.heartbeats += 1
        self.watchdog.allow_slow = True
        return time.monotonic()

    def end_save(self, begun: float) -> None:
        """It is over, well or not."""
        self.watchdog.heartbeats += 1
        self.watchdog.allow_slow = False
        if self.deadline is not None:
            self.deadline.saved(time.monotonic() - begun)

    def meet(self, what: str) -> None:
        """Before a collective that users call: raise ConfigError where only some of the processes do.

        With the name of the function that calls it, since another one may call the same on another process.
        """
        if self.meeting is not None:
            code = sys._getframe(2).f_code
            self.meeting.wait_for_all(f"{what} (in {Path(code.co_filename).name}, {code.co_name})")

    def print(
        self, *args: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = True
    ) -> None:
        """`print` on rank 0, above the progress bar if there is one."""
        text = sep.join(map(str, args)) + end
        if self.is_global_zero and not any(callback.print_text(text, file) for callback in self.callbacks):
            print(text, end="", file=file, flush=flush)

    # -- what modules ask for ------------------------------------------------------------------------------------------

    def transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch on the device, by way of the module's transfer hooks if it has any."""
        with self.phase(TRANSFER):
            if not self.has_transfer_hooks:
                return self.strategy.to_device(batch)
            module = self.module
            batch = require_batch(module.on_before_batch_transfer(batch, dataloader_idx), "on_before_batch_transfer")
            batch = require_batch(
                module.transfer_batch_to_device(batch, self.device, dataloader_idx), "transfer_batch_to_device"
            )
            return require_batch(module.on_after_batch_transfer(batch, dataloader_idx), "on_after_batch_transfer")

    def clip_gradients(
        self, optimizer: Optimizer | ManualOptimizer, value: float, algorithm: str
    ) -> torch.Tensor | None:
        """See `TrainModule.clip_gradients`."""
        inner = optimizer.optimizer if isinstance(optimizer, ManualOptimizer) else optimizer
        if algorithm not in ("norm", "value"):
            raise unknown_name_error("gradient_clip_algorithm", algorithm, ("norm", "value"))
        if not self.module.automatic_optimization:
            self.strategy.unscale(inner)
        return self.strategy.clip_gradients(inner, value, algorithm)

    def manual_backward(self, loss: torch.Tensor) -> None:
        """See `TrainModule.manual_backward`."""
        if self.module.automatic_optimization:
            raise ConfigError(
                "manual_backward is for automatic_optimization = False: set that in the module's __init__, or return "
                "the loss from training_step and let the trainer do the rest."
            )
        checked_loss(loss, self.module, self.settings.detect_anomaly, "manual_backward got")
        self.manual_backwards += 1
        if self.manual_loss_divisor is not None:
            loss = loss / self.manual_loss_divisor
        self.hooks.on_before_backward(self, self.module, loss)  # type: ignore[arg-type]
        with self.phase(BACKWARD):
            self.strategy.backward(loss)
        self.hooks.on_after_backward(self, self.module)  # type: ignore[arg-type]

    def manual_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
        """See `ManualOptimizer.step`."""
        if self.manual_backwards == 0 and closure is None:
            self._check_first_step(optimizer)
        self.manual_steps += 1
        self.hooks.on_before_optimizer_step(self, self.module, optimizer)  # type: ignore[arg-type]
        with self.phase(OPTIMIZER):
            self.strategy.step(optimizer, closure)
        self.strategy.end_step()

    def _check_first_step(self, optimizer: Optimizer) -> None:
        """A step before any `manual_backward`: there are no gradients, or not those of all processes."""
        kind = type(optimizer).__name__
        if self.module.automatic_optimization:
            raise ConfigError(
                f"{kind}.step() was called, but the trainer steps too: leave it out of training_step, or set "
                "automatic_optimization = False."
            )
        if not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(f"{kind}.step() found no gradient: call self.manual_backward(loss) before it.")
        if self.world_size > 1 or self.strategy.scaler is not None:
            raise ConfigError(
                "loss.backward() leaves the gradients unscaled, and different on every process: call "
                "self.manual_backward(loss) instead."
            )


def require_batch(batch: Any, hook: str) -> Any:
    if batch is None:
        raise ConfigError(f"{hook} returned None: end it with 'return batch'.")
    return batch
