"""Run: the state of one stage of a Trainer, from its set-up to its end."""

from __future__ import annotations

import logging
import math
import os
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.callback import AccumulationSchedule, Callback, Checkpoint, StepGuard, attach
from trainer.checkpoint.storage import StoragePath
from trainer.data.datamodule import DataModule
from trainer.data.loader import BatchLoader, Loaders
from trainer.errors import ConfigError
from trainer.fault_tolerance.collective_check import require_same_call
from trainer.guards.gradient_norms import clipping_finds_it
from trainer.guards.guards import Guards
from trainer.guards.host_times import CALLBACKS, SAVING, HostTimes
from trainer.guards.optimizer_options import OptionsCheck
from trainer.loop.callback_list import CallbackList, build_callback_list, call_all
from trainer.loop.logged_values import LatestValues, LoggedValues
from trainer.loop.progress import Activity, Clock, DelayedSaves, LoaderEpochs, Progress
from trainer.loop.step import Step, Transfer
from trainer.metrics.metric_log import MetricLog
from trainer.metrics.phases import Phase, phase_of, unheard
from trainer.model.hugging_face import processing_files
from trainer.module import TrainModule
from trainer.optimizers import TimedScheduler, needs_closure, trains_something
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

log = logging.getLogger("trainer")


class WaitingGradients(Protocol):
    """Knows which gradients a later step of a manual optimization uses."""

    synced: bool
    """False if the last gradients are not reduced over processes yet."""

    def wait_for(self, optimizer: Optimizer) -> bool: ...


class Session:
    """The state of a Trainer that outlives a run and is shared by its stages."""

    def __init__(self, settings: Settings) -> None:
        self.stage: str | None = None
        """The current stage; None: nothing runs."""
        self.progress = Progress()
        self.has_fit = False
        self.reads_objects = False
        """True if the call was given weights_only=False; see `objects_in`."""
        self.accumulate_grad_batches = self.configured_window = settings.window
        """Micro-batches of the next window; and of the first window of each `fit`, as set outside of a run."""
        self.fitting_samples: int | None = None
        """Samples of a micro-batch that fits, with accumulate_grad_batches="auto"; None: not known yet."""
        self.training_batches: int | None = None
        """Micro-batches of an epoch in the last `fit`; None: unknown."""
        self.seed = settings.seed or 0
        self.run_dir = settings.root
        self.named_run: Path | None = None
        """The directory of the run that "last" and "best" mean; None: the newest below `default_root_dir`."""
        self.began: int | None = None
        """The time at which the run directory's first `fit` began, in nanoseconds since 1970; None: not known yet."""
        self.config_text: str | None = None
        """The configuration as YAML, for the run directory and checkpoints; None: the run was started from Python."""
        self.latest = LatestValues()

    def argument(self, name: str, value: str | list[str]) -> str:
        """Return an argument of `fit` as the user types it: `ckpt_path='last'`, or `--ckpt-path last` for a command."""
        if self.config_text is None:
            return f"{name}={value!r}"
        return f"--{name.replace('_', '-')} {value if isinstance(value, str) else ' '.join(value)}"

    def start(self, stage: str) -> None:
        """Forget the values of an earlier run, and for a `fit` its counters."""
        if stage == "fit":
            self.progress = Progress()
            self.accumulate_grad_batches = self.configured_window
            self.fitting_samples = None
        self.latest.forget()

    def remember_beginning(self, nanoseconds: int) -> None:
        """Write into checkpoints when the first `fit` in the run directory began."""
        self.began = nanoseconds

    def remember_fitting(self, samples: int) -> None:
        """Split batches into micro-batches of this many samples, in this `fit` and in runs from its checkpoints."""
        self.fitting_samples = samples

    def split_into(self, parts: int) -> None:
        """Make a step from this number of micro-batches, the parts of one batch."""
        self.accumulate_grad_batches = parts


class Epoch:
    """The epoch in progress: its windows of micro-batches, and the validations in it and at its end.

    Args:
        config, session, loaders, guards, clock: of the run.
    """

    in_progress = False
    """True from `on_train_epoch_start` to the end of the epoch."""
    validation_interval: int | None = None
    """Micro-batches between two validations inside this epoch; None: no validation inside it."""
    _dropped_windows = 0
    """The windows that were begun before this epoch and did not become steps."""

    def __init__(
        self, config: ResolvedConfig, session: Session, loaders: Loaders, guards: Guards, clock: Clock
    ) -> None:
        self._config, self._session, self._progress = config, session, session.progress
        self._loaders, self._guards, self._clock = loaders, guards, clock

    def begin(self) -> None:
        """Begin an epoch, or continue inside of one."""
        self.in_progress = True
        self.drop_window()
        self._guards.skipping.begin_epoch()
        assert self._loaders.train is not None
        if self._progress.batch == 0:  # else the first hooks may have to bring back what the epoch began with
            self._loaders.train.measure()

    def begin_batches(self) -> None:
        """Begin the batches of an epoch, with the data that its first hooks have left. Collective."""
        loader, processes = self._loaders.train, self._config.strategy.processes
        assert loader is not None
        loader.measure(self._progress.epoch, self._progress.batch)
        if processes.world_size > 1:
            loader.agree_on_length(processes.all_gather_object(loader.length))
        self.validation_interval = self._validation_interval(loader.length or 1)

    def end(self) -> None:
        """Count the epoch, which is complete."""
        self._progress.next_epoch()
        self.in_progress = False

    def leave(self) -> None:
        """Leave the epoch incomplete, because the run goes back to a checkpoint."""
        self.in_progress = False

    # -- windows -------------------------------------------------------------------------------------------------------

    @property
    def inside_window(self) -> bool:
        """Whether a step has begun and is not complete."""
        return self.in_progress and self._guards.windows_without_step > self._dropped_windows

    def drop_window(self) -> None:
        """Drop the windows that have begun: none of them becomes a step any more."""
        self._dropped_windows = self._guards.windows_without_step

    @property
    def is_last_batch(self) -> bool:
        """Whether the window in progress, or the one that has just ended, is the last of the epoch."""
        loader, batch = self._loaders.train, self._progress.batch
        if self.inside_window:
            batch += self._session.accumulate_grad_batches
        return loader is not None and loader.length is not None and batch >= loader.length

    # -- validations ---------------------------------------------------------------------------------------------------

    def validation_due(self) -> bool:
        """Return True if val_check_interval asks for validation after the last window."""
        batch, micro_batches = self._progress.batch, self._session.accumulate_grad_batches
        if self.validation_interval is None or batch == 0:
            return False
        if self._clock.validations is not None:
            return self._clock.validations.is_due(self._progress.step)
        window = self._progress.window or batch % micro_batches or micro_batches
        if self._config.settings.check_val_every_n_epoch is None:
            batch += self._progress.batches_before
        return batch % self.validation_interval < window

    def _validation_interval(self, length: int) -> int | None:
        """Return the batches between validations inside this epoch; 1, if they come by time; None: no validation."""
        interval = self._config.val_check_interval
        if not self._may_validate:
            return None
        if self._clock.validations is not None:
            return 1
        if isinstance(interval, float):
            return None if interval == 1.0 else max(1, int(length * interval))
        by_split_batches = self._config.settings.accumulate_grad_batches == "auto"
        return interval * self._session.accumulate_grad_batches if by_split_batches else interval

    @property
    def validates_at_end(self) -> bool:
        """Whether validation is due at the end of this epoch."""
        interval = self._config.val_check_interval
        whole_epoch = isinstance(interval, float) and interval == 1.0 and self._clock.validations is None
        return whole_epoch and self._may_validate

    @property
    def _may_validate(self) -> bool:
        """Whether this epoch is one of those with validations."""
        settings = self._config.settings
        every = 1 if settings.fast_dev_run else settings.check_val_every_n_epoch or 1
        return bool(self._loaders.val) and (self._progress.epoch + 1) % every == 0

    @property
    def is_validated_next(self) -> bool:
        """Whether the step that has just ended is followed by a validation."""
        assert self._loaders.train is not None
        ends_epoch = self._progress.batch == self._loaders.train.length or self.schedulers_wait
        return self.validation_due() or (ends_epoch and self.validates_at_end)

    @property
    def schedulers_wait(self) -> bool:
        """Whether schedulers of steps wait, for the next window or the validation at the epoch's end.

        It is not known which comes next if each process reads its own stream of data.
        """
        assert self._loaders.train is not None
        return self._loaders.train.samples_per_epoch is None and self.validates_at_end


class Run:
    """One stage ("fit", "validate", "test" or "predict") of one module.

    Each part of a run has one task, and does not know the run. `session` outlives it; `progress` counts; `activity`
    and `epoch` say what is in progress, and `clock` when the run ends; `guards` watch the steps; `loaders` and
    `loader_epochs` give the data, `generators` the random numbers; `metrics` record values, and `values` pass them on;
    `saves` are the checkpoints that wait; `facts` are compared with other processes and with a checkpoint; `step` is
    what each step calls.

    Devices are known when the processes have met, layers when `configure_model` has run, and optimizers when the layers
    are on their device. User code sees an unfinished run, so the methods under "set-up" complete it in running order;
    nothing else assigns to its attributes. A run does not know the Trainer: the trainer is bound to its hooks as their
    first argument, see `CallbackList`.
    """

    transfer: Transfer
    """Brings batches to the device. Known when the callbacks are."""
    step: Step
    """The calls of each step. Known when training begins."""
    hook_changes: HookChanges
    """The changes that hooks make to the model and its optimizers. Known from `track_hook_changes` on."""
    manual: WaitingGradients | None = None
    """The gradients that wait for a later step, in manual optimization; None: each step uses its gradients."""
    checks_states = False
    """True until the optimizers have states that a checkpoint was found to hold."""
    closure_needed = False
    """True if the optimizer evaluates the loss several times per step (LBFGS)."""
    has_weights = False
    """True once the strategy has the module, with its first weights."""
    saving_hooks: CallbackList
    """The last hooks of an epoch and of training, of the callbacks that write checkpoints. Known when those are."""
    resumed_from: StoragePath | None = None
    """The checkpoint that the run has started from: the folder that is read."""
    resumed_file: Path | None = None
    """The file that stands for this checkpoint, if the run was given one."""
    _torn_down = False

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
        self.module, self.datamodule = module, datamodule
        self._with_hyperparameters: dict[str, TrainModule | DataModule] = {"module": module}
        if datamodule is not None:
            self._with_hyperparameters["data"] = datamodule
        self.callbacks: list[Callback] = config.callbacks
        self.loggers = config.loggers
        self.hooks = CallbackList([])
        if stage == "fit" and session.has_fit:
            log.info("another fit: it starts at step 0 with the weights as they are; to go on, give ckpt_path")
        session.start(stage)
        self.progress = session.progress
        self.activity, self.saves = Activity(stage), DelayedSaves()
        options = OptionsCheck(self.strategy, self.progress)
        items = module.num_items if module.overrides("num_items") else None
        self.metrics = MetricLog(module, options.gather, num_items=items)
        if stage == "predict":
            self.metrics.disabled_reason = "predict() logs nothing. Return values from predict_step, or use test()."
        self.reuses_memory = config.compilation is not None and config.compilation.reuses_memory
        """True if each forward overwrites the results of the last forward and backward; see `Compilation`."""
        self.metrics.copies_losses = self.reuses_memory
        self.phase: Phase = unheard
        self.times = HostTimes()
        self.guards = Guards(module, self.strategy, self.progress, self.metrics, options)
        self.loaders = Loaders()
        self.clock = Clock(config, self.strategy, self.progress, self.loaders)
        self.epoch = Epoch(config, session, self.loaders, self.guards, self.clock)
        self.values = LoggedValues(
            config, session.latest, self.metrics, self.guards, self.activity, self.progress, self.clock, self.times
        )
        self.optimizers: list[Optimizer] = []
        self.optimizer_averages = OptimizerAverages(self.strategy)
        self.facts = RunFacts(self.strategy)
        self.scheduler_configs: list[TimedScheduler] = []
        self.generators = Generators(self._owners, self.strategy)
        every = self.settings.reload_dataloaders_every_n_epochs if stage == "fit" else 1
        self.loader_epochs = LoaderEpochs(every, self.progress, self.generators)
        session.stage = stage

    # -- set-up, in running order --------------------------------------------------------------------------------------

    def bind_hooks(self, caller: object) -> None:
        """Bind the hooks of the given callbacks, for errors before the module's callbacks are known.

        Args:
            caller: the first argument of hooks.
        """
        self.hooks = CallbackList(self.callbacks, caller, self.module)

    def connect_callbacks(self, caller: object) -> None:
        """Add the module's callbacks, and bind all hooks to their first arguments: `caller` and the module."""
        self.callbacks = with_module_callbacks(self.config, self.module.configure_callbacks())
        self.config.callbacks[:] = self.callbacks
        for callback in self.callbacks:
            attach(callback, caller)
        self.phase = self.metrics.phase = phase_of(self.callbacks)
        self.hooks = build_callback_list(self.callbacks, caller, self.module, self.phase)
        # A run continues from a full checkpoint, which knows only the checkpoints that were written before it.
        savers = sorted(self.checkpoint_callbacks, key=lambda one: not one.save_weights_only)
        self.saving_hooks = CallbackList(savers, caller, self.module, self.phase)
        self.hooks.wrap_calls(partial(self.times.timed, CALLBACKS))
        self.saving_hooks.wrap_calls(partial(self.times.timed, SAVING))
        self.transfer = Transfer(self.module, self.datamodule, self.strategy, self.phase, self.times)

    def listen_for_stops(self) -> None:
        """Install signal handlers, listen to the other processes, and check that all make the same collective calls."""
        # No signal handlers in an evaluation, which has nothing to save.
        self.clock.listen(self._collectives, signals=self.stage == "fit")

    def set_paths(self, run_dir: Path, checkpoint: StoragePath | None, file: Path | None) -> None:
        """Write into this run directory, and start from this checkpoint, which was perhaps given as a file."""
        self.session.run_dir, self.resumed_from, self.resumed_file = run_dir, checkpoint, file

    @property
    def origin(self) -> StoragePath | None:
        """The checkpoint that the run has started from, as it is named to users: perhaps a file."""
        return self.resumed_file or self.resumed_from

    def seed_processes(self, seed: int) -> None:
        """Seed the generators, by reader; initial weights are equal on all if the user has given a seed."""
        self.session.seed = seed
        seed_readers(seed, self.settings.seed is not None, self.strategy.processes, self.strategy.device)

    def set_up_optimizers(
        self, optimizers: list[Optimizer], schedulers: list[TimedScheduler], config: StepOptions
    ) -> None:
        """Pass the optimizers to the strategy, and prepare the step."""
        module, strategy = self.module, self.strategy
        nn.Module.zero_grad(module)  # a run before this one may have ended within a window
        self.scheduler_configs = schedulers
        frozen = [not trains_something(optimizer) for optimizer in optimizers]  # ZeRO takes the parameters away
        self.optimizers = strategy.setup_optimizers(optimizers, config)
        self.optimizer_averages.begin(self.optimizers)
        self.guards.watch_optimizers(self.optimizers, [*compress(self.optimizers, frozen)])
        self.checks_states = bool(self.checkpoint_callbacks)
        self.closure_needed = module.automatic_optimization and any(needs_closure(o) for o in self.optimizers)
        if isinstance(strategy.scaler, torch.amp.GradScaler):
            self.metrics.scaler = strategy.scaler

    def track_hook_changes(self, cleanup: ExitStack) -> None:
        """Remember the module and the optimizers before a checkpoint or a hook changes them, and again at the end."""
        scheduled = any(isinstance(callback, AccumulationSchedule) for callback in self.callbacks)
        fixed = scheduled or self.settings.accumulate_grad_batches == "auto"
        others = {} if fixed else {"trainer.accumulate_grad_batches": self.session}
        self.hook_changes = HookChanges(self.module, self.optimizers, others)
        cleanup.callback(self.hook_changes.end)

    def allow_weights(self) -> None:
        """Allow users to gather, change and save weights from now on."""
        self.has_weights = True

    def watch_numbers(self) -> None:
        """Check from now on that losses, weights and states are finite."""
        saves = self.stage == "fit" and not self.settings.fast_dev_run
        schedulers = [config.scheduler.state_dict() for config in self.scheduler_configs]
        restored = self.optimizers if self.resumed_from is not None else []
        self.guards.nonfinite.begin_training(restored, schedulers, saves)

    def mark_states_checked(self) -> None:
        """Remember that a checkpoint can hold the optimizers' states."""
        self.checks_states = False

    def _collectives(self) -> int:
        """Return the number of windows and collectives that this process has begun."""
        return self.strategy.processes.begun + self.guards.windows + 10**9 * self.clock.shutting_down

    # -- training ------------------------------------------------------------------------------------------------------

    def begin_training(self, manual: WaitingGradients) -> None:
        """Begin to train, with the methods that the module has after the first hooks.

        Args:
            manual: knows which gradients checkpoints have to hold, with manual optimization.
        """
        self.times.begin()
        self.clock.begin_training()
        self.session.training_batches = self.num_training_batches
        self.guards.begin_training(self.hooks, self.loaders, self.closure_needed)
        if self.step_guard is not None:
            measures = not clipping_finds_it(self.settings, self.module)
            self.guards.judge_steps(self.step_guard, self.loaders, measures)
        self.manual = None if self.module.automatic_optimization else manual
        self.step = Step(self)

    @property
    def step_guard(self) -> StepGuard | None:
        """The callback that decides what to do about bad steps."""
        return next((callback for callback in self.callbacks if isinstance(callback, StepGuard)), None)

    # -- the end -------------------------------------------------------------------------------------------------------

    def tear_down(self) -> None:
        """Call `teardown` of the data module, the callbacks and the module, once."""
        if self._torn_down:
            return
        self._torn_down = True
        self.metrics.end("teardown logs nothing: log in on_train_end, or in on_validation_end or on_test_end.")
        of_data = [self.datamodule.teardown] if self.datamodule is not None else []
        call_all([*of_data, self.hooks.teardown], self.stage)
        for logger in self.loggers if self.strategy.processes.is_global_zero else ():
            logger.finalize("failed" if self.clock.interrupted else "success")

    def end(self) -> None:
        """End the run: nothing can be logged any more. Module and data module stay attached to the trainer."""
        self.session.stage = None
        self.activity.end()
        self.metrics.end("the run has ended: log inside of fit, validate or test.")
        if self.clock.interrupted or self.epoch.in_progress:
            self.metrics.reset_unfinished()
        self.module.untoggle_optimizer()

    # -- loaders and progress ------------------------------------------------------------------------------------------

    @property
    def train_loader(self) -> BatchLoader | None:
        """The batches of training; None outside of `fit`."""
        return self.loaders.train

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of one epoch on this process; None: unknown."""
        return None if self.loaders.train is None else self.loaders.train.length

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Total steps of `fit`, for schedules; `math.inf` if its end is not known."""
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

    def may_still_be_logged(self, name: str) -> bool:
        """Whether a name without a value may get one, after the first validation or epoch at the latest. Collective."""
        if self.loaders.val and self.progress.validated_step == -1:
            return True
        users = users_callbacks(self.callbacks, "on_train_epoch_end") or self.module.overrides("on_train_epoch_end")
        if users and self.progress.epoch == 0 and not self.progress.epoch_ended:
            return True
        logged = set().union(*self.strategy.processes.all_gather_object(self.metrics.names))
        return bool(logged & {name, name.removesuffix("_step"), name.removesuffix("_epoch")})

    def _owners(self) -> dict[str, Any]:
        """Return the user's objects that may hold random generators, by name."""
        of_schedulers = {f"scheduler {number}": one.scheduler for number, one in enumerate(self.scheduler_configs)}
        of_callbacks = {OF_CALLBACK + key: one for key, one in callbacks_by_state_key(self.callbacks).items()}
        of_data = {} if self.datamodule is None else {"data module": self.datamodule}
        optimizers = {f"optimizer {number}": one for number, one in enumerate(self.optimizers)}
        return parts_of({"module": self.module}, optimizers) | of_data | of_schedulers | of_callbacks

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_callbacks(self) -> list[Checkpoint]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, Checkpoint)]

    @cached_property
    def processing_files(self) -> dict[str, str]:
        """The files of a tokenizer or processor in the module or data module; see `processing_files`."""
        return processing_files([*self._with_hyperparameters.values()])

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters of module and data module, as a checkpoint stores them."""
        stored: dict[str, Any] = {"module": {}, "data": {}}
        kinds: dict[str, Any] = {"module": {}, "data": {}}
        named: dict[str, Any] = {}
        for name, one in self._with_hyperparameters.items():
            stored[name], kinds[name] = one.hyperparameters_to_store()
            inside = vars(one).get("_hparams_inside", {})
            if any(inside):
                named[name] = next(iter(inside)) if len(inside) == 1 else inside
        return {**stored, **({"arguments": named} if named else {}), "kinds": kinds}

    def logged_hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters for the loggers: none from `save_hyperparameters(logger=False)`.

        Raises:
            ConfigError: there are loggers, and a name has two values.
        """
        kept = self.hyperparameters()
        for name, one in self._with_hyperparameters.items():
            if not vars(one).get("_hparams_for_loggers", True):
                kept[name] = {}
        module, data = kept["module"], kept["data"]
        twice = [name for name in module.keys() & data.keys() if repr(module[name]) != repr(data[name])]
        if twice and self.loggers:
            raise ConfigError(
                f"the hyperparameters {', '.join(sorted(map(str, twice)))} of the module and of the data module have "
                "different values. Rename one, or call save_hyperparameters(logger=False) in one of the two."
            )
        return {"module": module, "data": data}

    # -- collectives ---------------------------------------------------------------------------------------------------

    def begin_call(self, what: str, data: Any, check: bool) -> None:
        """Compare a collective of the user between the processes, if `check`; see `require_same_call`."""
        processes, progress = self.strategy.processes, self.progress
        if check:
            position = f", after step {progress.step}, in epoch {progress.epoch}, batch {progress.batch}"
            if self.activity.batch is not None:
                position += ", at batch {1} of evaluation loader {0}".format(*self.activity.batch)
            require_same_call(processes, what, data, position)
        processes.begun += 1


class NoRun:
    """Stands for the run of a trainer that has not run yet."""

    stage: str | None = None
    datamodule: DataModule | None = None
    resumed_from: StoragePath | None = None
    origin: StoragePath | None = None
    activity = Activity(None)
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
