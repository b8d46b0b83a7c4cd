"""Run: the state of one stage of a Trainer, from its set-up to its end."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.callback import AccumulationSchedule, Callback, Checkpoint, StepGuard
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.storage import StoragePath
from trainer.data.datamodule import DataModule
from trainer.data.loader import BatchLoader, Loaders
from trainer.errors import ConfigError
from trainer.fault_tolerance.collective_check import require_same_call
from trainer.guards.gradient_norms import clipping_finds_it
from trainer.guards.guards import Guards
from trainer.guards.host_times import SAVING, HostTimes
from trainer.guards.optimizer_options import OptionsCheck
from trainer.hyperparameters import kinds_of_hyperparameters, stored_hyperparameters
from trainer.loop.callback_list import CallbackList, build_callback_list, call_all
from trainer.loop.progress import Clock, Progress
from trainer.loop.step import Step
from trainer.metrics.metric_log import MetricLog, ReducedMetrics
from trainer.metrics.monitor import Measured
from trainer.metrics.phases import (
    CHECKPOINT,
    LOGGING,
    TRANSFER,
    Phase,
    during,
    phase_of,
    unheard,
)
from trainer.model.hugging_face import processing_files
from trainer.module import TrainModule
from trainer.optimizers import TimedScheduler, needs_closure
from trainer.runs.callback_states import OF_CALLBACK, callbacks_by_state_key
from trainer.runs.facts import RunFacts
from trainer.runs.hook_checks import users_callbacks
from trainer.runs.resolved_config import ResolvedConfig, with_module_callbacks
from trainer.seed import seed_readers
from trainer.settings import Settings
from trainer.state.averaged_weights import OptimizerAverages
from trainer.state.held_generators import Generators, parts_of
from trainer.state.hook_changes import HookChanges
from trainer.strategy import StepOptions

Activity = Literal["sanity checking", "training", "validating"]
ACTIVITIES: dict[str, Activity] = {"fit": "training", "validate": "validating"}
"""The activities by which the stages begin and end."""

log = logging.getLogger("trainer")

_NEVER = Measured(0.0, -1, "interim")
"""The latest value of a name that was not logged yet."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class WaitingGradients(Protocol):
    """Knows of the gradients that a later step of a manual optimization uses."""

    synced: bool
    """False if the last gradients are sums of each process alone."""

    def wait_for(self, optimizer: Optimizer) -> bool: ...


class Session:
    """The state of a Trainer that outlives a run and is shared by its stages."""

    def __init__(self, settings: Settings) -> None:
        self.stage: str | None = None
        """The current stage; None: nothing runs."""
        self.progress = Progress()
        self.has_fit = False
        self.accumulate_grad_batches = self.configured_window = settings.window
        """Micro-batches of the next window, and as they were set outside of a run, by which each `fit` begins."""
        self.fitting_samples: int | None = None
        """Samples of a micro-batch that fits, with accumulate_grad_batches="auto"; None: not known yet."""
        self.training_batches: int | None = None
        """Micro-batches of an epoch in the last `fit`; None: unknown."""
        self.seed = settings.seed or 0
        self.run_dir = settings.root
        self.named_run: Path | None = None
        """The directory of the run that "last" and "best" mean; None: the newest below `default_root_dir`."""
        self.began: int | None = None
        """The beginning of the run directory's first `fit`, in nanoseconds since 1970; None: not known yet."""
        self.config_text: str | None = None
        """The configuration as YAML, for the run directory and checkpoints; None: the run was started from Python."""
        self.callback_metrics: dict[str, float] = {}
        """The latest values of all logged names, as of the last flush; `monitor=` reads these."""
        self.logged_metrics: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.measured: dict[str, Measured] = {}
        """The latest values of all logged names, each with the step it was measured at."""

    def argument(self, name: str, value: str | list[str]) -> str:
        """Return an argument of `fit` as it is typed: `ckpt_path='last'`; for a command, `--ckpt-path last`."""
        if self.config_text is None:
            return f"{name}={value!r}"
        return f"--{name.replace('_', '-')} {value if isinstance(value, str) else ' '.join(value)}"

    def start(self, stage: str) -> None:
        """Forget the values of an earlier run, and for a `fit` its counters."""
        if stage == "fit":
            self.progress = Progress()
            self.accumulate_grad_batches = self.configured_window
            self.fitting_samples = None
        self.forget_values()

    def forget_values(self) -> None:
        """Forget all logged values."""
        for values in (self.callback_metrics, self.logged_metrics, self.progress_bar_metrics, self.measured):
            values.clear()

    def store(self, values: ReducedMetrics) -> None:
        """Store reduced values for the callbacks, the loggers and the progress bar."""
        self.callback_metrics.update(values.all)
        self.logged_metrics.update(values.logger)
        self.progress_bar_metrics.update(values.progress_bar)

    @contextmanager
    def dropping_values(self) -> Iterator[None]:
        """Drop the values that the block stores when it ends."""
        stored = (self.callback_metrics, self.logged_metrics, self.progress_bar_metrics)
        before = [dict(values) for values in stored]
        yield
        for values, earlier in zip(stored, before, strict=True):
            values.clear()
            values.update(earlier)

    def remember_beginning(self, nanoseconds: int) -> None:
        """Write into checkpoints when the first `fit` in the run directory began."""
        self.began = nanoseconds

    def remember_fitting(self, samples: int) -> None:
        """Split batches into micro-batches of so many samples, in this `fit` and in its checkpoints."""
        self.fitting_samples = samples

    def split_into(self, parts: int) -> None:
        """Take this number of micro-batches for a step: the parts of one batch."""
        self.accumulate_grad_batches = parts


class Run:
    """One stage ("fit", "validate", "test" or "predict") of one module.

    Its parts have one task each, and do not know it: `session` outlives it, `progress` counts, `clock` says when it
    ends, `guards` watch its steps, `generators` are its random numbers, `metrics` its logged values, `loaders` its
    data, `facts` are compared with other processes and with a checkpoint, `step` is what each step calls. Devices are
    known when the processes have met, layers when `configure_model` has run, optimizers when the layers are on their
    device, and this user code sees the run as far as it is set up: so the methods under "set-up" complete it, in
    running order, and nothing else assigns to its attributes. A run does not know the Trainer: its hooks have the
    trainer bound as their first argument, see `CallbackList`.
    """

    step: Step
    """The calls of each step. Known when training begins."""
    manual: WaitingGradients | None = None
    """Says, in manual optimization, which gradients wait for a later step; None: those of each step are used in it."""
    flushed_step = -1
    """The last step whose values went to the loggers."""
    torn_down = False
    checks_states = False
    """True until the optimizers have states, of which it is checked that a checkpoint can hold them."""
    interrupted = False
    """True if an error or a signal has ended the run."""
    saves_wait = False
    """True inside `fit` in a validation, but for its last hook: a checkpoint of now would have a part of it."""
    has_weights = False
    """True when the strategy has the module, with the weights that the run begins with."""
    _windows_before = 0
    """The windows that were begun before this epoch and are no steps of it."""
    saving_hooks = CallbackList([])
    """The last hooks of an epoch and of training, of the callbacks that write checkpoints."""
    logged_before: Mapping[int, dict[str, Any]] = {}
    """The states of the loggers, by id, from before the validation that was left."""
    validation_interval: int | None = None
    """Micro-batches between two validations inside this epoch; None: no validation inside it."""
    in_epoch = False
    """True from `on_train_epoch_start` to the end of the epoch."""
    is_over = False
    """True if a run is started again that has ended as a whole: its checkpoints and logs stay as they are."""
    hook_changes: HookChanges
    """The changes of hooks at the model and its optimizers. Known from `note_beginning` on."""
    evaluated: tuple[int, int] | None = None
    """The loader and the batch of the evaluation in progress."""
    followed_buffers: Collection[str] = ()
    """The buffers that steps have changed in the run that wrote the checkpoint."""
    closure_needed = False
    """True if the optimizer evaluates the loss several times per step (LBFGS)."""
    resumed_from: StoragePath | None = None
    """The checkpoint from which the run was started."""

    def __init__(
        self,
        config: ResolvedConfig,
        session: Session,
        stage: str,
        module: TrainModule,
        datamodule: DataModule | None = None,
    ) -> None:
        self.config, self.settings, self.strategy = config, config.settings, config.strategy
        self.session, self.stage, self.pid = session, stage, os.getpid()
        self.activity = ACTIVITIES.get(stage)
        """The part of the stage in progress. An error leaves it as it is, for `on_exception`."""
        self.module, self.datamodule = module, datamodule
        self.callbacks: list[Callback] = config.callbacks
        self.loggers = config.loggers
        self.hooks = CallbackList([])
        if stage == "fit" and session.has_fit:
            log.info("another fit: it starts at step 0 with the weights as they are; to go on, give ckpt_path")
        session.start(stage)
        self.progress = session.progress
        options = OptionsCheck(self.strategy, self.progress)
        items = module.num_items if module.overrides("num_items") else None
        self.metrics = MetricLog(module, options.gather, num_items=items)
        self.times = HostTimes()
        self.transfer_hooks = transfer_hooks(module, datamodule)
        """The module's or the data module's methods of the names `TRANSFER_HOOKS`; None: neither defines any."""
        self.phase: Phase = unheard
        if stage == "predict":
            self.metrics.disabled_reason = "predict() logs nothing. Return values from predict_step, or use test()."

        self._also_trained: set[str] = set()
        """Names with values of validations that are logged in training, too."""
        self._reported: set[str] = set()
        """The warnings that come once, and were logged."""
        self.guards = Guards(module, self.strategy, self.progress, self.metrics, options)
        self.loaders = Loaders()
        self._waiting_saves: list[Callable[[], None]] = []
        self.reuses_memory = config.compilation is not None and config.compilation.reuses_memory
        """True if each forward overwrites the results of the last forward and backward; see `Compilation`."""
        self.metrics.copies_losses = self.reuses_memory
        self.optimizers: list[Optimizer] = []
        self.optimizer_averages = OptimizerAverages(self.strategy)
        self.generators = Generators(self._owners, self.strategy)
        self.facts = RunFacts(self.strategy)
        self.scheduler_configs: list[TimedScheduler] = []
        self.clock = Clock(config, self.strategy, self.progress, self.loaders)
        session.stage = stage

    # -- set-up, in running order --------------------------------------------------------------------------------------

    def bind_hooks(self, caller: object) -> None:
        """Bind the hooks of the given callbacks, for an error of the set-up: the module's are not known yet.

        Args:
            caller: the first argument of hooks.
        """
        self.hooks = CallbackList(self.callbacks, caller, self.module)

    def connect_callbacks(self, caller: object) -> None:
        """Add the module's callbacks, and bind all hooks to `caller`, their first argument, and the module."""
        self.callbacks = with_module_callbacks(self.config, self.module.configure_callbacks())
        self.phase = self.metrics.phase = phase_of(self.callbacks)
        self.hooks = build_callback_list(self.callbacks, caller, self.module, self.phase)
        # A run goes on from a checkpoint that is no weights alone, and that one knows only what was written before it.
        savers = sorted(self.checkpoint_callbacks, key=lambda one: not one.save_weights_only)
        self.saving_hooks = CallbackList(savers, caller, self.module, self.phase)
        self.times.time_hooks(self.hooks)
        self.times.time_hooks(self.saving_hooks, SAVING)

    def listen_for_stops(self) -> None:
        """Install signal handlers, listen to the other processes, and check that all make the same collective calls."""
        # No signal handlers in an evaluation, which has nothing to save.
        self.clock.listen(self._collectives, signals=self.stage == "fit")

    def locate(self, run_dir: Path, checkpoint: StoragePath | None) -> None:
        """Write into this run directory, and start from this checkpoint."""
        self.session.run_dir, self.resumed_from = run_dir, checkpoint

    def seed_processes(self, seed: int) -> None:
        """Have each reader derive its own random numbers from a seed that was given; the initial weights are equal."""
        self.session.seed = seed
        seed_readers(seed, self.settings.seed is not None, self.strategy.processes, self.strategy.device)

    def set_up_optimizers(
        self, optimizers: list[Optimizer], schedulers: list[TimedScheduler], config: StepOptions
    ) -> None:
        """Pass the optimizers to the strategy, and prepare the step."""
        module, strategy = self.module, self.strategy
        nn.Module.zero_grad(module)  # a run before this one may have ended within a window
        self.scheduler_configs = schedulers
        self.optimizers = strategy.setup_optimizers(optimizers, config)
        self.optimizer_averages.begin(self.optimizers)
        self.guards.watch_optimizers(self.optimizers)
        self.checks_states = bool(self.checkpoint_callbacks)
        self.closure_needed = module.automatic_optimization and any(needs_closure(o) for o in self.optimizers)
        if isinstance(strategy.scaler, torch.amp.GradScaler):
            self.metrics.scaler = strategy.scaler

    def optimize_by_hand(self, manual: WaitingGradients) -> None:
        """Save the gradients that wait, if `training_step` calls backward and steps the optimizers."""
        self.manual = None if self.module.automatic_optimization else manual

    def note_beginning(self, cleanup: ExitStack) -> None:
        """Note the module and the optimizers as they are before a checkpoint is restored and hooks change them, and,
        in the end, as they are then."""
        scheduled = any(isinstance(callback, AccumulationSchedule) for callback in self.callbacks)
        fixed = scheduled or self.settings.accumulate_grad_batches == "auto"
        others = {} if fixed else {"trainer.accumulate_grad_batches": self.session}
        self.hook_changes = HookChanges(self.module, self.optimizers, others)
        cleanup.callback(self.hook_changes.end)

    def leave_as_it_is(self) -> None:
        """Write no checkpoints and logs: what is done again after the last checkpoint has been written before."""
        self.is_over = True

    def resume(
        self,
        postponed_stop: str | None,
        followed: Collection[str],
    ) -> None:
        """Keep of the checkpoint a stop that waits for its time, and the buffers that steps change."""
        self.followed_buffers = followed
        self.clock.postpone(postponed_stop)

    def take_weights(self) -> None:
        """Let users gather, change and save weights from now on."""
        self.has_weights = True

    def watch_numbers(self) -> None:
        """Check from now on that losses, weights and states are finite."""
        saves = self.stage == "fit" and not self.settings.fast_dev_run
        schedulers = [config.scheduler.state_dict() for config in self.scheduler_configs]
        restored = self.optimizers if self.resumed_from is not None else []
        self.guards.nonfinite.begin_training(restored, schedulers, saves)

    def mark_states_checked(self) -> None:
        """Note that a checkpoint can hold the optimizers' states."""
        self.checks_states = False

    def _collectives(self) -> int:
        """Return the number of windows and collectives that this process has begun."""
        return self.strategy.processes.begun + self.guards.windows + 10**9 * self.clock.shutting_down

    # -- parts of the stage --------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether this is a `fit`, from its first hook to its last, and it is not validating."""
        return self.activity == "training"

    @property
    def validating(self) -> bool:
        """Whether validation is in progress, inside `fit` or by itself."""
        return self.activity == "validating"

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation batches before training are in progress."""
        return self.activity == "sanity checking"

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Evaluate in the block, write the checkpoints that wait for its end, and go on with what was in progress."""
        before, self.activity = self.activity, activity
        with self.saving_later():
            yield
            self.activity = before

    @contextmanager
    def saving_later(self) -> Iterator[None]:
        """Write the checkpoints that hooks in the block ask for at its end, when all of the step is done."""
        self.saves_wait = True
        yield
        self.saves_wait = False
        waiting, self._waiting_saves = self._waiting_saves, []
        for save in waiting:
            save()

    def save_later(self, save: Callable[[], None]) -> None:
        """Write a checkpoint at the end of `saving_later`; of a validation that is left none: it is done again."""
        self._waiting_saves.append(save)

    def drop_left_validation(self, logged: Mapping[int, dict[str, Any]]) -> None:
        """Write no checkpoint for which the validation in progress has asked.

        Args:
            logged: the states of the loggers from before it, which checkpoints have: what it has logged comes again.
        """
        self._waiting_saves.clear()
        self.logged_before = logged

    def end_validation(self) -> None:
        """Count the validation as done, before its last hook: a resumed run does not repeat it."""
        self.progress.validated()
        self.saves_wait = False

    def interrupt(self) -> None:
        """Remember that an error has ended the run."""
        self.interrupted = True

    def begin_training(self) -> None:
        """Train from now on, by the methods that the module has after the first hooks."""
        self.times.begin()
        self.clock.begin_training()
        self.session.training_batches = self.num_training_batches
        self.guards.begin_training(self.hooks, self.loaders, self.closure_needed, self.followed_buffers)
        if self.step_guard is not None:
            measures = not clipping_finds_it(self.settings, self.module)
            self.guards.judge_steps(self.step_guard, self.loaders, measures)

    def bind_step(self) -> None:
        """Bind what each step calls, with the methods that the module has by now."""
        self.step = Step(self)

    def begin_epoch(self) -> None:
        """Begin an epoch, or go on inside of one."""
        self.in_epoch = True
        self.drop_window()
        self.guards.skipping.begin_epoch()
        # Else the first hooks may have to bring back what the epoch began with.
        if self.progress.batch == 0 and self.train_loader is not None:
            self.train_loader.measure()

    def begin_batches(self, validation_interval: Callable[[], int | None]) -> None:
        """Begin the batches of an epoch, with the data that its first hooks have left. Collective."""
        loader, processes = self.train_loader, self.strategy.processes
        if loader is not None:
            loader.measure(self.progress.epoch, self.progress.batch)
            if processes.world_size > 1:
                loader.agree_on_length(processes.all_gather_object(loader.length))
        self.validation_interval = validation_interval()

    @property
    def step_guard(self) -> StepGuard | None:
        """The callback that decides about bad steps."""
        return next((callback for callback in self.callbacks if isinstance(callback, StepGuard)), None)

    def forget_values(self) -> None:
        """Forget logged values and norms, before the values of a checkpoint are restored within the run."""
        self.session.forget_values()
        self.flushed_step, self.in_epoch = -1, False
        self.guards.gradient_norms.forget()

    def set_reload(self, reload: Callable[[], None]) -> None:
        """Call `reload` where `reload_dataloaders_every_n_epochs` asks for new loaders."""
        self._reload = reload

    def reload_if_due(self) -> None:
        """Make the loaders anew if they are those of other epochs than the one in progress. Collective."""
        if self.epoch_of_loaders(self.progress.epoch) != self.generators.epoch_of_loaders:
            self.generators.begin_loaders()
            self._reload()

    @contextmanager
    def asking_for_loaders(self) -> Iterator[None]:
        """Ask the user for loaders in the block, in the epoch for which they are made, also if that is over by now."""
        epoch = self.progress.epoch
        self.progress.epoch = self.generators.epoch_of_loaders = self.epoch_of_loaders(epoch)
        try:
            yield
        finally:
            self.progress.epoch = epoch

    def epoch_of_loaders(self, epoch: int) -> int:
        """Return the epoch for which the loaders of an epoch are made."""
        every = self.settings.reload_dataloaders_every_n_epochs if self.stage == "fit" else 1
        return epoch - epoch % every if every else 0

    @property
    def is_last_batch(self) -> bool:
        """Whether the window in progress, or the one that has just ended, is the last of the epoch."""
        length, batch = self.num_training_batches, self.progress.batch
        ahead = self.session.accumulate_grad_batches if self.inside_window else 0
        return length is not None and batch + ahead >= length

    @property
    def inside_window(self) -> bool:
        """Whether a step has begun and is not complete."""
        return self.in_epoch and self._windows_without_step > self._windows_before

    def drop_window(self) -> None:
        """Take the windows that have begun as over: none of them becomes a step any more."""
        self._windows_before = self._windows_without_step

    @property
    def _windows_without_step(self) -> int:
        """The windows that have begun and are no steps yet; refused ones, which never will be, do not count."""
        return self.metrics.window - self.metrics.repeats - self.progress.step - self.guards.refused

    def end_epoch(self) -> None:
        """Count the epoch, which is complete."""
        self.progress.next_epoch()
        self.in_epoch = False

    # -- the end -------------------------------------------------------------------------------------------------------

    def tear_down(self) -> None:
        """Call `teardown` of the data module, the callbacks and the module, once."""
        if self.torn_down:
            return
        self.torn_down = True
        self.metrics.end("teardown logs nothing: log in on_train_end, or in on_validation_end or on_test_end.")
        of_data = [self.datamodule.teardown] if self.datamodule is not None else []
        call_all([*of_data, self.hooks.teardown], self.stage)
        for logger in self.loggers if self.strategy.processes.is_global_zero else ():
            logger.finalize("failed" if self.interrupted else "success")

    def end(self) -> None:
        """End the run for the module and the data module, which stay attached to the trainer; nothing can be logged."""
        self.session.stage = self.activity = None
        self.metrics.end("the run has ended: log inside of fit, validate or test.")
        if self.interrupted or self.in_epoch:
            self.metrics.reset_unfinished()
        self.module.untoggle_optimizer()

    # -- loaders and progress ------------------------------------------------------------------------------------------

    @property
    def train_loader(self) -> BatchLoader | None:
        """The batches of training; None outside of `fit`."""
        return self.loaders.train

    @property
    def val_loaders(self) -> dict[str, BatchLoader]:
        """The validation loaders by name."""
        return self.loaders.val

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of one epoch on this process; None: unknown."""
        return self.train_loader.length if self.train_loader is not None else None

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total steps of `fit`, for schedules; `math.inf` without a known end."""
        if self.stage == "fit":
            self.loaders.needed()
        max_epochs, max_steps = self.config.max_epochs, self.config.max_steps
        batches = self.num_training_batches if self.stage == "fit" else self.session.training_batches
        limit = math.inf if max_steps is None else max_steps
        if batches is None or max_epochs is None:
            return limit
        windows = {0: self.session.accumulate_grad_batches}
        for callback in self.callbacks:
            if isinstance(callback, AccumulationSchedule):
                windows = {0: self.settings.window, **callback.scheduling}
        first_epochs = [*sorted(epoch for epoch in windows if epoch < max_epochs), max_epochs]
        return min(limit, sum((b - a) * math.ceil(batches / windows[a]) for a, b in pairwise(first_epochs)))

    @property
    def evaluating(self) -> bool:
        """Whether validation, also of the sanity check, or test is in progress."""
        return self.activity in ("validating", "sanity checking") or self.stage == "test"

    def _owners(self) -> dict[str, Any]:
        """Return the objects of the user's that may hold random generators, by name."""
        of_schedulers = {f"scheduler {number}": one.scheduler for number, one in enumerate(self.scheduler_configs)}
        of_callbacks = {OF_CALLBACK + key: one for key, one in callbacks_by_state_key(self.callbacks).items()}
        of_data = {} if self.datamodule is None else {"data module": self.datamodule}
        optimizers = {f"optimizer {number}": one for number, one in enumerate(self.optimizers)}
        return parts_of({"module": self.module}, optimizers) | of_data | of_schedulers | of_callbacks

    # -- batches -------------------------------------------------------------------------------------------------------

    def transfer(self, dataloader_idx: int = 0) -> Callable[[Any], Any]:
        """Return what brings a loader's batches to the device, through the transfer hooks if there are any."""
        if self.transfer_hooks is None:
            return during(self.phase, TRANSFER, self.strategy.to_device)
        before, move, after = self.transfer_hooks

        def through_hooks(batch: Any) -> Any:
            batch = require_batch(before(batch, dataloader_idx), "on_before_batch_transfer")
            batch = require_batch(move(batch, self.strategy.device, dataloader_idx), "transfer_batch_to_device")
            return require_batch(after(batch, dataloader_idx), "on_after_batch_transfer")

        # Hooks that users write may take any time; a copy by the strategy costs the host none that it could save.
        return during(self.phase, TRANSFER, self.times.timed(TRANSFER, through_hooks))

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
        step, every = self.progress.step, self.settings.log_every_n_steps
        if every and step % every == 0 and self.flushed_step != step:
            self.flushed_step = step
            self.log_to_loggers(self.metrics.read_step())
            self.metrics.mark_flushed()

    def log_to_loggers(self, values: ReducedMetrics) -> None:
        """Store reduced values and send them to the loggers."""
        self.update_metrics(values)
        if values.logger and self.strategy.processes.is_global_zero and not self.is_over:
            with self.phase(LOGGING), self.times.during(LOGGING):
                for logger in self.loggers:
                    logger.log_metrics(values.logger, self.progress.step)

    def new_value(self, config: TimedScheduler) -> float | None:
        """Return the value that a scheduler monitors; None without one since the scheduler's last. Collective."""
        assert config.monitor is not None
        self.read_metrics()
        measured = self.monitored(config.monitor)
        if measured is None or measured.step <= config.value_step:
            return None
        config.value_step = measured.step
        return measured.value

    def monitored(self, name: str) -> Measured | None:
        """Return the latest value of a logged name; None without one.

        A name that is logged in training and in validation has the value of the validation, which a warning says.
        """
        if name in self._also_trained:
            self.report_once(
                f"{name!r} is logged in training and in validation, and monitored: its values are those of the "
                "validations. Give the two different names to choose."
            )
        return self.session.measured.get(name)

    def report_once(self, message: str) -> None:
        """Log a warning, unless it is empty or was logged before in this run."""
        if message and message not in self._reported and self.strategy.processes.is_global_zero:
            self._reported.add(message)
            log.warning("%s", message)

    def expect(self, names: Iterable[str]) -> None:
        """Remember names that a validation logs, before it has values that count."""
        for name in names:
            self.session.measured.setdefault(name, Measured(0.0, -1, "validation"))

    def is_to_come(self, name: str) -> bool:
        """Whether a name without a value may get one, after the first validation or epoch at the latest. Collective."""
        if self.val_loaders and self.progress.validated_step == -1:
            return True
        users = users_callbacks(self.callbacks, "on_train_epoch_end") or self.module.overrides("on_train_epoch_end")
        if users and self.progress.epoch == 0 and not self.progress.epoch_ended:
            return True
        logged = set().union(*self.strategy.processes.all_gather_object(self.metrics.names))
        return bool(logged & {name, name.removesuffix("_step"), name.removesuffix("_epoch")})

    def check_numbers(self) -> None:
        """Report numbers that are not finite, and parameters that nothing trains. Call this after values were read."""
        self.guards.check_numbers(self.optimizers if self.training else [])

    def update_metrics(self, values: ReducedMetrics, complete: bool = True) -> None:
        """Store reduced values for `monitor=`, the loggers and the progress bar.

        `complete`: False for means over a part of an epoch. They belong to no step, and those of kind "past" to none
        that a monitor could use.
        """
        self.check_numbers()
        measured, step = self.session.measured, self.progress.step
        for name, value in values.all.items():
            kind, latest = values.kinds[name], measured.get(name, _NEVER)
            if not complete or kind == "past":
                measured.setdefault(name, Measured(value, -1, "interim"))
            elif self.validating and kind == "epoch":
                measured[name] = Measured(value, step, "validation")
            elif latest.kind == "validation":
                self._also_trained.add(name)
            elif kind == "epoch" or (latest.step, latest.kind) != (step, "epoch"):
                measured[name] = Measured(value, step, kind)
        self.session.store(values)

    def forget_validation(self) -> None:
        """Let the values of a validation after this step belong to no state: what was validated has changed since."""
        for name, one in self.session.measured.items():
            if (one.kind, one.step) == ("validation", self.progress.step):
                self.session.measured[name] = one._replace(step=-1)

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
        with self.clock.saving(), self.phase(CHECKPOINT), self.times.during(SAVING):
            yield

    @cached_property
    def processing_files(self) -> dict[str, str]:
        """The files of a tokenizer or processor of the module or data module; see `processing_files`."""
        return processing_files([one for one in (self.module, self.datamodule) if one is not None])

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters of module and data module."""
        owners = self._with_hyperparameters()
        stored = {name: stored_hyperparameters(one.hparams) for name, one in owners.items()}
        inside = {name: vars(one).get("_hparams_inside", {}) for name, one in owners.items()}
        named = {name: next(iter(of)) if len(of) == 1 else of for name, of in inside.items() if any(of)}
        kinds = {name: kinds_of_hyperparameters(one.hparams) for name, one in owners.items()}
        none: dict[str, Any] = {"module": {}, "data": {}}
        return {**none, **stored, **({"arguments": named} if named else {}), "kinds": {**none, **kinds}}

    def _with_hyperparameters(self) -> dict[str, Any]:
        return {"module": self.module} if self.datamodule is None else {"module": self.module, "data": self.datamodule}

    def logged_hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters for the loggers: without those of `save_hyperparameters(logger=False)`."""
        kept, owners = self.hyperparameters(), self._with_hyperparameters()
        shown = [name for name, one in owners.items() if vars(one).get("_hparams_for_loggers", True)]
        return {name: kept[name] if name in shown else {} for name in ("module", "data")}

    # -- collectives ---------------------------------------------------------------------------------------------------

    def check_all_ranks_call(self, what: str) -> None:
        """Raise ConfigError if only some processes call the collective `what`, a method that users call.

        The message names the function that called the method, because another process may call it elsewhere.
        """
        caller = sys._getframe(2).f_code  # traceback.extract_stack reads the source lines, too: 67 us
        self.strategy.processes.wait_for_all(f"{what} (in {Path(caller.co_filename).name}, {caller.co_name})")

    def begin_call(self, what: str, data: Any, check: bool) -> None:
        """Compare a collective of the user between the processes, if `check`; see `require_same_call`."""
        processes, progress = self.strategy.processes, self.progress
        if check:
            position = f", after step {progress.step}, in epoch {progress.epoch}, batch {progress.batch}"
            if self.evaluated is not None:
                position += ", at batch {1} of evaluation loader {0}".format(*self.evaluated)
            require_same_call(processes, what, data, position)
        processes.begun += 1


class NoRun:
    """The run of a trainer that has none yet: what its attributes show."""

    stage: str | None = None
    activity: Activity | None = None
    training = validating = sanity_checking = evaluating = interrupted = is_last_batch = False
    datamodule: DataModule | None = None
    resumed_from: StoragePath | None = None
    loaders = Loaders()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers: none."""
        return []

    @property
    def scheduler_configs(self) -> list[TimedScheduler]:
        """The schedulers: none."""
        return []


NO_RUN = NoRun()


def transfer_hooks(module: TrainModule, datamodule: DataModule | None) -> list[Callable[..., Any]] | None:
    """Return the methods of the names `TRANSFER_HOOKS`; None: neither module nor data module defines one.

    Each is the data module's if that defines it, else the module's, as in Lightning.
    """
    overridden = [] if datamodule is None else [name for name in TRANSFER_HOOKS if datamodule.overrides(name)]
    if not overridden and not module.overrides_any(TRANSFER_HOOKS):
        return None
    return [getattr(datamodule if name in overridden else module, name) for name in TRANSFER_HOOKS]


def require_batch(batch: Any, hook: str) -> Any:
    """Return the batch that a transfer hook returned.

    Raises:
        ConfigError: `batch` is None.
    """
    if batch is None:
        raise ConfigError(f"{hook} returned None: end it with 'return batch'.")
    return batch
