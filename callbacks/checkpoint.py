"""ModelCheckpoint: write checkpoints when they are due, name them, and delete those that are no longer kept."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.callback import Checkpoint
from trainer.checkpoint.async_writer import BackgroundWriter
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.format import is_committed
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.storage import StoragePath, as_storage_path, storage_of
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError, ConfigError, did_you_mean, raise_problems
from trainer.metrics.monitor import resolve_mode, tell_mode
from trainer.settings import read_duration

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class ModelCheckpoint(Checkpoint):
    """Write checkpoints while training, and a last one when training ends or is stopped.

    The newest checkpoint is always kept (`save_last`) and called "last"; with `monitor` the `save_top_k` best ones are
    kept too, and the best of them is called "best": `fit(..., ckpt_path="last")`, `test(..., ckpt_path="best")`.

    A value belongs to the step it was measured at. A checkpoint that is due at a step whose validation is due too, or
    whose epoch ends, waits for it; a checkpoint of a step without a value of its own is kept as the newest only. Of
    equal values the older one is better.

    Args:
        dirpath: folder of the checkpoints, or a URL that fsspec understands (s3://bucket/run). Default: `checkpoints`
            in the run directory.
        filename: name of a checkpoint; `{epoch}`, `{step}` and logged names are filled in, as in
            "{epoch}-{val_loss:.2f}" -> "epoch=3-val_loss=0.17"; nan stands for a value not known yet. Default:
            "{epoch}-{step}". Further ones of the same name get a number. One that takes the place of another of its
            name replaces it in one step: with `filename="model"` there is always a checkpoint `model`.
        monitor: logged name that decides which checkpoints are the best, or "epoch" or "step". Default: the newest are.
        mode: "min" or "max": which value of `monitor` is better. Default: "min"; a name that says that larger is better
            (acc, f1, ...) needs "max".
        save_top_k: how many of the best (without monitor: of the newest) to keep; -1: all; 0: none.
        save_last: keep the newest one, whatever its value.
        every_n_train_steps: write after every so many steps; 0: not by steps.
        every_n_epochs: write at the end of every so many epochs, and after validations inside an epoch; 0: not by
            epochs. Default: 1 if nothing else is set, not even to 0.
        train_time_interval: write after so much time, given as `max_time` is; checked every `log_every_n_steps` steps
            on several processes.
        async_save: training waits only until the state is copied in memory (which takes as much memory as the state);
            a thread writes it, one checkpoint at a time. The end of training, a stop and an error wait for it.
        on_write_error: "raise": a checkpoint that cannot be written (disk full) ends the run; "warn": training goes on,
            the previous checkpoint stays, and the log says so.
        save_on_exception: write one when an error ends the run; with a single process only, since others could be
            anywhere. A resume from it is not exact when the error came from inside a step, which has already drawn
            random numbers.
        auto_insert_metric_name: "{step}" becomes "step=12", not "12".
        verbose: print the path of each checkpoint written.

    Raises:
        ConfigError: the arguments contradict each other.
    """

    agree_on = (
        "monitor",
        "mode",
        "save_top_k",
        "save_last",
        "every_n_train_steps",
        "every_n_epochs",
        "seconds",
        "async_save",
        "on_write_error",
        "names_in_filename",
    )

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        save_top_k: int = 1,
        save_last: bool = True,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: str | timedelta | dict[str, float] | float | None = None,
        async_save: bool = False,
        on_write_error: Literal["raise", "warn"] = "raise",
        save_on_exception: bool = False,
        auto_insert_metric_name: bool = True,
        verbose: bool = False,
    ) -> None:
        _check_arguments(monitor, mode, save_top_k, every_n_train_steps, every_n_epochs, train_time_interval)
        problems = [*_template_problems(filename), *_wrong_flags(save_last, async_save, on_write_error, dirpath)]
        raise_problems(problems, "ModelCheckpoint's arguments")
        self.dirpath = None if dirpath is None else str(as_storage_path(dirpath))
        self.filename = filename or "{epoch}-{step}"
        self.names_in_filename = [name for name, _ in _FIELD.findall(self.filename) if name not in ("epoch", "step")]
        self.monitor = monitor
        self.mode = resolve_mode(mode, monitor or "", "ModelCheckpoint")
        self._unclear_mode = mode is None
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.every_n_train_steps = every_n_train_steps or None
        nothing_is_set = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self.every_n_epochs = 1 if nothing_is_set else every_n_epochs or None
        self.seconds = None if train_time_interval is None else read_duration(train_time_interval)
        self.async_save = async_save
        self.on_write_error = on_write_error
        self.save_on_exception = save_on_exception
        self.auto_insert_metric_name = auto_insert_metric_name
        self.verbose = verbose
        self._retention = Retention(monitor is not None, self.mode, save_top_k, save_last)
        self._folder: StoragePath | None = None
        self._writer: BackgroundWriter | None = None
        self._writes = 0
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.kept: dict[str, float | None] = {}
        """Checkpoints on disk, oldest first, each with its monitored value."""
        self.best: str | None = None
        self.last: str | None = None
        self.saved_step = -1
        self._last_time = time.monotonic()
        self._time_is_up = False
        """A checkpoint is due by `train_time_interval`, until one is written."""
        self._previous: tuple[dict[str, float | None], str | None, int] = ({}, None, -1)
        """`kept`, `last` and `saved_step` before the newest write, restored if that fails."""
        self._error: CheckpointError | None = None
        """An error of the writer that the other processes do not know of yet."""

    # -- for users -----------------------------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, by `monitor`; without it the newest. Empty before the first."""
        name = self.best if self.monitor is not None else self.last
        return str(self._in_folder(name)) if name is not None else ""

    @property
    def best_model_score(self) -> float | None:
        """The monitored value of the best checkpoint."""
        return self.kept.get(self.best) if self.best is not None else None

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint. Empty before the first."""
        return str(self._in_folder(self.last)) if self.last is not None else ""

    # -- when one is due -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        self._start_afresh()
        if self.monitor is not None and self._unclear_mode and trainer.is_global_zero:
            tell_mode(self.monitor, "ModelCheckpoint")
        self._folder = as_storage_path(self.dirpath) if self.dirpath is not None else trainer.run_dir / "checkpoints"
        try:
            is_file = self._folder.is_file()
        except OSError as error:
            raise ConfigError(f"ModelCheckpoint(dirpath={str(self.dirpath)!r}) cannot be reached: {error}") from error
        if is_file:
            raise ConfigError(f"ModelCheckpoint(dirpath={str(self.dirpath)!r}) is a file: give a folder.")
        if trainer.is_global_zero:
            CheckpointDirectory(self._folder).clean()
        if self.async_save and (trainer.is_global_zero or trainer.strategy.shards_state):
            self._writer = BackgroundWriter()

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.async_save:
            self._poll_async_save(trainer)
        due = self._is_up_now(trainer) if self.seconds is not None else self._step_is_due(trainer.global_step)
        if due and not self._waits(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.stage != "fit" or trainer.sanity_checking:
            return
        self._check_names(trainer)
        ends_epoch = trainer.progress.batch == trainer.num_training_batches
        due = self._step_is_due(trainer.global_step)
        due = due or (self._epoch_is_due(trainer.current_epoch) and trainer.validation_due())
        if due and not ends_epoch:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._check_names(trainer)
        if self._step_is_due(trainer.global_step) or self._epoch_is_due(trainer.current_epoch):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish_write(trainer)
        if self.saved_step != trainer.global_step and trainer.global_step > 0 and (self.save_last or self.save_top_k):
            self._save(trainer)
            self._finish_write(trainer)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if trainer.stage != "fit":
            return
        # No collectives: the other processes may be anywhere.
        if self._writer is not None:
            self._writer.wait()
            self._poll_writer(trainer)
            if self._error not in (None, exception):
                log.error("%s", self._error)
            self._error = None
        if not self.save_on_exception or trainer.global_step == self.saved_step:
            return
        if trainer.world_size > 1:
            log.warning("no checkpoint is written on an exception with several processes: the others may be anywhere")
        else:
            self._save(trainer)
            self._finish_write(trainer)

    def _epoch_is_due(self, epoch: int) -> bool:
        return self.every_n_epochs is not None and (epoch + 1) % self.every_n_epochs == 0

    def _step_is_due(self, step: int) -> bool:
        if self.every_n_train_steps is not None:
            return step % self.every_n_train_steps == 0
        return self._time_is_up

    def _waits(self, trainer: Trainer) -> bool:
        """Whether values of this step are still to come, of a validation or of the epoch that ends here."""
        if self.monitor is None and not self.names_in_filename:
            return False
        return trainer.validation_due() or trainer.progress.batch == trainer.num_training_batches

    def _is_up_now(self, trainer: Trainer) -> bool:
        """Whether the time has run out by rank 0's clock; every `log_every_n_steps` steps, as it is a collective."""
        assert self.seconds is not None
        if trainer.world_size > 1 and trainer.global_step % (trainer.settings.log_every_n_steps or 50):
            return False
        up = trainer.strategy.processes.broadcast_object(time.monotonic() - self._last_time >= self.seconds)
        if up:
            self._time_is_up, self._last_time = True, time.monotonic()
        return up

    def _check_names(self, trainer: Trainer) -> None:
        """Raise ConfigError for a name that a validation or an epoch has ended without."""
        names = [name for name in (self.monitor, *self.names_in_filename) if name not in (None, "epoch", "step")]
        missing = [name for name in names if name not in trainer.run.session.measured]
        if not missing:
            return
        known = trainer.read_metrics()
        for name in missing:
            if name not in known and not trainer.run.is_to_come(name):
                what = (
                    f" monitors {name!r}, which" if name == self.monitor else f"(filename={self.filename!r}): {name!r}"
                )
                raise ConfigError(
                    f"ModelCheckpoint{what} was not logged.{did_you_mean(name, known)} "
                    f"Logged so far: {', '.join(sorted(known)) or 'nothing'}."
                )

    # -- saving, in running order --------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer) -> None:
        """Write a checkpoint, then delete those no longer kept; nothing if that of this step has its value already."""
        metrics = trainer.read_metrics()
        value = self._value(trainer)
        again = self.saved_step == trainer.global_step
        if again and (value is None or self.kept.get(self.last or "") is not None):
            return
        self._finish_write(trainer, due=True)
        replaced = [self.last] if again and self.last is not None else []
        others = {name: one for name, one in self.kept.items() if name not in replaced}
        to_delete = self._retention.to_delete({**others, "": value})  # "": the new one
        if "" in to_delete:
            self._time_is_up = self._time_is_up and value is None  # else the next value decides
            return
        to_delete += replaced
        name = self._format_name({**metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}, value)
        name = trainer.strategy.processes.broadcast_object(
            self._free_name(name, to_delete) if trainer.is_global_zero else ""
        )
        self._previous = self.kept, self.last, self.saved_step
        # The state in the checkpoint still lists those to delete: a process that dies before the deletion finds them.
        former = {other: one for other, one in self.kept.items() if other != name}
        self.kept, self.last, self.saved_step = {**former, name: value}, name, trainer.global_step
        remaining = {other: one for other, one in self.kept.items() if other == name or other not in to_delete}
        self.best = self._retention.best(remaining)
        try:
            # "follows" leads to a checkpoint whose process was killed before it could update the pointer.
            info = {"metrics": metrics, "follows": self._previous[1]}
            trainer.save_with(partial(self._write, trainer, name, to_delete), info)
        except WriteError as error:
            if trainer.is_global_zero:
                self._warn(error)
            self._rollback(error)
            return
        except BaseException:
            self.kept, self.last, self.saved_step = self._previous
            raise
        self.kept, self._time_is_up = remaining, False
        if trainer.is_global_zero and self._writer is None:
            self._notify_saved(trainer, str(self._in_folder(name)))

    def _value(self, trainer: Trainer) -> float | None:
        """Return the monitored value of this step; None if it was not measured at this step."""
        if self.monitor in ("epoch", "step"):
            return float(trainer.current_epoch if self.monitor == "epoch" else trainer.global_step)
        measured = trainer.run.session.measured.get(self.monitor or "")
        if measured is None or measured.step != trainer.global_step:
            return None
        if measured.kind == "interim" and self.every_n_epochs is not None:
            return None  # a batch's value is no match for the means of epochs
        return measured.value

    def _format_name(self, metrics: Mapping[str, float], value: float | None) -> str:
        values = {**dict.fromkeys(self.names_in_filename, math.nan), **metrics}
        if self.monitor in self.names_in_filename:
            values[self.monitor] = math.nan if value is None else value
        return _fill_in(self.filename, values, self.auto_insert_metric_name)

    def _free_name(self, name: str, to_delete: list[str]) -> str:
        """Return the name, with a version if it is taken: only a checkpoint that goes now is overwritten."""
        candidate, version = name, 1
        while storage_of(path := self._in_folder(candidate)).path_in_use(path):
            if candidate in to_delete and isinstance(path, Path):
                break
            candidate, version = f"{name}-v{version}", version + 1
        return candidate

    def _write(
        self, trainer: Trainer, name: str, to_delete: list[str], state: dict[str, Any], info: Mapping[str, Any]
    ) -> None:
        """Write the checkpoint, here or in the background, then `_commit_pointers`."""
        path, group, overwrite = self._in_folder(name), trainer.checkpoint_group, name in to_delete
        directory = CheckpointDirectory(path.parent) if trainer.is_global_zero else None
        obsolete = [one for one in to_delete if one != name]
        on_committed = partial(_commit_pointers, directory, name, self.best, self.monitor is not None, obsolete)
        if self._writer is not None:
            self._writes += 1
            thread_group = trainer.background_checkpoint_group(f"writing/{path}/{self._writes}")
            self._writer.start(path, state, info, on_committed, group, thread_group, overwrite)
        else:
            write_checkpoint(path, state, info=info, overwrite=overwrite, process_group=group)
            on_committed()

    def _notify_saved(self, trainer: Trainer, path: str) -> None:
        if self.verbose:
            trainer.print(f"step {trainer.global_step}: saved {path}")
        trainer.hooks.on_checkpoint_saved(path)

    def _in_folder(self, name: str) -> StoragePath:
        assert self._folder is not None
        return self._folder / name

    # -- a write in the background -------------------------------------------------------------------------------------

    def _poll_async_save(self, trainer: Trainer) -> None:
        """Report on rank 0 what was committed since the last step, or raise the error; never waits."""
        self._poll_writer(trainer)
        if self._error is not None:
            self._rollback(self._error)

    def _finish_write(self, trainer: Trainer, due: bool = False) -> None:
        """Wait for the write in flight, and give its error to all processes. Collective."""
        if not self.async_save:
            return
        if self._writer is not None:
            self._writer.wait(due)
            self._poll_writer(trainer)
        error, self._error = trainer.strategy.processes.broadcast_object(self._error), None
        if error is not None:
            self._rollback(error)

    def _poll_writer(self, trainer: Trainer) -> None:
        if self._writer is None:
            return
        path, error = self._writer.result()
        if not trainer.is_global_zero:
            return  # All have the same result; rank 0 broadcasts it.
        if path is not None:
            self._notify_saved(trainer, path)
        if error is not None:
            self._error = error
            self._warn(error)

    def _warn(self, error: CheckpointError) -> None:
        if self.on_write_error == "warn":
            there = f"The last checkpoint is still {self._previous[1]}." if self._previous[1] else "There is none yet."
            log.error("NO CHECKPOINT WAS WRITTEN, and training goes on (on_write_error='warn'): %s %s", error, there)

    def _rollback(self, error: CheckpointError) -> None:
        """Forget the newest checkpoint, which could not be written."""
        self.kept, self.last, self.saved_step = self._previous
        self.best = self._retention.best(self.kept)
        if self.on_write_error == "raise":
            raise error

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self.kept), "best": self.best, "last": self.last, "saved_step": self.saved_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the list of checkpoints, without those that no longer exist."""
        self.saved_step = state["saved_step"]
        self.kept = {name: value for name, value in state["kept"].items() if is_committed(self._in_folder(name))}
        self.last = state["last"] if state["last"] in self.kept else None
        self.best = self._retention.best(self.kept)


def _commit_pointers(
    directory: CheckpointDirectory | None, name: str, best: str | None, has_best: bool, to_delete: list[str]
) -> None:
    """Point "last" and "best" at the committed checkpoint, and only then delete others; rank 0 has the `directory`."""
    if directory is None:
        return
    directory.set_pointer("last", name)
    if best is not None or (has_best and directory.pointer("best") is not None):  # an earlier run's
        directory.set_pointer("best", best)
    for old in to_delete:
        if is_committed(directory.folder / old):
            directory.remove(old)


def _check_arguments(
    monitor: str | None, mode: str | None, save_top_k: int, steps: int | None, epochs: int | None, interval: Any
) -> None:
    problems = []
    if sum(trigger not in (None, 0) for trigger in (steps, epochs, interval)) > 1:
        problems.append(
            "give one of every_n_train_steps, every_n_epochs, train_time_interval; for several give several callbacks."
        )
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and (type(value) is not int or value < 0):
            problems.append(f"{name}={value!r}: give a whole number from 1, or 0 to turn it off.")
    if type(save_top_k) is not int or save_top_k < -1:
        problems.append(f"save_top_k={save_top_k!r}: give a number, 0 for none, or -1 for all.")
    if mode not in (None, "min", "max"):
        problems.append(f"mode={mode!r}: allowed are 'min' and 'max'.{did_you_mean(str(mode), ['min', 'max'])}")
    if monitor is None and save_top_k > 1 and mode is not None:
        problems.append("mode without monitor has no meaning: give monitor='val_loss' or the like.")
    if interval is not None:
        try:
            if read_duration(interval, "train_time_interval") == 0:
                problems.append(f"train_time_interval={interval!r}: give a time above 0.")
        except ConfigError as error:
            problems.append(str(error))
    if monitor is not None and not isinstance(monitor, str):
        problems.append(f"monitor={monitor!r}: give the name of a logged value, such as 'val_loss'.")
    raise_problems(problems, "ModelCheckpoint's arguments")


def _wrong_flags(save_last: Any, async_save: Any, on_write_error: Any, dirpath: Any) -> list[str]:
    problems = []
    for name, value in (("save_last", save_last), ("async_save", async_save)):
        if not isinstance(value, bool):
            problems.append(f"{name}={value!r}: give True or False.")
    if on_write_error not in ("raise", "warn"):
        guess = did_you_mean(str(on_write_error), ["raise", "warn"])
        problems.append(f"on_write_error={on_write_error!r}: allowed are 'raise' and 'warn'.{guess}")
    if not isinstance(dirpath, (str, Path, type(None))):
        problems.append(f"dirpath={dirpath!r}: give a folder, or a URL.")
    elif dirpath is not None:
        try:
            as_storage_path(dirpath)
        except ConfigError as error:
            problems.append(f"dirpath: {error}")
    return problems


_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
"""A placeholder and its format."""


def _fill_in(template: str, values: Mapping[str, float], with_names: bool) -> str:
    """Format a checkpoint's name: "{epoch}-{val_loss:.2f}" -> "epoch=3-val_loss=0.17", or "3-0.17" without names."""

    def fill(match: re.Match[str]) -> str:
        name, text = match[1], format(values[match[1]], match[2] or "")
        return f"{name}={text}" if with_names else text

    return _FIELD.sub(fill, template).replace("/", "_")


def _template_problems(template: Any) -> list[str]:
    """Return the mistakes in a template, to be reported before the first checkpoint is written."""
    if template is None:
        return []
    if not isinstance(template, str):
        return [f"filename={template!r}: give a text such as '{{epoch}}-{{val_loss:.2f}}'."]
    rest = _FIELD.sub("", template)
    if "{" in rest or "}" in rest:
        return [f"filename={template!r}: a brace has no partner. Write '{{epoch}}-{{val_loss:.2f}}' or the like."]
    problems = []
    for name, form in _FIELD.findall(template):
        try:
            format(0 if name in ("epoch", "step") else 0.0, form)
        except ValueError as error:
            problems.append(f"filename={template!r}: {name!r} cannot be written as {form!r} ({error}). Use '.2f'.")
    return problems
