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
        for each epoch:
            on_train_epoch_start                        also when a resumed run goes on inside the epoch
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
        after a stop inside an epoch, but for signals and the deadline:
            on_train_end of Checkpoint callbacks
            on_train_epoch_end                          on_epoch metrics of the epoch so far are known
        on_train_end                                    a last checkpoint is written here
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

import inspect
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TextIO

from trainer.arguments import check_constructor, make_folder
from trainer.checkpoint.disk import complete_lines, reason
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.compat.answers import answer_members, uncalled_overrides
from trainer.compat.names import FORMER_HOOKS
from trainer.distributed.environment import detect_environment
from trainer.errors import RENAMED, ConfigError, did_you_mean, raise_problems, unknown_name_error
from trainer.metrics.background_calls import BackgroundCalls
from trainer.profiling import Phase, during, unheard

if TYPE_CHECKING:
    import torch

    from trainer.metrics.logger_folder import LoggerFolder
    from trainer.metrics.media import Media
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class Callback:
    """Base class of callbacks. The top of this file shows when each hook is called.

    Each hook gets the trainer and `pl_module`, Lightning's name for the module of the run.

    `state_dict` and `load_state_dict` keep a callback's state in checkpoints; the state is data only (numbers, strings,
    lists, dicts, tensors).
    """

    runs_last: ClassVar[bool] = False
    """Run after the module's hooks, for callbacks that read logged values."""
    agree_on: ClassVar[tuple[str, ...] | None] = None
    """Attributes that must be equal on all processes, all of which must have this callback, because it communicates or
    decides for the run. None: some processes may have it and others not."""
    stops_early: ClassVar[bool] = False
    """True for `trainer.early_stopping_callback`."""
    takes_predictions: ClassVar[bool] = False
    """True if this callback takes the outputs of `predict`, which then keeps none in memory."""
    in_place_of: ClassVar[str | None] = None
    """The key of `DEFAULT_CALLBACKS` whose callback the trainer leaves out where this one is given."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Have the constructors of this package's callbacks check the types of their arguments."""
        super().__init_subclass__(**options)
        if cls.__module__.startswith("trainer."):
            check_constructor(cls)
            answer_members(cls, cls.__name__)

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint; the trainer numbers several callbacks with one name."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return data to save in a checkpoint; an empty dict saves nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def problems(self, config: Any, module: TrainModule, stage: str) -> list[str]:
        """Return the problems of a run with this callback, as sentences that name the fix. No process is started yet.

        Args:
            config: the `ResolvedConfig`: strategy, settings and all callbacks.
            module: the argument of `fit` and the like, before `configure_model`.
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
        """Return a label or command, and the path of what this run wrote, for the last lines of `trainer fit` and
        `predict`; None: print nothing."""
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
    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None: ...
    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None: ...


class Overridable:
    """A property that an object may replace by an attribute of its own."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.__doc__ = read.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self.read(instance)


def flat_hyperparameters(hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """Return a run's hyperparameters as Lightning's loggers get them: those of the data and the module in one dict.

    A name with two values is `data/name` and `name`, the module's.
    """
    if hyperparameters.keys() != {"module", "data"}:
        return hyperparameters
    module: dict[str, Any] = hyperparameters["module"]
    data: dict[str, Any] = hyperparameters["data"]
    return {f"data/{n}" if n in module and module[n] != v else n: v for n, v in data.items()} | module


class Logger(Callback):
    """A callback that receives the metrics. `log_hyperparameters`, `log_metrics`, `log_media` and `flush` are called
    on rank 0 only.

    A logger writes into `trainer.run_dir` between `setup` and `teardown`, and continues its files after a resume: rows
    after the resumed step are dropped, so that there is one row per step.
    """

    group_separator: ClassVar[str] = "/"
    place: LoggerFolder | None = None
    """The folder of the files, for a logger that writes files of its own. The run sets its number before `setup`."""
    _trainer: Trainer | None = None
    _told_media = False

    def __init__(self) -> None:
        super().__init__()

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Record the run's hyperparameters (data only, possibly nested). Called once, before the first step."""

    def record_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Call `log_hyperparameters`, or, where a subclass overrides this method, Lightning's `log_hyperparams`."""
        names = ("log_hyperparameters", "log_hyperparams")
        if next(name for kind in type(self).__mro__ for name in names if name in vars(kind)) == "log_hyperparams":
            self.log_hyperparams(flat_hyperparameters(hyperparameters))
        else:
            self.log_hyperparameters(hyperparameters)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Record values at `step`, the number of completed steps and the only step axis."""

    def flush(self) -> None:
        """Write all logged values to the files. Called before each checkpoint and at the end."""
        self.save()

    # -- Lightning's names ---------------------------------------------------------------------------------------------

    def log_hyperparams(self, params: Any = None, metrics: Any = None, step: int | None = None) -> None:
        """Record hyperparameters, a dict or an `argparse.Namespace`.

        Args:
            metrics: values to record with them, or one, as `hp_metric`.
            step: of the values. Default: the run's.
        """
        values = {} if params is None else params if isinstance(params, Mapping) else vars(params)
        if self._is_rank_zero:
            self.log_hyperparameters(dict(values))
            if metrics:
                values = metrics if isinstance(metrics, dict) else {"hp_metric": metrics}
                self.log_metrics(values, self._step if step is None else step)

    def log_graph(self, model: TrainModule, input_array: Any = None) -> None:
        """Record the graph of the module. Called once, before the first step."""

    def save(self) -> None:
        """Write what was logged. Called by `flush`."""

    def finalize(self, status: str) -> None:
        """Finish the work of a stage. Called after it with "success" or "failed"."""

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Record a checkpoint. Called when one is committed."""

    @Overridable
    def experiment(self) -> Any:
        """The object behind the logger. On other ranks than 0 its attributes may be called, and do nothing."""
        return DummyExperiment()

    @Overridable
    def name(self) -> str | None:
        """The name of the experiment: the folder in which the runs are."""
        return None if self._trainer is None else self._trainer.run_dir.parent.name

    @Overridable
    def version(self) -> int | str | None:
        """The name or number of the run."""
        folder = "" if self._trainer is None else self._trainer.run_dir.name
        number = folder.removeprefix("version_")
        return int(number) if number != folder and number.isdecimal() else folder or None

    @Overridable
    def save_dir(self) -> Any:
        """The folder in which the folders of experiments are."""
        return None if self._trainer is None else str(self._trainer.settings.root)

    @Overridable
    def root_dir(self) -> Any:
        """The folder of the experiment."""
        return None if self._trainer is None else str(self._trainer.run_dir.parent)

    @Overridable
    def log_dir(self) -> Any:
        """The folder of the run."""
        return None if self._trainer is None else str(self._trainer.run_dir)

    @property
    def _run_dir(self) -> Path | None:
        return None if self._trainer is None else self._trainer.run_dir

    @property
    def _is_rank_zero(self) -> bool:
        return detect_environment().rank == 0 if self._trainer is None else self._trainer.is_global_zero

    @property
    def _step(self) -> int:
        return 0 if self._trainer is None else self._trainer.global_step

    def log_media(self, key: str, media: Media, step: int) -> None:
        """Record `Images`, a `Text`, a `Histogram` or a `Table` of `trainer.metrics.media`; a logger that can overrides
        this."""
        if not self._told_media:
            self._told_media = True
            what = f"{type(media).__name__.lower()} such as {key!r}"
            log.info("%s shows no %s: left out. (Logged once.)", type(self).__name__, what)

    # -- images and the like: the same call for every logger, on any rank; their module is imported at the first -------

    def log_image(
        self,
        key: str,
        images: Any,
        step: int | None = None,
        caption: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        """Log a picture or a list of pictures; `media.as_images` has their forms. Ranks other than 0 do nothing.

        Args:
            key: the name of the pictures.
            step: default: the number of completed steps.
            caption: one for all pictures, or a list with one for each.
            options: lists with an entry for each picture, for Weights & Biases (`masks`, `boxes`).

        Raises:
            ConfigError: a picture has a shape that no picture has, or the lists have other lengths.
        """
        from trainer.metrics.media import as_images

        self._log_media(key, step, as_images, images, caption, options)

    def log_text(
        self,
        key: str,
        text: str | Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Log a text, which may have Markdown; or, with `columns` and `data`, a table of texts as `log_table` does."""
        if isinstance(data, int) and dataframe is None and step is None:
            data, step = None, data  # log_text("note", "all is well", 5)
        if columns is not None or data is not None or dataframe is not None:
            columns = columns if columns is not None or text is None else list(text)
            self.log_table(key, columns, data, dataframe, step)
        else:
            from trainer.metrics.media import as_text

            self._log_media(key, step, as_text, text)

    def log_histogram(self, key: str, values: Any, step: int | None = None, bins: int = 64) -> None:
        """Log the distribution of the finite numbers of a tensor, an array or a list."""
        from trainer.metrics.media import as_histogram

        self._log_media(key, step, as_histogram, values, bins)

    def log_figure(self, key: str, figure: Any, step: int | None = None, close: bool = True) -> None:
        """Log a figure of matplotlib as a picture, and close it."""
        from trainer.metrics.media import close_figure, figure_images

        self._log_media(key, step, figure_images, figure)
        if close:
            close_figure(figure)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table: `columns` and `data`, a list of rows; or a pandas data frame."""
        from trainer.metrics.media import as_table

        self._log_media(key, step, as_table, columns, data, dataframe)

    def _log_media(self, key: str, step: int | None, make: Callable[..., Media], *args: Any) -> None:
        if not isinstance(key, str) or not key:
            raise ConfigError(f"{type(self).__name__} got the name {key!r}: give a text, such as 'val/samples'.")
        trainer = self._trainer
        if trainer is not None and not trainer.is_global_zero:
            return
        if step is None:
            step = 0 if trainer is None else trainer.global_step
        elif type(step) is not int or step < 0:
            raise ConfigError(f"{key!r}: step={step!r}: give the number of completed steps, an integer from 0.")
        self.log_media(key, make(*args), step)


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a method `experiment` that gives other ranks than 0 an object whose calls do nothing."""

    @wraps(function)
    def experiment(self: Logger) -> Any:
        return function(self) if self._is_rank_zero else DummyExperiment()

    return experiment


class FileLogger(Logger):
    """A logger that writes one file, on rank 0; a resumed run continues the file of the run before.

    A subclass defines `open`. The file is written before each checkpoint, at the end, and every `flush_seconds`.
    """

    place: LoggerFolder
    file_name: ClassVar[str]
    flush_seconds: float
    """Longest time between two writes to the file, as long as values are logged."""
    _file: Any = None
    _resumed: Mapping[str, Any] = {}
    """The state of the checkpoint that the run resumes from."""
    _flushed_at = 0.0

    def open(self, continue_from: int | None) -> Any:
        """Open the file and return it: an object with `write(to_disk=False)`, `report_loss()` and `close()`.

        Args:
            continue_from: the step of the checkpoint that the run resumes from; None: no training.
        """
        raise NotImplementedError

    @property
    def path(self) -> Path | None:
        """The path of the file; None before a run."""
        folder = self.place.folder(self._run_dir)
        return None if folder is None else folder / self.file_name

    log_dir = Overridable(lambda self: self.place.log_dir(self._run_dir))
    save_dir = Overridable(lambda self: self.place.save_dir(self._run_dir))
    root_dir = Overridable(lambda self: self.place.root_dir(self._run_dir))
    name = Overridable(lambda self: self.place.name_in(self._run_dir))
    version = Overridable(lambda self: self.place.version_in(self._run_dir))

    def earlier_lines(self) -> list[bytes]:
        """Make the folder of the file; return the lines that the file has already, without one that was cut off.

        Raises:
            ConfigError: the folder cannot be made, or the file cannot be read.
        """
        path = self.path
        assert path is not None
        make_folder(path.parent, f"{type(self).__name__}(save_dir=...)")
        try:
            return complete_lines(path)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({reason(error)}), and would be overwritten: try again, or move it away."
            ) from error

    @property
    def opened(self) -> Any:
        """The file, opened if need be."""
        if self._file is None:
            self._open(None)
        return self._file

    def _open(self, continue_from: int | None) -> None:
        self._file = self.open(continue_from)
        self._flushed_at = time.monotonic()

    def write_if_due(self) -> None:
        """Write the file if the last write is `flush_seconds` ago."""
        if time.monotonic() - self._flushed_at > self.flush_seconds:
            self._flushed_at = time.monotonic()
            self._file.write()

    def save(self) -> None:
        """Write all logged values to the file. Called by `flush`."""
        if self._file is not None:
            self._flushed_at = time.monotonic()
            self._file.write(to_disk=True)

    def close(self) -> None:
        """Write what is pending, and close the file."""
        if self._file is not None:
            self.flush()
            FileLogger.save(self)  # whatever a subclass's `save` does
            self._file.report_loss()
            self._file.close()
            self._file = None

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        self._resumed = {}

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.is_global_zero:
            self._open(continue_from=trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self.flush()


class Tracker(Logger):
    """A logger whose values go to the client of a tracker: a service, or a store that others read.

    A subclass defines `open`, `send_metrics`, and what else its tracker has. `open` is called before the first step, so
    that a mistake ends the run there; all `send_` methods are called by a thread of their own, in order, so that
    a slow client delays no step, and what they raise is logged and ends no training. A resumed run continues the
    same run of the tracker, and sends again what was logged before its checkpoint and not sent when the process ended.
    """

    prefix: str = ""
    """Put before the name of each value, with a "-"."""
    log_model: bool | Literal["all"] = False
    """Send checkpoints: the best and the last one at the end of training (True), or each as it is written ("all")."""
    given_run_id: str | None = None
    """The run that the user wants to continue, also in a second `fit`; None: a new one for each, unless resumed."""
    seconds_at_end: float = 60.0
    """Longest wait at the end of a stage for calls that are not done; 10 seconds after an error."""

    _client: Any = None
    _calls: BackgroundCalls | None = None
    _has_fit = _has_failed = False
    _resumed_run: str | None = None
    _resumed_unsent: tuple[Any, ...] = ()

    # -- for a subclass to define --------------------------------------------------------------------------------------

    def open(self, run_id: str | None) -> Any:
        """Begin a run of the tracker, or continue `run_id`; return the object that users get as `experiment`."""
        raise NotImplementedError

    def opened_run_id(self) -> str | None:
        """Return the name by which `open` continues the open run, for checkpoints."""
        return None

    def is_ended(self) -> bool:
        """Whether the user's program has ended the open run, so that `open` has to continue it for the next value."""
        return False

    def check(self) -> None:
        """Raise an error if the client is not installed, or does not take the arguments. Called before the run."""

    def send_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Send the run's hyperparameters (data only, possibly nested)."""

    def send_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send values at `step`, the number of completed steps."""
        raise NotImplementedError

    def send_media(self, key: str, media: Media, step: int) -> None:
        """Send `Images`, a `Text`, a `Histogram` or a `Table` of `trainer.metrics.media`."""
        super().log_media(key, media, step)

    def send_checkpoint(self, folder: Path, name: str, aliases: list[str]) -> None:
        """Send the files of a checkpoint, which stay as they are until this returns."""

    def finish(self, failed: bool) -> None:
        """Tell the tracker that a stage has ended. Called in the training thread, after the last call is done."""

    def close(self) -> None:
        """Release the open run, because another one follows."""

    # -- the run of the tracker ----------------------------------------------------------------------------------------

    @property
    def experiment(self) -> Any:
        """The client's own object, for what it can do beyond this class. On ranks other than 0 its calls do nothing."""
        rank = detect_environment().rank if self._trainer is None else self._trainer.rank
        return self._opened() if rank == 0 else DummyExperiment()

    @property
    def version(self) -> str | None:
        """The id of the tracker's run; None: there is none yet."""
        return self.given_run_id if self._client is None else self.opened_run_id()

    def _opened(self) -> Any:
        if self._client is not None and self.is_ended():
            self._resumed_run, self._client = self.opened_run_id(), None
        if self._client is None:
            self._client = self.open(self._resumed_run or self.given_run_id)
            self._calls = BackgroundCalls(type(self).__name__)
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None, "_calls": None, "_trainer": None}

    def _leave_run(self) -> None:
        if self._client is not None:
            self.close()
        self._client, self._resumed_run = None, None

    def _call(self, function: Callable[..., object], *args: Any, keep: Any = None) -> None:
        self._opened()
        assert self._calls is not None
        self._calls.call(function, *args, keep=keep)

    # -- state: the run, and what was not sent -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._client is None or self._calls is None:
            return {}
        return {"run": self.opened_run_id(), "unsent": self._calls.unfinished()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        values = {"step": Integer(), "values": {str: NUMBER}}
        require(state, {"run?": (str, None), "unsent?": [values]}, type(self).__name__)
        fits = self._trainer is not None and self._trainer.stage == "fit"
        run, open_run = state.get("run"), None if self._client is None else self.opened_run_id()
        if run is None or self.given_run_id not in (None, run) or run == open_run or (open_run and not fits):
            return
        if open_run is not None:
            log.info("%s: going on with run %s of the checkpoint, instead of %s", type(self).__name__, run, open_run)
            self._leave_run()
        self._resumed_run = run
        self._resumed_unsent = tuple(state.get("unsent", ())) if fits else ()

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._trainer = trainer
        self._has_failed, self._resumed_unsent = False, ()
        if stage == "fit":
            for copy in trainer.run_dir.glob(f"{SENDING}*"):  # of a process that was killed
                shutil.rmtree(copy, ignore_errors=True)
            if self._has_fit and self.given_run_id is None:
                self._leave_run()
            self._has_fit = True
        if trainer.is_global_zero:
            self.check()

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        for one in self._resumed_unsent if trainer.is_global_zero else ():
            self._call(self.send_metrics, one["values"], one["step"], keep=one)
        self._resumed_unsent = ()

    def on_checkpoint_saved(self, trainer: Trainer, pl_module: TrainModule, path: str) -> None:
        if self.log_model == "all":
            self._send_checkpoint(path)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.log_model is True and trainer.is_global_zero:
            written = [p for c in trainer.checkpoint_callbacks for p in (c.last_model_path, c.best_model_path) if p]
            for path in dict.fromkeys(written):
                self._send_checkpoint(path)

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self._has_failed = True

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if self._calls is not None:
            self._calls.wait(min(10.0, self.seconds_at_end) if self._has_failed else self.seconds_at_end)
            self.finish(self._has_failed)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._call(self.send_hyperparameters, hyperparameters)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if self.prefix:
            metrics = {f"{self.prefix}-{name}": value for name, value in metrics.items()}
        self._call(self.send_metrics, metrics, step, keep={"step": step, "values": dict(metrics)})

    def log_media(self, key: str, media: Media, step: int) -> None:
        self._call(self.send_media, f"{self.prefix}-{key}" if self.prefix else key, media, step)

    def _send_checkpoint(self, path: str) -> None:
        """Send the files from a copy of hard links, which retention does not delete and which takes no space."""
        trainer = self._trainer
        assert trainer is not None
        folder = Path(path)
        if not folder.is_dir():
            log.warning("%s: %s is not a folder of this machine, and is not sent.", type(self).__name__, path)
            return
        best = any(path == one.best_model_path for one in trainer.checkpoint_callbacks)
        copy = linked_copy(folder, trainer.run_dir)
        self._call(self._send_and_delete, copy, folder.name, ["latest", "best"] if best else ["latest"])

    def _send_and_delete(self, copy: Path, name: str, aliases: list[str]) -> None:
        try:
            self.send_checkpoint(copy, name, aliases)
        finally:
            shutil.rmtree(copy, ignore_errors=True)


SENDING = ".sending-"
"""The beginning of the names of copies that are being sent."""


def linked_copy(folder: Path, parent: Path) -> Path:
    """Return a new folder in `parent` with hard links to the files of a folder, or copies where there are no links."""
    copy = Path(tempfile.mkdtemp(prefix=SENDING, dir=parent))

    def link_or_copy(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    shutil.copytree(folder, copy, copy_function=link_or_copy, dirs_exist_ok=True)
    return copy


class AccumulationSchedule(Callback):
    """A callback that sets `trainer.accumulate_grad_batches` by epoch."""

    agree_on = ("scheduling",)

    scheduling: Mapping[int, int]
    """Epoch -> micro-batches of a window from that epoch on; the trainer's setting before."""


class AddsGroups(Callback):
    """A callback that adds groups to optimizers while training; a resumed run adds those of the checkpoint."""


class StepGuard(Callback):
    """A callback that decides about bad steps, which `loop/bad_steps.py` finds before they change the weights."""

    losses: Any
    """The `LossWindow` with which a loss is compared."""
    left_out: set[tuple[int, int]]
    """The first micro-batches, as (epoch, batch), of steps that are passed over."""

    def refused(self, bad: Any) -> str | None:
        """Return the checkpoint to go back to after a `BadStep`; None: skip the step. Collective."""
        return None


class DummyExperiment:
    """The experiment of a `DummyLogger`: it has every attribute and entry, and a call of it does nothing."""

    def __getattr__(self, name: str) -> DummyExperiment:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getitem__(self, key: Any) -> DummyExperiment:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...


class DummyLogger(Logger):
    """The logger of a `fast_dev_run`: any of its methods, and of its `experiment`, may be called, and does nothing."""

    name = version = ""
    save_dir = None

    def __init__(self) -> None:
        self.experiment = DummyExperiment()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_media(self, *args: Any) -> None: ...

    def __getattr__(self, name: str) -> DummyExperiment:
        return getattr(DummyExperiment(), name)  # type: ignore[no-any-return]  # it has every attribute

    def __getitem__(self, key: Any) -> DummyLogger:
        return self


class Checkpoint(Callback):
    """A callback that writes checkpoints, one of `trainer.checkpoint_callbacks`.

    Runs after all other callbacks, because a checkpoint contains their state; its `on_train_epoch_end` also after the
    schedulers' step. Where training ends for good inside an epoch, its `on_train_end` comes before the others'
    `on_train_epoch_end`, which belongs to the end that the epoch has when training goes on. Not used in a
    `fast_dev_run`.
    """

    runs_last: ClassVar[bool] = True
    agree_on: ClassVar[tuple[str, ...] | None] = ()
    in_place_of: ClassVar[str | None] = "enable_checkpointing"

    dirpath: str | Path | None = None
    """Folder or URL of the checkpoints. None: `checkpoints` in the run directory."""

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
    def unsaved(self) -> str | None:
        """The reason why the last weights were not saved; None if they were saved or nothing was due."""
        return None


def attach(callback: Callback, trainer: Trainer) -> None:
    """Give a callback the trainer of the run, which its copies and pickles leave out."""
    callback.__dict__["_trainer"] = trainer


def _module_of(callback: Callback) -> TrainModule:
    """Return the module of the callback's run; raise ConfigError outside of one."""
    trainer: Trainer | None = callback.__dict__.get("_trainer")
    if trainer is None:
        raise ConfigError(f"{type(callback).__name__}.log works inside fit, validate, test and predict.")
    return trainer.module


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
"""The names of all hooks, in the order of `Callback`."""


OTHERS_HOOKS = {
    "on_epoch_begin": "on_train_epoch_start",
    "on_step_end": "on_train_step_end",
    "on_train_begin": "on_train_start",
}
"""Names of hooks in other trainers -> the equivalent here."""


def is_like_a_hook(name: str, known: Collection[str]) -> bool:
    """Whether a method of this name looks like a hook, of which `known` are the names, without being one."""
    if name.startswith("on_"):
        return name not in known
    return f"on_{name}" in known and not name.endswith("_checkpoint")


def called_by_others(kind: type) -> set[str]:
    """Return the names that methods of the user's classes call in methods of other names: their own helpers."""
    users = [one for one in kind.__mro__ if not one.__module__.startswith(("trainer.", "torch.", "builtins"))]
    functions = [value for one in users for value in vars(one).values() if inspect.isfunction(value)]
    return {name for one in functions for name in one.__code__.co_names if name != one.__code__.co_name}


def check_hooks(plug: object, known: Iterable[str]) -> list[str]:
    """Return a problem for each method of `plug` whose name looks like a hook, but which would never be called."""
    known, helpers = set(known), called_by_others(type(plug))
    problems = []
    for name in dir(type(plug)):
        if not is_like_a_hook(name, known) or name in helpers:
            continue
        without_on = f"on_{name}" in known
        if callable(getattr(type(plug), name)):
            renamed = OTHERS_HOOKS.get(name, f"on_{name}" if without_on else None)
            advice = f" Did you mean {renamed!r}?" if renamed else did_you_mean(name, known)
            if name in FORMER_HOOKS:
                advice = f" Use {FORMER_HOOKS[name]}."
            if RENAMED.get(name, name) in set(HOOKS) - known:
                advice = f" Callbacks have {RENAMED.get(name, name)!r}, and modules have not."
            problems.append(
                f"{type(plug).__name__}.{name} is not a hook, so it would never be called.{advice} "
                "Every hook, in running order, stands at the top of trainer/callback.py."
            )
    return problems


def callback_problems(callback: Callback) -> list[str]:
    """Return a problem for each misspelt hook and each hook with wrong parameters."""
    wrong = [
        check_signature(callback, hook, parameters_of(getattr(Callback, hook)))
        for hook in HOOKS
        if _overrides(callback, hook)
    ]
    problems = [*check_hooks(callback, HOOKS), *filter(None, wrong)]
    if not isinstance(callback, Logger):
        problems += uncalled_overrides(callback)
    if hasattr(callback, "after_module"):
        problems.append(
            f"{type(callback).__name__}.after_module has no effect.{did_you_mean('after_module', ['runs_last'])}"
        )
    if callback.in_place_of not in (None, *DEFAULT_CALLBACKS):
        allowed = ", ".join(map(repr, DEFAULT_CALLBACKS))
        problems.append(f"{type(callback).__name__}.in_place_of={callback.in_place_of!r}: allowed are None, {allowed}.")
    return problems


class CallbackList:
    """Calls the hooks of several callbacks: each hook calls, in order, the callbacks that override it.

    The calls are bound in the constructor, so that an unused hook costs one empty call. Trainer and module, the first
    arguments of every hook, are bound too: the loop calls `hooks.on_train_start()` and needs no Trainer. A hook set on
    an instance (`callback.on_fit_start = f`) counts as overridden. If profilers listen to `phase`, each call of a hook
    is a phase.

    Args:
        callbacks: the callbacks in calling order.
        trainer, module: the first arguments of every hook.
        phase: the run's phases.
    """

    setup: Callable[[str], None]
    teardown: Callable[[str], None]
    on_exception: Callable[[BaseException], None]
    on_save_checkpoint: Callable[[dict[str, Any]], None]
    on_checkpoint_saved: Callable[[str], None]
    on_load_checkpoint: Callable[[dict[str, Any]], None]
    on_fit_start: Callable[[], None]
    on_fit_end: Callable[[], None]
    on_sanity_check_start: Callable[[], None]
    on_sanity_check_end: Callable[[], None]
    on_train_start: Callable[[], None]
    on_train_end: Callable[[], None]
    on_train_epoch_start: Callable[[], None]
    on_train_epoch_end: Callable[[], None]
    on_train_step_end: Callable[[], None]
    on_train_batch_start: Callable[[Any, int], None]
    on_train_batch_end: Callable[[Any, Any, int], None]
    on_before_zero_grad: Callable[[torch.optim.Optimizer], None]
    on_before_backward: Callable[[torch.Tensor], None]
    on_after_backward: Callable[[], None]
    on_before_optimizer_step: Callable[[torch.optim.Optimizer], None]
    on_validation_start: Callable[[], None]
    on_validation_end: Callable[[], None]
    on_validation_epoch_start: Callable[[], None]
    on_validation_epoch_end: Callable[[], None]
    on_validation_batch_start: Callable[..., None]
    on_validation_batch_end: Callable[..., None]
    on_test_start: Callable[[], None]
    on_test_end: Callable[[], None]
    on_test_epoch_start: Callable[[], None]
    on_test_epoch_end: Callable[[], None]
    on_test_batch_start: Callable[..., None]
    on_test_batch_end: Callable[..., None]
    on_predict_start: Callable[[], None]
    on_predict_end: Callable[[], None]
    on_predict_epoch_start: Callable[[], None]
    on_predict_epoch_end: Callable[[], None]
    on_predict_batch_start: Callable[..., None]
    on_predict_batch_end: Callable[..., None]

    def __init__(
        self, callbacks: Iterable[Callback], trainer: object = None, module: object = None, phase: Phase = unheard
    ) -> None:
        self.callbacks = list(callbacks)
        for hook in HOOKS:
            used_by = [callback for callback in self.callbacks if _overrides(callback, hook)]
            calls = [_with_phase(callback, hook, phase) for callback in used_by]
            methods = [partial(call, trainer, module) for call in calls]
            setattr(self, hook, _call_each(methods, hook in _ENDING))
        self.inside_steps = any(getattr(self, hook) is not nothing for hook in _INSIDE_STEPS)
        """True if a hook before the end of a micro-batch is overridden; the loop leaves them out otherwise."""
        self.take_outputs = self.on_train_batch_end is not nothing

    def wrap_calls(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Call each hook that a callback or the module overrides through the function that `wrap` returns for it."""
        for hook in HOOKS:
            call = getattr(self, hook)
            if call is not nothing:
                setattr(self, hook, wrap(call))

    @property
    def module_answer(self) -> Any:
        """The last return value of the module's `on_train_batch_start`, by which a module ends an epoch: -1."""
        return next((callback.answer for callback in self.callbacks if isinstance(callback, ModuleCallback)), None)


def _overrides(callback: Callback, hook: str) -> bool:
    method = getattr(callback, hook)
    return method is not None and getattr(method, "__func__", None) is not getattr(Callback, hook)


def call_all(methods: Sequence[Callable[..., None]], *args: Any) -> None:
    """Call every method, then raise the last error, if there was one, with the earlier ones as its context."""
    with ExitStack() as calls:
        for method in reversed(methods):
            calls.callback(method, *args)


def _with_phase(callback: Callback, hook: str, phase: Phase) -> Callable[..., None]:
    method = index_optional(getattr(callback, hook), parameters_of(getattr(Callback, hook)))
    name = f"{'module' if isinstance(callback, ModuleCallback) else type(callback).__name__}.{hook}"
    return during(phase, name, method)


def index_optional(method: Callable[..., Any], expected: list[str]) -> Callable[..., Any]:
    """Return a method that may be called without `dataloader_idx`, as for the only loader of an evaluation: it is 0."""
    least = len(expected) - 1
    if expected[-1:] != ["dataloader_idx=0"] or takes(method, least):
        return method
    return lambda *args: method(*args, *[0] * (least + 1 - len(args)))


_INSIDE_STEPS = (
    "on_before_zero_grad",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)

_ENDING = ("teardown", "on_exception")
"""Hooks that are called for every callback even if another one's fails: they close files, threads and processes."""


def _call_each(methods: Sequence[Callable[..., None]], continue_on_error: bool = False) -> Callable[..., None]:
    if not methods:
        return nothing
    if len(methods) == 1:
        return methods[0]
    if continue_on_error:
        return partial(call_all, methods)

    def call(*args: Any) -> None:
        for method in methods:
            method(*args)

    return call


def nothing(*args: Any) -> None:
    """Do nothing, as a hook that no callback overrides."""


class ModuleCallback(Callback):
    """The module's hooks as a callback, for the list of callbacks."""

    answer: Any = None
    """The last return value of `on_train_batch_start`."""

    def __init__(self, module: TrainModule) -> None:
        if not module.overrides_any(HOOKS):
            return
        for hook in HOOKS:
            if hook not in NOT_ON_MODULES and module.overrides(hook):
                expected = parameters_of(getattr(Callback, hook))[2:]
                call = _without_trainer_and_module(index_optional(getattr(module, hook), expected))
                setattr(self, hook, self._remembering(call) if hook == "on_train_batch_start" else call)

    def _remembering(self, call: Any) -> Any:
        def remember(*args: Any) -> None:
            self.answer = call(*args)

        return remember


NOT_ON_MODULES = ("on_sanity_check_start", "on_sanity_check_end", "on_exception", "on_checkpoint_saved")


def _without_trainer_and_module(method: Any) -> Any:
    def call(trainer: Trainer, module: TrainModule, *args: Any) -> Any:
        return method(*args)

    return call


def build_callback_list(
    callbacks: list[Callback], trainer: object, module: TrainModule, phase: Phase = unheard
) -> CallbackList:
    """Return the hooks in calling order: callbacks, the module, then callbacks with `runs_last`."""
    raise_problems([problem for callback in callbacks for problem in callback_problems(callback)], "the callbacks")
    first = [callback for callback in callbacks if not callback.runs_last]
    last = [callback for callback in callbacks if callback.runs_last]
    hooks = CallbackList([*first, ModuleCallback(module), *last], trainer, module, phase)
    # The loop calls these two hooks of a `Checkpoint` apart from the others'.
    others = [callback for callback in hooks.callbacks if not isinstance(callback, Checkpoint)]
    apart = CallbackList(others, trainer, module, phase)
    hooks.on_train_epoch_end, hooks.on_train_end = apart.on_train_epoch_end, apart.on_train_end
    return hooks


def print_text(callbacks: Iterable[Callback], text: str, file: TextIO | None = None, flush: bool = True) -> None:
    """Print through the first callback that draws on the terminal, else to `file`."""
    if any(callback.print_text(text, file) for callback in callbacks):
        return
    stream = sys.stdout if file is None else file
    if stream is not None:
        # Not `print`: Ray Train replaces it in its workers, by one that also logs, and all would be read twice.
        with suppress(OSError):  # a training goes on where its output cannot be written
            stream.write(text)
            if flush:
                stream.flush()


DEFAULT_CALLBACKS = {
    "enable_model_summary": "ModelSummary",
    "enable_progress_bar": "ProgressBar",
    "enable_checkpointing": "ModelCheckpoint",
}
"""The Trainer's arguments that add a callback -> classes of `trainer.callbacks`."""

PROFILERS = {
    "simple": "SimpleProfiler",
    "bound": "BoundProfiler",
    "advanced": "AdvancedProfiler",
    "torch": "TorchProfiler",
    "pytorch": "TorchProfiler",
}
"""Names for `Trainer(profiler=)` -> classes of `trainer.callbacks`."""


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
    if name not in known:
        raise unknown_name_error("callback", name, known)
    return known[name]


EVALUATION_ARGUMENTS = ["batch", "batch_idx", "dataloader_idx=0"]
"""The arguments of `validation_step`, `test_step` and `predict_step`; the last one where there are several loaders."""


def parameters_of(method: Callable[..., Any]) -> list[str]:
    """Return the parameters of a method after `self`, as source: `["batch", "batch_idx"]`, `["dataloader_idx=0"]`."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]


def check_signature(owner: object, name: str, expected: list[str]) -> str | None:
    """Return the problem of calling the method `name` of `owner` with the arguments `expected`, by position; or None.

    It may leave out `dataloader_idx`, which is given where there are several loaders.
    """
    method = getattr(owner, name)
    where = f"{type(owner).__name__}.{name}"
    if not callable(method):
        return (
            f"{where} is of type {type(method).__name__}, but the trainer calls a method of that name: "
            f"{name}({', '.join(['self', *expected])}). Give yours another name."
        )
    least = [one for one in expected if one != "dataloader_idx=0"]
    if takes(method, len(expected)) or takes(method, len(least)):
        return None
    return (
        f"{where} takes {inspect.signature(method)}, but it is called with ({', '.join(expected)}): "
        f"define {name}({', '.join(['self', *expected])})."
    )


def takes(method: Callable[..., Any], number: int) -> bool:
    """Whether a method can be called with so many positional arguments; True if its signature is not known."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True  # written in C, or the like
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True
