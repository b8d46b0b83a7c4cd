"""Callback: the hooks of a run, in running order.

Each line `on_x` is a method that a callback may define (it gets the trainer and the module first) and, unless marked
(callbacks), that a module may define too (without those two). At each hook the callbacks come first, in the order of
the list; then the module; then the callbacks with `runs_last = True`, which read what the others logged (early
stopping, then checkpoints).

    fit
        prepare_data                                    data module, module; once per node
        setup(stage="fit")                              data module, callbacks, module
        configure_model                                 module
        on_load_checkpoint(checkpoint)                  when resuming, before the weights are loaded
        configure_optimizers                            module
        on_fit_start
        on_sanity_check_start                           (callbacks)
            VALIDATION, a few batches
        on_sanity_check_end                             (callbacks)
        on_train_start
        on_save_checkpoint(checkpoint)                  a rehearsal: finds what cannot be stored, writes nothing
        for each epoch:
            on_train_epoch_start                        also when a resumed run continues inside the epoch; then its
                                                        changes of the model and its optimizers are undone
            for each window:
                on_before_zero_grad(optimizer)          for each optimizer
                for each micro-batch of the window:
                    on_before_batch_transfer(batch, dataloader_idx)    data module, else module: returns the batch
                    transfer_batch_to_device(batch, device, dataloader_idx)    data module, else module: the same
                    on_after_batch_transfer(batch, dataloader_idx)     data module, else module: the same
                    on_train_batch_start(batch, batch_idx)    the module's may return -1, which ends the epoch
                    training_step(batch, batch_idx)     module; None skips the batch
                    on_before_backward(loss)
                        loss.backward()
                    on_after_backward
                    on_train_batch_end(outputs, batch, batch_idx)    the last one of a window: after the update;
                                                        outputs: a dict of detached tensors, the loss under "loss"
                on_before_optimizer_step(optimizer)     for each optimizer; gradients complete, unscaled, unclipped
                configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)    module
                    optimizer.step()
                lr_scheduler_step(scheduler, metric)    module; schedulers with interval="step"
                on_train_batch_end of the last micro-batch
                on_train_step_end                       the step is complete: checkpoints by step are written here
                VALIDATION, if val_check_interval says so
            VALIDATION, if it is due at the end of the epoch
            lr_scheduler_step(scheduler, metric)        module; schedulers with interval="epoch"
            on_train_epoch_end                          on_epoch metrics of the epoch are known
            lr_scheduler_step(scheduler, metric)        module; schedulers with interval="epoch" and a monitored value
            on_train_epoch_end of Checkpoint callbacks  checkpoints by epoch are written here
        on_train_end of Checkpoint callbacks            a last checkpoint is written here; a run that continues from it
                                                        has the changes of the hooks below only once
        after a stop inside an epoch, but for signals and the deadline:
            on_train_epoch_end                          on_epoch metrics of the epoch so far are known
        on_train_end
        on_fit_end
        teardown(stage="fit")                           data module, callbacks, module

    VALIDATION (test is the same with its own name)
        on_validation_model_zero_grad                   module; in fit only
        on_validation_model_eval                        module; it is in eval mode by now
        on_validation_start
        on_validation_epoch_start
        for each loader, for each batch:
            on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer    module
            on_validation_batch_start(batch, batch_idx[, dataloader_idx])    the index where there are several loaders,
            validation_step(batch, batch_idx[, dataloader_idx])    module    or where the method has to have it
            on_validation_batch_end(outputs, batch, batch_idx[, dataloader_idx])
        on_validation_epoch_end                         on_epoch metrics are known
        on_validation_end                               checkpoints by monitored value are written here
        on_validation_model_train                       module; its former mode is restored

    predict
        on_predict_model_eval                           module
        on_predict_start
        on_predict_epoch_start
        for each loader, for each batch:
            transfer hooks; on_predict_batch_start; predict_step
            on_predict_batch_end(outputs, batch, batch_idx[, dataloader_idx])
        on_predict_epoch_end
        on_predict_end
        on_predict_model_train                          module

    on_exception(exception)                             (callbacks), data module; before teardown, no collectives
    on_save_checkpoint(checkpoint)                      each time a checkpoint is written
    on_checkpoint_saved(path)                           (callbacks) rank 0 only: the checkpoint is committed, and "last"
                                                        points to it; with async_save: at the end of a later step

With manual optimization a window is one batch, and between `on_train_batch_start` and `on_train_batch_end` there is
`training_step` alone. `training_step` calls backward and the optimizers, and those calls run `on_before_backward`,
`on_after_backward`, `on_before_optimizer_step` and `on_before_zero_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

from trainer.arguments import ChecksArguments, fingerprint_of_call
from trainer.errors import ConfigError, unknown_name_error
from trainer.names.misses import Answers

if TYPE_CHECKING:
    import torch

    from trainer.checkpoint.disk import WriteError
    from trainer.checkpoint.storage import StoragePath
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class Callback(ChecksArguments, Answers):
    """Base class of callbacks. The top of this file shows when each hook is called.

    Each hook gets the trainer and `pl_module`, Lightning's name for the module of the run.

    `state_dict` and `load_state_dict` keep a callback's state in checkpoints; the state is data only (numbers, strings,
    lists, dicts, tensors).
    """

    runs_last: ClassVar[bool] = False
    """Run after the module's hooks, for callbacks that read logged values."""
    agree_on: ClassVar[tuple[str, ...] | None] = None
    """Attributes that must be equal on all processes, which must all have this callback, because it communicates or
    decides for the run. None: some processes may have it and others not."""
    stops_early: ClassVar[bool] = False
    """True for `trainer.early_stopping_callback`."""
    takes_predictions: ClassVar[bool] = False
    """True if this callback takes the outputs of `predict`, which then keeps none in memory."""
    swaps_weights: ClassVar[bool] = False
    """True if validations have other weights than the training, whose weights checkpoints keep meanwhile."""
    in_place_of: ClassVar[str | None] = None
    """The key of `DEFAULT_CALLBACKS` whose callback the trainer leaves out where this one is given."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Remember the arguments, which distinguish several callbacks of one class in a checkpoint."""
        self = super().__new__(cls)
        self.__dict__["_made_with"] = fingerprint_of_call(cls, args, options)
        return self

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint: what this callback is, whatever its place in the list.

        The arguments of the constructors distinguish several callbacks with one name.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return data to save in a checkpoint; an empty dict saves nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def problems(self, config: Any, module: TrainModule, stage: str) -> list[str]:
        """Return the problems of a run with this callback, as sentences that name the fix. No process is started yet.

        Args:
            config: the `ResolvedConfig`: strategy, settings and all callbacks.
            module: the argument of `fit` and the like, before `configure_model`.
        """
        return []

    def reason_to_stop(self) -> str | None:
        """Return why a run that is resumed with this callback's state stops at once; None: it continues."""
        return None

    def monitor_problems(self, logged: Collection[str], missing: Callable[[str], bool]) -> list[str]:
        """Return a sentence for each logged name that this callback needs and that is missing.

        Args:
            logged: the names logged so far.
            missing: whether a name will not be logged any more; collective.
        """
        return []

    def log(self, *args: Any, **options: Any) -> None:
        """Log a value during a run: `self.log` of the module, whose arguments these are."""
        _module_of(self).log(*args, **options)

    def log_dict(self, *args: Any, **options: Any) -> None:
        """Call `log` for each entry of a dict, with the same options."""
        _module_of(self).log_dict(*args, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_trainer"}

    def print_text(self, text: str, file: TextIO | None = None) -> bool:
        """Print for `trainer.print` on rank 0 and return True if this callback draws on the terminal; else False."""
        return False

    def output_location(self) -> tuple[str, Path] | None:
        """Return a label that ends with a colon, or a command, and the path of what this run wrote, for the last lines
        of `trainer fit` and `predict`; None: print nothing."""
        return None

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None: ...
    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None: ...
    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None: ...
    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None: ...
    def on_checkpoint_saved(self, trainer: Trainer, pl_module: TrainModule, path: str) -> None: ...
    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None: ...

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_sanity_check_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_sanity_check_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: TrainModule, optimizer: torch.optim.Optimizer
    ) -> None: ...
    def on_before_backward(self, trainer: Trainer, pl_module: TrainModule, loss: torch.Tensor) -> None: ...
    def on_after_backward(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: TrainModule, optimizer: torch.optim.Optimizer
    ) -> None: ...

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_test_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_test_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_test_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...

    on_predict_batch_start = on_validation_batch_start
    on_predict_batch_end = on_validation_batch_end


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
"""The names of all hooks, in the order of `Callback`."""


class AccumulationSchedule(Callback):
    """A callback that sets `trainer.accumulate_grad_batches` by epoch."""

    agree_on = ("scheduling",)

    scheduling: Mapping[int, int]
    """Epoch -> micro-batches of a window from that epoch on; the trainer's setting before."""


class AddsGroups(Callback):
    """A callback that adds groups to optimizers while training; a resumed run adds the checkpoint's groups."""


class StepGuard(Callback):
    """A callback that decides about bad steps, which `guards/bad_steps.py` finds before they change the weights."""

    losses: Any
    """The `LossWindow` that a loss is compared with."""
    left_out: set[tuple[int, int]]
    """The first micro-batches, as (epoch, batch), of steps that are passed over."""

    def refused(self, bad: Any) -> str | None:
        """Return the checkpoint to go back to after a `BadStep`; None: skip the step. Collective."""
        return None


class Checkpoint(Callback):
    """A callback that writes checkpoints, one of `trainer.checkpoint_callbacks`.

    Runs after all other callbacks, because a checkpoint contains their state; its `on_train_epoch_end` also after the
    schedulers' step. Its `on_train_end` comes before the last hooks of all others, because a run that continues from
    the checkpoint calls those hooks at its own end. Not used in a `fast_dev_run`.
    """

    runs_last: ClassVar[bool] = True
    agree_on: ClassVar[tuple[str, ...] | None] = ()
    in_place_of: ClassVar[str | None] = "enable_checkpointing"

    dirpath: str | Path | None = None
    """Folder or URL of the checkpoints. None: `checkpoints` in the run directory."""
    monitor: str | None = None
    """The value that decides which checkpoint is the best. None: there is no best one."""
    save_weights_only: bool = False
    """True if training cannot continue from its checkpoints."""
    save_top_k: int = 0
    """Number of the best checkpoints that are kept; -1 for all."""
    _folder: StoragePath | None = None

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint; empty before the first."""
        return ""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The monitored value of the best checkpoint."""
        return None

    @property
    def last_model_path(self) -> str:
        """The path of the newest checkpoint; empty before the first."""
        return ""

    def newest_on_disk(self) -> str:
        """Return the path of the newest finite checkpoint that was written; empty without one.

        Waits for one that is being written, which may fail. Called on rank 0.
        """
        return self.last_model_path

    @property
    def write_seconds(self) -> float | None:
        """Seconds that the newest write took until its commit, known on the processes that write; None: none yet."""
        return None

    @property
    def unsaved(self) -> WriteError | None:
        """The error that kept the last weights from being saved; None if they were saved or nothing was due."""
        return None


def problem_of_several(callback: Callback, config: Any, kind: type, what: str) -> list[str]:
    """Return a problem if `callback` is the first of several callbacks of a kind, which is described by `what`."""
    several = [one for one in config.callbacks if isinstance(one, kind)]
    return [f"{len(several)} {what}: give one."] if len(several) > 1 and several[0] is callback else []


def attach(callback: Callback, trainer: object) -> None:
    """Give a callback the trainer of the run, which its copies and pickles leave out."""
    callback.__dict__["_trainer"] = trainer


def _module_of(callback: Callback) -> TrainModule:
    """Return the module of the callback's run; raise ConfigError outside of one."""
    trainer: Trainer | None = callback.__dict__.get("_trainer")
    if trainer is None:
        raise ConfigError(f"{type(callback).__name__}.log works inside fit, validate, test and predict.")
    return trainer.module


DEFAULT_CALLBACKS = {
    "enable_model_summary": "ModelSummary",
    "enable_progress_bar": "ProgressBar",
    "enable_checkpointing": "ModelCheckpoint",
}
"""The Trainer's arguments that add a callback -> classes of `trainer.callbacks`."""


def available_callbacks() -> Mapping[str, type[Callback]]:
    """Return the classes of `trainer.callbacks` by name."""
    callbacks: Mapping[str, type[Callback]] = import_module("trainer.callbacks").CALLBACKS
    return callbacks


def callback_named(name: str) -> type[Callback]:
    """Return the class of `trainer.callbacks` of this name.

    Raises:
        ConfigError: no class has this name.
    """
    known = available_callbacks()
    try:
        return known[name]
    except KeyError:
        raise unknown_name_error("callback", name, known) from None
