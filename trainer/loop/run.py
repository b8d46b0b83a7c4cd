"""Run: the state of one stage of a Trainer, from its set-up to its end."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainer.callback import AccumulationSchedule, Callback, CallbackList, Checkpoint
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.storage import StoragePath
from trainer.data.datamodule import DataModule
from trainer.data.loader import BatchLoader, Divisor
from trainer.errors import ConfigError, did_you_mean
from trainer.fault_tolerance.collective_check import CollectiveCheck
from trainer.fault_tolerance.deadline import Deadline
from trainer.fault_tolerance.stop import StopCoordinator
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.loop.resolved_config import ResolvedConfig
from trainer.metrics.metric_log import MetricLog, ReducedMetrics
from trainer.metrics.monitor import Measured
from trainer.module import TrainModule
from trainer.optimizers import SchedulerConfig
from trainer.profiling import CHECKPOINT, LOGGING, TRANSFER, Phase, unheard
from trainer.progress import Progress
from trainer.seed import set_rng_state
from trainer.settings import Settings

if TYPE_CHECKING:
    from trainer.loop.manual import ManualOptimizer
    from trainer.loop.trainable import TrainableParameters

log = logging.getLogger("trainer")

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Session:
    """The state of a Trainer that outlives a run and is shared by its stages."""

    def __init__(self, settings: Settings) -> None:
        self.stage: str | None = None
        """The current stage; None: nothing runs."""
        self.progress = Progress()
        self.has_fit = False
        self.accumulate_grad_batches = settings.accumulate_grad_batches
        self.seed = settings.seed or 0
        self.run_dir = settings.root
        self.config_text: str | None = None
        """The configuration as YAML, for the run directory and checkpoints; None: the run was started from Python."""
        self.callback_metrics: dict[str, float] = {}
        """The latest values of all logged names, as of the last flush; `monitor=` reads these."""
        self.logged_metrics: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.measured: dict[str, Measured] = {}
        """The latest values of all logged names, each with the step it was measured at."""

    def start(self, stage: str) -> None:
        """Forget the values of an earlier run, and for a `fit` its counters."""
        if stage == "fit":
            self.progress = Progress()
        for values in (self.callback_metrics, self.logged_metrics, self.progress_bar_metrics, self.measured):
            values.clear()


class Run:
    """One stage ("fit", "validate", "test" or "predict") of one module.

    `start_run` makes the run and yields it complete. User code called during the set-up (`configure_model`, the
    methods for loaders, `configure_optimizers`) sees a run whose loaders and optimizers may be missing. A run does not
    know the Trainer: its hooks have the trainer bound as their first argument, see `CallbackList`.
    """

    flushed_step = -1
    """The last step whose values went to the loggers."""
    may_skip_batches = may_end_epochs = False
    """Whether `training_step` may return None, and the module's `on_train_batch_start` -1; see loop/skipping.py."""
    skipped_share = 0.0
    """The part of the items of this step, times the number of processes, that this process has skipped so far."""
    skipped_window = False
    """True if all processes have skipped all batches of the step: there is no update."""
    epoch_ended_by_module = False
    """True after the module's `on_train_batch_start` has returned -1, until the next epoch."""
    reported_skipping = torn_down = clips_gradients = False
    reuses_memory = False
    """True if each forward overwrites the results of the last forward and backward; see `Compilation`."""
    weights_loss_by_items = False
    """True if the module defines `num_items`."""
    saving_hooks = CallbackList([])
    """The last hooks of an epoch and of training, of the callbacks that write checkpoints."""
    in_epoch = False
    """True from `on_train_epoch_start` to the end of the epoch."""
    loader_state: dict[str, Any] | None = None
    """The state of `train_loader` at the last step, if it has been asked for a batch beyond."""
    postponed_stop: str | None = None
    """The reason of a stop that waits for `min_epochs` and `min_steps`."""
    trainable: TrainableParameters | None = None
    """Notices a change of the trainable parameters; None on one process, and outside of `fit`."""

    def __init__(
        self,
        config: ResolvedConfig,
        session: Session,
        stage: str,
        module: TrainModule,
        datamodule: DataModule | None = None,
    ) -> None:
        self.config, self.settings, self.strategy = config, config.settings, config.strategy
        self.session = session
        self.stage = stage
        self.module, self.datamodule = module, datamodule
        self.callbacks: list[Callback] = config.callbacks
        self.loggers = config.loggers
        self.hooks = CallbackList([])
        self.phase: Phase = unheard
        if stage == "fit" and session.has_fit:
            log.info("another fit: it starts at step 0 with the weights as they are; to go on, give ckpt_path")
        session.start(stage)
        self.progress = session.progress
        self.training = self.validating = self.sanity_checking = False
        self.metrics = MetricLog(module, lambda value: config.strategy.processes.all_gather_object(value))
        if stage == "predict":
            self.metrics.disabled_reason = "predict() logs nothing. Return values from predict_step, or use test()."

        self.optimizers: list[Optimizer] = []
        self.manual_optimizers: list[ManualOptimizer] = []
        self.scheduler_configs: list[SchedulerConfig] = []
        self.closure_needed = False
        """True if the optimizer evaluates the loss several times per step (LBFGS)."""
        self.transfer_hooks = transfer_hooks(module, datamodule)
        """The module's or the data module's methods of the names `TRANSFER_HOOKS`; None: neither defines any."""
        self.manual_backwards = self.manual_steps = 0
        """Number of calls of `manual_backward` and of an optimizer's `step`, with manual optimization."""
        self.manual_loss_divisor: Divisor = None
        self.resumed_from: StoragePath | None = None
        """The checkpoint from which the run was started."""
        self.rng_to_restore: dict[str, Any] | None = None
        """States of the generators in the checkpoint, until the first epoch restores them."""

        self.train_loader: BatchLoader | None = None
        self.val_loaders: dict[str, BatchLoader] = {}
        self.test_loaders: dict[str, BatchLoader] = {}
        self.predict_loaders: dict[str, BatchLoader] = {}
        self.dataloader_names: list[str] = []
        """The names of the loaders of the current evaluation."""

        self.stop_coordinator = StopCoordinator(None)
        self.stop_reason: str | None = None
        self.watchdog = Watchdog()
        settings = config.settings
        self.deadline = Deadline(settings.latest_end, settings.deadline_margin) if settings.latest_end else None
        self.collective_check: CollectiveCheck | None = None
        self.shutting_down = False
        """True while only the last collective of the run is left."""

    # -- progress ------------------------------------------------------------------------------------------------------

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of one epoch on this process; None: unknown."""
        return self.train_loader.length if self.train_loader is not None else None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total steps of `fit`, for schedules; `math.inf` without a known end."""
        max_epochs, max_steps, batches = self.config.max_epochs, self.config.max_steps, self.num_training_batches
        limit = math.inf if max_steps is None else max_steps
        if batches is None or max_epochs is None:
            return limit
        windows = {0: self.session.accumulate_grad_batches}
        for callback in self.callbacks:
            if isinstance(callback, AccumulationSchedule):
                windows = {0: self.settings.accumulate_grad_batches, **callback.scheduling}
        first_epochs = [*sorted(epoch for epoch in windows if epoch < max_epochs), max_epochs]
        return min(limit, sum((b - a) * math.ceil(batches / windows[a]) for a, b in pairwise(first_epochs)))

    @property
    def evaluating(self) -> bool:
        """Whether validation or test is in progress."""
        return self.validating or self.stage == "test"

    def stop(self, reason: str) -> None:
        """Request a stop, which waits for `min_epochs` and `min_steps`."""
        if self.reached_minimum:
            self.stop_coordinator.request(reason)
        elif self.postponed_stop is None:
            self.postponed_stop = reason
            least = f"min_steps={self.settings.min_steps}, min_epochs={self.settings.min_epochs}"
            log.info("stopping later (%s): %s", reason, least)

    @property
    def reached_minimum(self) -> bool:
        """Whether `min_epochs` and `min_steps` are done."""
        epochs_done = self.progress.epoch + int(self.progress.batch == self.num_training_batches)
        return self.progress.step >= (self.settings.min_steps or 0) and epochs_done >= (self.settings.min_epochs or 0)

    def stops(self) -> bool:
        """Return True if all processes stop at this boundary of a step or epoch. Call this once per boundary."""
        if self.postponed_stop is not None and self.reached_minimum:
            self.stop_coordinator.request(self.postponed_stop)
        self.stop_reason = self.stop_reason or self.stop_coordinator.check(self.progress.step)
        return self.stop_reason is not None

    def restore_rng(self) -> None:
        """Restore the generators' states from the checkpoint, once in a resumed run."""
        if self.rng_to_restore is not None:
            set_rng_state(self.rng_to_restore, self.strategy.device)
            self.rng_to_restore = None

    # -- batches -------------------------------------------------------------------------------------------------------

    def transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch on the device, through the transfer hooks if there are any."""
        with self.phase(TRANSFER):
            if self.transfer_hooks is None:
                return self.strategy.to_device(batch)
            before, transfer, after = self.transfer_hooks
            batch = require_batch(before(batch, dataloader_idx), "on_before_batch_transfer")
            batch = require_batch(transfer(batch, self.strategy.device, dataloader_idx), "transfer_batch_to_device")
            return require_batch(after(batch, dataloader_idx), "on_after_batch_transfer")

    # -- logging -------------------------------------------------------------------------------------------------------

    def read_metrics(self) -> dict[str, float]:
        """Return all logged values known so far; see `Trainer.read_metrics`. Collective."""
        metrics = self.metrics
        self.update_metrics(metrics.read_step())
        if self.evaluating and not self.sanity_checking:
            self.log_to_loggers(metrics.read_epoch(metrics.evaluation_hooks))
        if self.progress.epoch_ended and not self.sanity_checking:
            self.log_to_loggers(metrics.read_epoch(metrics.hook_metrics))
        else:
            self.update_metrics(metrics.peek_epoch(metrics.hook_metrics), complete=False)
        return self.session.callback_metrics

    def flush_step(self) -> None:
        """Send the values of the last step to the loggers, once, every `log_every_n_steps`. Collective."""
        step = self.progress.step
        if self.settings.logs_at(step) and self.flushed_step != step:
            self.flushed_step = step
            self.log_to_loggers(self.metrics.read_step())

    def log_to_loggers(self, values: ReducedMetrics) -> dict[str, float]:
        """Store reduced values and send them to the loggers; return the values by name."""
        self.update_metrics(values)
        if values.logger and self.strategy.processes.is_global_zero:
            with self.phase(LOGGING):
                for logger in self.loggers:
                    logger.log_metrics(values.logger, self.progress.step)
        return values.all

    def tell_nonfinite_losses(self) -> None:
        """Warn, once in a run, of the first loss of this process that was read and is NaN or infinite."""
        if self.metrics.nonfinite_loss is not None and self.metrics.watches_losses:
            step, loss = self.metrics.nonfinite_loss
            self.metrics.watches_losses = False
            log.warning(
                "the loss of step %d is %s on rank %d, and the run goes on. Look at the batch and the learning rate; "
                "gradient_clip_val or a lower lr often help. Trainer(detect_anomaly=True) ends the run there.",
                step,
                loss,
                self.strategy.processes.rank,
            )

    def new_value(self, config: SchedulerConfig) -> float | None:
        """Return the value that a scheduler monitors; None without one measured since the scheduler's last. Collective.

        Raises:
            ConfigError: the value was not logged and the scheduler is strict.
        """
        assert config.monitor is not None
        values = self.read_metrics()
        measured = self.session.measured.get(config.monitor)
        if measured is not None:
            if measured.step <= config.value_step:
                return None
            config.value_step = measured.step
            return measured.value
        if config.strict and not self.is_to_come(config.monitor):
            raise ConfigError(
                f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged."
                f"{did_you_mean(config.monitor, values)} Logged so far: {', '.join(sorted(values)) or 'nothing'}. "
                'Log it before the scheduler steps, or give "strict": False.'
            )
        return None

    def is_to_come(self, name: str) -> bool:
        """Whether a name without a value may get one, after the first validation or epoch at the latest. Collective."""
        if self.val_loaders and self.progress.validated_step == -1:
            return True
        if self.progress.epoch == 0 and not self.progress.epoch_ended:
            hooks = [callback.on_train_epoch_end for callback in self.callbacks]
            users = [hook for hook in hooks if not hook.__module__.startswith("trainer.")]
            if users or self.module.overrides("on_train_epoch_end"):
                return True
        logged = set().union(*self.strategy.processes.all_gather_object(self.metrics.names))
        return bool(logged & {name, name.removesuffix("_step"), name.removesuffix("_epoch")})

    def update_metrics(self, values: ReducedMetrics, complete: bool = True) -> None:
        """Store reduced values for `monitor=`, the loggers and the progress bar.

        `complete`: False for means over a part of an epoch, which belong to no step.
        """
        self.tell_nonfinite_losses()
        measured, step = self.session.measured, self.progress.step
        for name, value in values.all.items():
            before = measured.get(name)
            if not complete:
                measured.setdefault(name, Measured(value, -1, "interim"))
            elif before is None or (before.step, before.kind) != (step, "epoch") or values.kinds[name] == "epoch":
                measured[name] = Measured(value, step, values.kinds[name])
        self.session.callback_metrics.update(values.all)
        self.session.logged_metrics.update(values.logger)
        self.session.progress_bar_metrics.update(values.progress_bar)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_group(self) -> ProcessGroup:
        """The processes that write a checkpoint: all processes if the state is sharded, else rank 0."""
        return self.strategy.processes if self.strategy.shards_state else SINGLE_PROCESS

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        """Suspend the watchdog while the block writes a checkpoint, and report the duration to the deadline."""
        self.watchdog.heartbeats += 1
        self.watchdog.allow_slow = True
        begun = time.monotonic()
        try:
            with self.phase(CHECKPOINT):
                yield
        finally:
            self.watchdog.heartbeats += 1
            self.watchdog.allow_slow = False
            if self.deadline is not None:
                self.deadline.saved(time.monotonic() - begun)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters of module and data module."""
        data = self.datamodule.hparams if self.datamodule is not None else {}
        return {"module": dict(self.module.hparams), "data": dict(data)}

    # -- collectives ---------------------------------------------------------------------------------------------------

    def check_all_ranks_call(self, what: str) -> None:
        """Raise ConfigError if only some processes call the collective `what`, a method that users call.

        The message names the function that called the method, because another process may call it elsewhere.
        """
        if self.collective_check is not None:
            caller = traceback.extract_stack(limit=3)[0]
            self.collective_check.wait_for_all(f"{what} (in {Path(caller.filename).name}, {caller.name})")


def transfer_hooks(module: TrainModule, datamodule: DataModule | None) -> list[Callable[..., Any]] | None:
    """Return the methods of the names `TRANSFER_HOOKS`; None: neither module nor data module defines one.

    Each is the data module's if that defines it, else the module's, as in Lightning. A warning names what both define.
    """
    of_data = [name for name in TRANSFER_HOOKS if datamodule is not None and datamodule.overrides(name)]
    if not of_data and not module.overrides_any(TRANSFER_HOOKS):
        return None
    for name in of_data:
        if module.overrides(name):
            log.warning("%s: the data module's is called, and not the module's", name)
    return [getattr(datamodule if name in of_data else module, name) for name in TRANSFER_HOOKS]


def require_batch(batch: Any, hook: str) -> Any:
    """Return the batch that a transfer hook returned.

    Raises:
        ConfigError: `batch` is None.
    """
    if batch is None:
        raise ConfigError(f"{hook} returned None: end it with 'return batch'.")
    return batch
