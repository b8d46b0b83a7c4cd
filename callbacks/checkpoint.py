"""ModelCheckpoint: write checkpoints when they are due, name them, and delete those that are no longer kept."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from trainer.arguments import Limit, local_path
from trainer.callback import Checkpoint
from trainer.checkpoint.async_writer import BackgroundWriter, being_written
from trainer.checkpoint.base_weights import frozen_names, weight_sums
from trainer.checkpoint.directory import POINTERS, CheckpointDirectory
from trainer.checkpoint.disk import ReadError, UncertainWriteError, WriteError, reason
from trainer.checkpoint.hook_checkpoint import entries_of
from trainer.checkpoint.left_out import LEFT_OUT, LeftOutError
from trainer.checkpoint.manifest import is_committed, read_manifest
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.checkpoint.storage import (
    StoragePath,
    as_storage_path,
    kept_storage_path,
    real_path,
    require_writable,
    storage_of,
)
from trainer.checkpoint.template import format_name, logged_names, template_problems
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError, ConfigError, did_you_mean, first_of, raise_problems
from trainer.guards.host_times import SAVING
from trainer.loop.progress import Progress
from trainer.loop.training_state import name_of_run_dir
from trainer.metrics.monitor import log_assumed_mode, resolve_mode
from trainer.runs.monitors import refuse_missing_monitors
from trainer.settings import read_duration

if TYPE_CHECKING:
    from trainer.loop.run import Run
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


Interval = Annotated[int, Limit("from", 0), "0: never"]

STATE = {
    "kept": {str: (NUMBER, None)},
    "best": (str, None),
    "last": (str, None),
    "saved_step": Integer(-1),
    "nonfinite?": [str],
    "monitor?": [(str, None)],
    "owner?": str,
}


class PointerError(WriteError):
    """A checkpoint was written, but "last" or "best" could not be pointed at it."""


class ModelCheckpoint(Checkpoint):
    """Write checkpoints while training, and a last one when training ends or is stopped.

    The newest checkpoint is always kept (`save_last`) and called "last"; with `monitor` the `save_top_k` best ones are
    kept too, and the best of them is called "best": `fit(..., ckpt_path="last")`, `test(..., ckpt_path="best")`.

    A value belongs to the step it was measured at. A checkpoint that is due at a step whose validation is due too, or
    whose epoch ends, waits for it; a checkpoint of a step without a value of its own is kept as the newest only. Of
    equal values the older one is better. If a process ends between the writes of two ModelCheckpoints that are due at
    one step, the run that is resumed from the first one's writes the second one's when it begins.

    A checkpoint whose weights or optimizer states are not finite (but for what was not finite when training began) is
    written with a warning, never becomes "last" or "best", and never takes the place of a finite one; of such
    checkpoints only one is kept, the newest.

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
        save_last: keep the newest one, whatever its value; None: the same as True, and so is "link": "last" is a
            pointer in either case.
        every_n_train_steps: write after every so many steps; 0: not by steps.
        every_n_epochs: write at the end of every so many epochs, and after validations inside an epoch; 0: not by
            epochs. Default: 1 if nothing else is set, not even to 0.
        train_time_interval: write after so much time, given as `max_time` is; checked every `log_every_n_steps` steps
            on several processes.
        async_save: training waits only until the state is copied in memory (which takes as much memory as the state);
            a thread writes it, one checkpoint at a time. The end of training, a stop and an error wait for it.
        on_write_error: "raise": a checkpoint that cannot be written (disk full, network down) ends the run; "warn":
            training goes on, the previous checkpoint stays, and the log says so. If the last weights cannot be saved
            either, the end of training raises WriteError, so that the process does not exit with 0.
        save_on_exception: write one when an error ends the run; with a single process only, since others could be
            anywhere. A resume from it is not exact when the error came from inside a step, or from between its batches:
            the step has drawn random numbers, and BatchNorm has counted its batches, which come again.
        save_weights_only: leave out the state of optimizers and schedulers: training cannot go on from it.
        save_on_train_epoch_end: with `every_n_epochs`: True: only where epochs end, not after validations inside them;
            False: only after validations. Default: both.
        auto_insert_metric_name: "{step}" becomes "step=12", not "12".
        verbose: print the path of each checkpoint written.
        trainable_only: hold only the weights that train, such as LoRA's adapters, those that have changed since
            training began, such as a teacher that follows the model, and buffers. Loading needs the same base model
            in the module, which is checked.

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
        "trainable_only",
        "save_on_train_epoch_end",
        "save_weights_only",
    )

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = True,
        save_top_k: Annotated[int, Limit("from", -1), "0: none, -1: all"] = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Literal["min", "max"] | None = None,
        auto_insert_metric_name: bool = True,
        every_n_train_steps: Interval | None = None,
        train_time_interval: str | timedelta | dict[str, float] | float | None = None,
        every_n_epochs: Interval | None = None,
        save_on_train_epoch_end: bool | None = None,
        *,
        async_save: bool = False,
        on_write_error: Literal["raise", "warn"] = "raise",
        trainable_only: bool = False,
    ) -> None:
        problems = [
            *_contradictions(monitor, mode, save_top_k, every_n_train_steps, every_n_epochs, train_time_interval),
            *template_problems(filename),
            *_folder_problems(dirpath),
        ]
        raise_problems(problems, "ModelCheckpoint's arguments")
        self.dirpath = None if dirpath is None else str(kept_storage_path(dirpath))
        self.filename = filename or "{epoch}-{step}"
        self.names_in_filename = logged_names(self.filename)
        self.monitor = monitor
        self.mode = resolve_mode(mode, monitor or "", "ModelCheckpoint")
        self._unclear_mode = mode is None
        self.save_top_k = save_top_k
        self.save_last = save_last is not False
        self.every_n_train_steps = every_n_train_steps or None
        nothing_is_set = every_n_train_steps is None and every_n_epochs is None and train_time_interval is None
        self.every_n_epochs = 1 if nothing_is_set else every_n_epochs or None
        self.seconds = None if train_time_interval is None else read_duration(train_time_interval)
        self.async_save = async_save
        self.on_write_error = on_write_error
        self.save_on_exception = save_on_exception
        self.auto_insert_metric_name = auto_insert_metric_name
        self.verbose = verbose
        self.trainable_only = trainable_only
        self.save_weights_only = save_weights_only
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self._retention = Retention(monitor is not None, self.mode, save_top_k, self.save_last)
        self._folder = None
        self._writer: BackgroundWriter | None = None
        self._writes = 0
        self._sent: list[str] = []  # keys of the exchanges of background writes
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.kept: dict[str, float | None] = {}
        """Checkpoints on disk, oldest first, each with its monitored value."""
        self.best: str | None = None
        self.last: str | None = None
        """The newest checkpoint whose state is finite."""
        self.nonfinite: list[str] = []
        """The checkpoints in `kept` whose states are not finite."""
        self._owner = os.urandom(8).hex()
        """A name in the manifests of the checkpoints that this callback has written, and may delete."""
        self._continues = False
        """True if this callback was in the run that wrote the checkpoint."""
        self._restored_best: tuple[str | None, float | None] = (None, None)
        """Name and value of the best checkpoint in the restored state."""
        self._restored_step = math.inf
        """The step of the checkpoint from which the run goes on."""
        self._earlier_best: StoragePath | None = None
        """The best checkpoint of the earlier run, if this run was resumed from it into another folder."""
        self._earlier_last: StoragePath | None = None
        self._base: dict[str, int] | None = None
        """Sums, by name, of the weights that checkpoints leave out with `trainable_only`."""
        self._unchanged: dict[str, int] = {}
        """Exact sums, by name, of the weights that were frozen when training began, with `trainable_only`."""
        self._goes_on = False
        """True if the run goes on in the run directory of its checkpoint."""
        self.saved_step = -1
        self._saved_place: tuple[int, int] | None = None
        """The place in that step at which the newest one was written, if there is one."""
        self._last_time = time.monotonic()
        self._time_is_up = False
        """A checkpoint is due by `train_time_interval`, until one is written."""
        self._step_of_due = -1
        """The last step for which one was written inside an epoch: the epoch may have ended there, of data without a
        length."""
        self._previous: tuple[dict[str, float | None], str | None, list[str], int] = ({}, None, [], -1)
        """`kept`, `last`, `nonfinite` and `saved_step` before the newest write, restored if that fails."""
        self._write_seconds: float | None = None
        """The duration of the newest committed write, see `write_seconds`."""
        self._obsolete: list[str] = []
        """The checkpoints to delete when the newest one is committed."""
        self._error: CheckpointError | None = None
        """An error of the writer that the other processes do not know of yet."""
        self._unsaved: CheckpointError | None = None
        """The error of the newest write, if it left no checkpoint of that step."""
        self._attempted_step = -1
        """The step of the newest write, also of one that failed."""
        self._uncertain_step: int | None = None
        """The step of the newest checkpoint of which the storage did not say whether it was written."""
        self._undeleted: list[str] = []
        """Obsolete checkpoints that could not be deleted, and those whose writes failed; on rank 0."""
        self._pointed: str | None = None
        """The checkpoint that "last" still points to, because the pointer cannot be replaced; on rank 0, else None."""

    # -- for users -----------------------------------------------------------------------------------------------------

    def output_location(self) -> tuple[str, Path] | None:
        """Return the monitored value and the path of the best checkpoint; None without `monitor` or such a value."""
        score, path = self.best_model_score, self.best_model_path
        if self.monitor is None or score is None or "://" in path:
            return None
        return f"best {self.monitor} {float(score):.6g}:", Path(path)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, by `monitor`; without it the newest. Empty before the first, and with `save_top_k=0`.

        In a run resumed into another folder that of the former run, until this one has its own.
        """
        if self.monitor is None:
            return self.last_model_path if self.save_top_k else ""
        return str(self._earlier_best or "") if self.best is None else str(self._in_folder(self.best))

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The monitored value of the best checkpoint, a 0-dim tensor."""
        if self.best is None:
            return _as_tensor(self._restored_best[1] if self._earlier_best is not None else None)
        return _as_tensor(self.kept.get(self.best))

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """The paths of the best checkpoints on disk, `save_top_k` at most, with their monitored values; best first."""
        best = self._retention.best(self.kept, self.nonfinite)
        return {str(self._in_folder(name)): torch.tensor(self.kept[name]) for name in best}

    @property
    def kth_best_model_path(self) -> str:
        """The worst of `best_k_models`; empty while there are fewer than `save_top_k`."""
        models = self.best_k_models
        return next(reversed(models), "") if self.save_top_k in (-1, len(models)) else ""

    @property
    def kth_value(self) -> torch.Tensor:
        """The monitored value of the worst of `best_k_models`; infinite while there are fewer than `save_top_k`."""
        none = torch.tensor(-math.inf if self.mode == "max" else math.inf)
        return self.best_k_models.get(self.kth_best_model_path, none)

    @property
    def current_score(self) -> torch.Tensor | None:
        """The monitored value of the newest of `best_k_models`, which is the last one that was better than others."""
        best = self._retention.best(self.kept, self.nonfinite)
        return next((_as_tensor(self.kept[name]) for name in reversed(self.kept) if name in best), None)

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the paths and values of `best_k_models` to a YAML file, by default `best_k_models.yaml`."""
        import yaml

        path = local_path(str(self._in_folder("best_k_models.yaml")) if filepath is None else filepath, "filepath")
        path.write_text(yaml.safe_dump({path: float(value) for path, value in self.best_k_models.items()}))

    @property
    def last_model_path(self) -> str:
        """The newest finite checkpoint, as `best_model_path`. Empty before the first."""
        return str(self._earlier_last or "") if self.last is None else str(self._in_folder(self.last))

    def newest_on_disk(self) -> str:
        if self._writer is not None:
            self._writer.wait()
        paths = [self._in_folder(name) for name in (self.last, self._previous[1]) if name]
        return next((str(path) for path in paths if is_committed(path)), str(self._earlier_last or ""))

    @property
    def write_seconds(self) -> float | None:
        return self._write_seconds

    @property
    def unsaved(self) -> WriteError | None:
        if self._unsaved is None:
            return None
        kind = UncertainWriteError if isinstance(self._unsaved, UncertainWriteError) else WriteError
        return kind(f"{_sentence(self._unsaved)} {self._last_checkpoint()}")

    # -- when one is due -----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        self._start_afresh()
        if self.monitor is not None and self._unclear_mode and trainer.is_global_zero:
            log_assumed_mode(self.monitor, "ModelCheckpoint")
        self._folder = as_storage_path(self.dirpath) if self.dirpath is not None else trainer.run_dir / "checkpoints"
        try:
            is_file = self._folder.is_file()
        except OSError as error:
            raise ConfigError(f"ModelCheckpoint(dirpath={str(self.dirpath)!r}) cannot be reached: {error}") from error
        if is_file:
            raise ConfigError(f"ModelCheckpoint(dirpath={str(self.dirpath)!r}) is a file: give a folder.")
        if trainer.is_global_zero:
            require_writable(self._folder, f"ModelCheckpoint(dirpath={str(self.dirpath)!r})")
            try:
                CheckpointDirectory(self._folder).clean()
            except CheckpointError as error:
                log.warning("cannot delete the remains of interrupted writes in %s: %s", self._folder, error)
        if self.async_save and (trainer.is_global_zero or trainer.strategy.shards_state):
            self._writer = BackgroundWriter()

    @property
    def state_key(self) -> str:
        """The monitored value, the triggers and the file name: another ModelCheckpoint's list is not for this one."""
        what = [] if self.monitor is None else [self.monitor, self.mode]
        what += [f"every_n_train_steps={self.every_n_train_steps}"] if self.every_n_train_steps else []
        what += [f"every_n_epochs={self.every_n_epochs}"] if self.every_n_epochs else []
        what += [f"train_time_interval={self.seconds:g}"] if self.seconds else []
        return f"{type(self).__qualname__}({', '.join([*what, self.filename])})"

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        entries = entries_of(checkpoint)
        self._base, self._restored_step = entries.get("base"), entries["progress"]["step"]
        self._goes_on = entries["run_dir"] == name_of_run_dir(trainer.run_dir, trainer.settings)

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.trainable_only:
            state = trainer.strategy.module_state()
            # Of a checkpoint's weights those that it held have changed before.
            names = [name for name in frozen_names(pl_module, state) if self._base is None or name in self._base]
            self._unchanged = weight_sums(state, names, trainer.strategy.processes.all_gather_object, rounded=False)
        origin, (name, _) = trainer.run.resumed_from, self._restored_best
        # Another ModelCheckpoint's folder has checkpoints of the same names.
        own = trainer.run_dir / "checkpoints"
        places = [own if one.dirpath is None else as_storage_path(one.dirpath) for one in trainer.checkpoint_callbacks]
        if origin is None:
            return
        if self.saved_step == trainer.global_step:
            self._saved_place = _place(trainer.progress)
        if real_path(origin.parent) in map(real_path, places):
            if self._is_owed(trainer):
                self._save(trainer)
            elif self._continues:
                # Written after that one by a process that has ended: weights alone, as a rule. A copy has another name.
                known, step = len(self.kept), trainer.global_step
                self._take_unlisted(lambda name, info: (info.get("name"), info.get("step")) == (name, step))
                self.saved_step = step if len(self.kept) > known else self.saved_step
            return
        self._earlier_last = origin
        if name is not None and is_committed(origin.parent / name):
            self._earlier_best = origin.parent / name

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.async_save:
            self._poll_writer(trainer)
            if self._error is not None:
                self._rollback(self._error)
        if self.every_n_train_steps is None and self.seconds is None:
            return
        due = self._is_up_now(trainer) if self.seconds is not None else self._step_is_due(trainer.global_step)
        if due and not self._waits(trainer):
            self._step_of_due = trainer.global_step
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.stage != "fit" or trainer.sanity_checking:
            return
        refuse_missing_monitors(trainer.run)
        if self._is_due_after_validation(trainer, trainer.validation_due()):
            self._step_of_due = trainer.global_step
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        refuse_missing_monitors(trainer.run)
        validated = trainer.progress.validated_step == trainer.global_step
        due = self._epoch_is_due(trainer.current_epoch) and (self.save_on_train_epoch_end is not False or validated)
        if due or self._step_is_due(trainer.global_step) or self._step_of_due == trainer.global_step:
            self._save(trainer, renew=self.monitor is not None or bool(self.names_in_filename))

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._finish_write(trainer)
        # That of this step may be from before the validation by which a callback stopped the run.
        before = trainer.stop_reason is not None and self._saved_place not in (None, _place(trainer.progress))
        there = self.saved_step == trainer.global_step and not self.kept  # in the folder of a former run
        if trainer.global_step > 0 and (self.save_last or self.save_top_k) and not there:
            self._unsaved = None
            self._save(trainer, renew=before)
            self._finish_write(trainer)
        if self.saved_step == trainer.global_step:
            self._unsaved = None

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
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

    def _is_owed(self, trainer: Trainer) -> bool:
        """Whether a checkpoint was due after the hook in which another callback wrote the one that was resumed from.

        The process may have ended between the two writes. The hooks of that step are not called again.
        """
        progress, validated = trainer.progress, trainer.progress.validated_step == trainer.global_step
        if self.saved_step == progress.step or progress.step == 0 or not self._continues:
            return False
        if progress.batch == 0:
            by_epoch = self._epoch_is_due(progress.epoch - 1)
            return self._step_is_due(progress.step) or (
                by_epoch and (self.save_on_train_epoch_end is not False or validated)
            )
        if validated:
            return self._is_due_after_validation(trainer, inside=True)
        return self._step_is_due(progress.step) and not self._waits(trainer)

    def _is_due_after_validation(self, trainer: Trainer, inside: bool) -> bool:
        """Whether a checkpoint is due at the end of the validation of this step, `inside` of an epoch or at its end."""
        by_epoch = inside and self.save_on_train_epoch_end is not True and self._epoch_is_due(trainer.current_epoch)
        due = self._step_is_due(trainer.global_step) or by_epoch
        return due and trainer.progress.batch != trainer.num_training_batches

    def _is_up_now(self, trainer: Trainer) -> bool:
        """Whether the time has run out by rank 0's clock; every `log_every_n_steps` steps, as it is a collective."""
        assert self.seconds is not None
        if trainer.world_size > 1 and trainer.global_step % (trainer.settings.log_every_n_steps or 50):
            return False
        up = trainer.strategy.processes.broadcast_object(time.monotonic() - self._last_time >= self.seconds)
        if up:
            self._time_is_up, self._last_time = True, time.monotonic()
        return up

    def monitor_problems(self, logged: Collection[str], missing: Callable[[str], bool]) -> list[str]:
        problems = []
        for name in (self.monitor, *self.names_in_filename):
            if name in (None, "epoch", "step") or not missing(name):
                continue
            what = f" monitors {name!r}, which" if name == self.monitor else f"(filename={self.filename!r}): {name!r}"
            problems.append(
                f"ModelCheckpoint{what} was not logged.{did_you_mean(name, logged)} "
                f"Logged so far: {', '.join(sorted(logged)) or 'nothing'}."
            )
        return problems

    # -- saving, in running order --------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, renew: bool = False) -> None:
        """Write a checkpoint, then delete those no longer kept; nothing if that of this step has its value already.

        With `renew` that of this step is replaced also then: the epoch's values have come since.
        """
        if trainer.run.is_over:
            return
        metrics = trainer.read_metrics()
        value = self._value(trainer.run)
        again = self.saved_step == trainer.global_step
        if again and not renew and (value is None or self.kept.get(self._newest() or "") is not None):
            return
        self._finish_write(trainer, due=True)
        if "" in self._to_delete(again, value, finite=True):
            self._time_is_up = self._time_is_up and value is None  # else the next value decides
            return
        self._previous = self.kept, self.last, self.nonfinite, self.saved_step
        self._attempted_step = trainer.global_step
        if self.trainable_only:
            self._find_base(trainer)
        left_out: LeftOutError | None = None
        try:
            decide = partial(self._decide, trainer, metrics, again, value)
            trainer.save_with(partial(self._write, trainer), decide, self.save_weights_only)
        except WriteError as failure:
            error = self._with_earlier_doubt(failure)
            if isinstance(error, PointerError):
                self.kept = self._remaining()
            if trainer.is_global_zero:
                self._warn(error)
            self._rollback(error)
            if not isinstance(error, PointerError):
                return
        except LeftOutError as error:
            left_out = error
        except BaseException:
            self.kept, self.last, self.nonfinite, self.saved_step = self._previous
            raise
        self.kept, self._time_is_up, self._unsaved = self._remaining(), False, None
        self.nonfinite = [name for name in self.nonfinite if name in self.kept]
        if trainer.is_global_zero and self._writer is None:
            self._notify_saved(trainer, str(self._in_folder(self._newest() or "")))
        if left_out is not None:
            raise left_out

    def _find_base(self, trainer: Trainer) -> None:
        """Sum up the weights that do not train and have not changed, if others than at the last save. Collective."""
        state, gather = trainer.strategy.module_state(), trainer.strategy.processes.all_gather_object
        frozen = [name for name in frozen_names(trainer.module, state) if name in self._unchanged]
        now = weight_sums(state, frozen, gather, rounded=False)
        names = [name for name in frozen if now[name] == self._unchanged[name]]
        self._unchanged = {name: now[name] for name in names}
        if self._base is None or [*self._base] != names:
            self._base = weight_sums(state, names, gather)

    def _best_of(self, kept: Mapping[str, float | None]) -> str | None:
        return next(iter(self._retention.best(kept, self.nonfinite)), None)

    def _newest(self) -> str | None:
        return next(reversed(self.kept), None)

    def _remaining(self) -> dict[str, float | None]:
        """Return the checkpoints that remain after the newest one is committed."""
        newest = self._newest()
        return {name: value for name, value in self.kept.items() if name == newest or name not in self._obsolete}

    def _to_delete(self, again: bool, value: float | None, finite: bool) -> list[str]:
        """Return the checkpoints to delete for a new one, including "", the new one itself, if it is not worth keeping.

        Args:
            again: the new checkpoint replaces the newest one, which has no value yet; unless that would replace a
                finite checkpoint by one that is not.
            value: the monitored value of the new checkpoint.
            finite: whether the state of the new checkpoint is finite.
        """
        newest = self._newest()
        replaced = [newest] if again and newest is not None and (finite or newest in self.nonfinite) else []
        others = {name: one for name, one in self.kept.items() if name not in replaced}
        nonfinite = [name for name in self.nonfinite if name not in replaced]
        return self._retention.to_delete({**others, "": value}, nonfinite if finite else [*nonfinite, ""]) + replaced

    def _decide(
        self, trainer: Trainer, metrics: Mapping[str, float], again: bool, value: float | None, nonfinite: list[str]
    ) -> dict[str, Any]:
        """Choose the name of the new checkpoint and the checkpoints to delete; return the new one's info. Collective.

        The saved state still lists the checkpoints to delete, so that a run resumed after a kill deletes them.
        """
        self._obsolete = self._to_delete(again, value, not nonfinite)
        name = self._name_now(trainer, metrics, value)
        name, problem = trainer.strategy.processes.broadcast_object(
            self._free_name(name, self._obsolete) if trainer.is_global_zero else ("", None)
        )
        if problem is not None:
            raise problem
        if nonfinite and trainer.is_global_zero and self._newest() not in self.nonfinite:
            stays = f"'last' still points to {self.last}" if self.last else "there is no finite one before it"
            log.warning(
                "step %d: weights or optimizer states are not finite (%s). The checkpoint %s is written for you to "
                "look at, and %s.",
                trainer.global_step,
                first_of(nonfinite),
                name,
                stays,
            )
        self.nonfinite = [other for other in self.nonfinite if other != name] + ([name] if nonfinite else [])
        previous = {other: one for other, one in self.kept.items() if other != name}
        self.kept, self.saved_step = {**previous, name: value}, trainer.global_step
        self._saved_place = _place(trainer.progress)
        self.last = self.last if nonfinite else name
        self.best = self._best_of(self._remaining())
        # "follows" leads to a checkpoint whose process was killed before it could update the pointer.
        follows = self._pointed or self._previous[1]
        return {"metrics": metrics, "follows": follows, "owner": self._owner, "name": name}

    def _value(self, run: Run) -> float | None:
        """Return the monitored value of this step; None if it was not measured at this step."""
        if self.monitor in ("epoch", "step"):
            return float(run.progress.epoch_of_step if self.monitor == "epoch" else run.progress.step)
        measured = run.monitored(self.monitor or "")
        if measured is None or measured.step != run.progress.step:
            return None
        if measured.kind == "interim" and self.every_n_epochs is not None:
            return None  # a batch's value is no match for the means of epochs
        return measured.value

    def _name_now(self, trainer: Trainer, metrics: Mapping[str, float], value: float | None) -> str:
        """Return the name of a checkpoint of this step, without a version."""
        values: dict[str, Any] = {**dict.fromkeys(self.names_in_filename, math.nan), **metrics}
        if self.monitor in self.names_in_filename:
            values[self.monitor] = math.nan if value is None else value
        values |= {"epoch": trainer.progress.epoch_of_step, "step": trainer.global_step}
        return format_name(self.filename, values, self.auto_insert_metric_name)

    def _free_name(self, name: str, to_delete: list[str]) -> tuple[str, WriteError | None]:
        """Return the name, with a version if it is taken by a checkpoint that is not in `to_delete`.

        The second value is the error if the storage does not answer, else None.
        """
        candidate, version = name, 1
        try:
            while not self._is_free(candidate, to_delete):
                candidate, version = f"{name}-v{version}", version + 1
        except OSError as error:
            path = self._in_folder(candidate)
            return name, WriteError(f"cannot write the checkpoint {path}: {error.strerror or error}")
        return candidate, None

    def _is_free(self, name: str, to_delete: list[str]) -> bool:
        path = self._in_folder(name)
        if str(path) in being_written:  # by another callback: the storage does not have it yet
            return False
        if not storage_of(path).path_in_use(path):
            return True
        # Another callback may have taken the name of a checkpoint that is gone.
        taken = name in to_delete and (self._is_own(path) or not is_committed(path))
        return taken or self._is_left(name)

    def _is_left(self, name: str) -> bool:
        """Whether a process of this run that was killed has written a checkpoint of this name after the one from which
        the run goes on: it is written again. In another run directory only one of the same step is."""
        path = self._in_folder(name)
        if name in {*self._previous[0], *self._undeleted} or not isinstance(path, Path):
            return False
        info = _info(path) or {}
        return info.get("owner") == self._owner and (self._goes_on or info.get("step") == self._restored_step)

    def _write(self, trainer: Trainer, state: dict[str, Any], info: Mapping[str, Any]) -> None:
        """Write the checkpoint, here or in the background, then `_commit`."""
        name = self._newest() or ""
        if self._base is not None:
            trained = {weight: value for weight, value in state["model"].items() if weight not in self._base}
            state = {**state, "model": trained, "base": dict(self._base)}
        path, group = self._in_folder(name), trainer.checkpoint_group
        overwrite = name in self._obsolete or (trainer.is_global_zero and self._is_left(name))
        directory = CheckpointDirectory(path.parent) if trainer.is_global_zero else None
        # What this one had to leave out, earlier ones may have.
        obsolete = [one for one in self._obsolete if one != name and LEFT_OUT not in info]
        # Of several callbacks in one folder, "best" is of the first with a monitor, and "last" can be trained on.
        folder, others = real_path(path.parent), trainer.checkpoint_callbacks
        beside = [one for one in others if one._folder is not None and real_path(one._folder) == folder]
        leads = next((c for c in beside if c.monitor is not None and c.save_top_k), None) is self
        aside = "weights_only" in info and not all(c.save_weights_only for c in beside)
        last = None if name in self.nonfinite or aside else name
        best = self.best if leads else None
        commit, begun = partial(self._commit, directory, name, last, best, leads, obsolete), time.monotonic()

        def on_committed() -> None:
            self._write_seconds = time.monotonic() - begun
            commit()

        if self._writer is not None:
            self._writes += 1
            thread_group = trainer.background_checkpoint_group(f"writing/{path}/{self._writes}", self._sent)
            self._writer.start(path, state, info, on_committed, group, thread_group, overwrite)
        else:
            write_checkpoint(path, state, info=info, overwrite=overwrite, process_group=group)
            on_committed()

    def _commit(
        self,
        directory: CheckpointDirectory | None,
        name: str,
        last: str | None,
        best: str | None,
        clears: bool,
        obsolete: list[str],
    ) -> None:
        """Set "last" and "best" after a commit, then delete the obsolete checkpoints.

        Args:
            directory: on rank 0; None on the other ranks, which do nothing.
            name: the committed checkpoint.
            last, best: where the pointers are to lead; None leaves "last" as it is, and "best" unless it `clears` it.
            obsolete: the checkpoints to delete.

        Raises:
            PointerError: a pointer cannot be set. The checkpoints to which the pointers lead are not deleted then.
        """
        if directory is None:
            return
        problem, self._pointed = None, None
        held: set[str] = set()
        try:
            try:
                if last is not None:
                    directory.set_pointer("last", last)
                if best is not None or (clears and directory.pointer("best")):  # an earlier run's
                    directory.set_pointer("best", best)
            except (WriteError, ReadError) as error:
                problem = error
                pointed = {pointer: directory.pointer(pointer) for pointer in POINTERS}
                held = {one.name for one in pointed.values() if one is not None}
                self._pointed = pointed["last"].name if pointed["last"] is not None else None
        except ReadError:
            self._undeleted += obsolete
        else:
            self._delete(directory, obsolete, held, {name, best})
        if problem is not None:
            raise PointerError(
                f"{directory.folder / name} was written, and {problem}. 'last' still finds it, as the newest one."
            )

    def _delete(
        self, directory: CheckpointDirectory, obsolete: list[str], held: set[str], kept: set[str | None]
    ) -> None:
        """Delete obsolete checkpoints, and those that could not be deleted before.

        Args:
            held: names to which a pointer leads that cannot be replaced now: deleted later.
            kept: names not to delete, because a newer checkpoint may have taken the name of an obsolete one.
        """
        before, self._undeleted = self._undeleted, []
        for name in dict.fromkeys([*before, *obsolete]):
            try:
                if name in held:
                    self._undeleted.append(name)
                elif name not in kept and self._is_own(directory.folder / name):
                    directory.remove(name)
                elif name not in kept and name in before and not is_committed(directory.folder / name):
                    directory.remove_rest(name)
            except CheckpointError as error:
                self._undeleted.append(name)
                if name not in before:
                    log.warning("a checkpoint that is no longer kept stays until it can be deleted: %s", reason(error))

    def _notify_saved(self, trainer: Trainer, path: str) -> None:
        if self.verbose:
            trainer.print(f"step {trainer.global_step}: saved {path}")
        trainer.hooks.on_checkpoint_saved(path)
        for logger in trainer.loggers:
            logger.after_save_checkpoint(self)

    def _is_own(self, path: StoragePath, latest: float = math.inf) -> bool:
        """Whether a checkpoint is there that this callback has written; one that does not say it counts, too.

        `latest`: its last step.

        Raises:
            ReadError: the storage does not answer.
        """
        info = _info(path)
        return info is not None and info.get("owner", self._owner) == self._owner and info.get("step", 0) <= latest

    def _in_folder(self, name: str) -> StoragePath:
        assert self._folder is not None
        return self._folder / name

    # -- a write in the background -------------------------------------------------------------------------------------

    def _finish_write(self, trainer: Trainer, due: bool = False) -> None:
        """Wait for the write in flight, and give its error to all processes. Collective."""
        if not self.async_save:
            return
        if self._writer is not None:
            with trainer.run.times.during(SAVING):
                self._writer.wait(due)
            self._poll_writer(trainer)
        error, self._error = trainer.strategy.processes.broadcast_object(self._error), None
        if error is not None:
            self._rollback(error)

    def _poll_writer(self, trainer: Trainer) -> None:
        """Report on rank 0 what was committed since the last call, and keep the error; never waits."""
        if self._writer is None:
            return
        path, error = self._writer.result()
        if not trainer.is_global_zero:
            return  # All have the same result; rank 0 broadcasts it.
        if path is not None:
            self._notify_saved(trainer, path)
        if error is not None:
            self._error = error = self._with_earlier_doubt(error)
            self._warn(error)
            if isinstance(error, PointerError):
                self._notify_saved(trainer, str(self._in_folder(self._newest() or "")))

    def _with_earlier_doubt(self, error: CheckpointError) -> CheckpointError:
        """Return the error of the newest write; an uncertain one if an earlier write of the same step was uncertain."""
        if isinstance(error, UncertainWriteError):
            self._uncertain_step = self._attempted_step
        elif self._uncertain_step == self._attempted_step and not isinstance(error, PointerError):
            uncertain = UncertainWriteError(f"{_sentence(error)} An earlier attempt may have written one of this step.")
            uncertain.__cause__ = error
            return uncertain
        return error

    def _warn(self, error: CheckpointError) -> None:
        if self.on_write_error == "warn" and isinstance(error, PointerError):
            log.error("training goes on (on_write_error='warn'): %s", error)
        elif self.on_write_error == "warn":
            uncertain = isinstance(error, UncertainWriteError)
            log.error(
                "%s, and training goes on (on_write_error='warn'): %s %s",
                "PERHAPS NO CHECKPOINT WAS WRITTEN" if uncertain else "NO CHECKPOINT WAS WRITTEN",
                _sentence(error),
                self._last_checkpoint(),
            )

    def _last_checkpoint(self) -> str:
        last = self._previous[1]
        if not last:
            return "There is none yet."
        try:
            if not is_committed(self._in_folder(last)):
                return f"The last checkpoint was {last}, which is not there any more."
        except CheckpointError:
            return f"The last checkpoint was {last}, which cannot be looked up now."
        return f"The last checkpoint is still {last}."

    def _rollback(self, error: CheckpointError) -> None:
        """Restore the state before the newest checkpoint, unless only its pointers could not be written."""
        if not isinstance(error, PointerError):
            failed = self._newest()
            self.kept, self.last, self.nonfinite, self.saved_step = self._previous
            if failed is not None and failed not in self.kept:
                self._undeleted.append(failed)  # what was written of it, all of it if the error came late
            self.best = self._best_of(self.kept)
            self._unsaved = error
        if self.on_write_error == "raise":
            raise error

    # -- state ---------------------------------------------------------------------------------------------------------

    def _monitored(self) -> list[str | None]:
        """Return the monitored name and the mode by which `kept` is to be read."""
        return [self.monitor, None if self.monitor is None else self.mode]

    def state_dict(self) -> dict[str, Any]:
        # A resumed run tries again to delete what could not be deleted.
        kept = {**dict.fromkeys(self._undeleted), **self.kept}
        state: dict[str, Any] = {"kept": kept, "best": self.best, "last": self.last, "saved_step": self.saved_step}
        state["owner"] = self._owner
        return {**state, "nonfinite": list(self.nonfinite)} if self.nonfinite else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the list of checkpoints, without those that no longer exist.

        Raises:
            CheckpointError: the state is not one of a ModelCheckpoint.
        """
        require(state_dict, STATE, "ModelCheckpoint")
        for name in state_dict["kept"]:
            if not name or name.startswith(".") or "/" in name or "\0" in name:
                raise CheckpointError(f"ModelCheckpoint: {name!r} is not the name of a checkpoint")
        self.saved_step = state_dict["saved_step"]
        self._owner = state_dict.get("owner", self._owner)
        # Checkpoints of later versions have the monitor in the key of the state.
        monitored = state_dict.get("monitor")
        self._continues = monitored in (None, self._monitored())
        if monitored is not None and not self._continues:
            log.warning(
                "ModelCheckpoint: the former run chose checkpoints by monitor=%r, mode=%r, this run by monitor=%r, "
                "mode=%r, and begins anew; the former run's checkpoints stay, and are not deleted later.",
                *[*monitored, None, None][:2],
                *self._monitored(),
            )
            state_dict = {**state_dict, "kept": {}, "best": None, "nonfinite": []}
        self._restored_best = state_dict["best"], state_dict["kept"].get(state_dict["best"])
        own = {name: value for name, value in state_dict["kept"].items() if self._is_own(self._in_folder(name))}
        later = [name for name in own if not self._is_own(self._in_folder(name), self._restored_step)]
        if later:
            words = "written since the checkpoint of step %d, perhaps by another run, and therefore not replaced: %s"
            log.warning(words, self._restored_step, first_of(later))
        # A run that goes back knows what it wrote in that step after the checkpoint that it goes back to.
        there = {
            name: one for name, one in self.kept.items() if self._is_own(self._in_folder(name), self._restored_step)
        }
        self.kept = {name: value for name, value in own.items() if name not in later} | there
        if there.keys() - own.keys():
            self.saved_step = int(self._restored_step)
        self.last = next((name for name in (self.last, state_dict["last"]) if name in self.kept), None)
        self.nonfinite = [name for name in state_dict.get("nonfinite", ()) if name in self.kept]
        if self.last is not None:
            # Those after which the run was resumed from the last finite one, which does not know of them.
            self._take_unlisted(lambda _, info: info.get("follows") == self.last and bool(info.get("nonfinite")))
        self.best = self._best_of(self.kept)

    def _take_unlisted(self, unlisted: Callable[[str, Mapping[str, Any]], bool]) -> None:
        """Take checkpoints of this callback of which the restored state does not know into the list."""
        assert self._folder is not None
        for path in CheckpointDirectory(self._folder).list():
            info = _info(path) or {}
            if path.name not in self.kept and unlisted(path.name, info) and self._is_own(path):
                self.kept[path.name] = None
                self.nonfinite += [path.name] if info.get("nonfinite") else []


def _info(path: StoragePath) -> dict[str, Any] | None:
    """Return the info of a checkpoint; of a damaged one, which is known by its name alone, {}; None: there is none."""
    try:
        return read_manifest(path).info if is_committed(path) else None
    except ReadError:
        raise
    except CheckpointError:
        return {}


def _sentence(error: CheckpointError) -> str:
    """Return the message of an error with a full stop."""
    return f"{str(error).rstrip('.')}."


def _place(progress: Progress) -> tuple[int, int]:
    """Return the step of the last validation, and the epochs that have ended."""
    return progress.validated_step, progress.epoch + progress.epoch_ended


def _contradictions(
    monitor: str | None, mode: str | None, save_top_k: int, steps: int | None, epochs: int | None, interval: Any
) -> list[str]:
    problems = []
    if sum(trigger not in (None, 0) for trigger in (steps, epochs, interval)) > 1:
        problems.append(
            "give one of every_n_train_steps, every_n_epochs, train_time_interval; for several give several callbacks."
        )
    if monitor is None and save_top_k > 1 and mode is not None:
        problems.append("mode without monitor has no meaning: give monitor='val_loss' or the like.")
    if interval is not None:
        try:
            if read_duration(interval, "train_time_interval") == 0:
                problems.append(f"train_time_interval={interval!r}: give a time above 0.")
        except ConfigError as error:
            problems.append(str(error))
    if monitor == "":
        problems.append("monitor='': give the name of a logged value, such as 'val_loss'.")
    return problems


def _folder_problems(dirpath: str | Path | None) -> list[str]:
    if dirpath is None:
        return []
    parts = str(dirpath).split("/")
    if "\0" in str(dirpath) or max(len(part.encode("utf-8", "replace")) for part in parts) > 255:
        return [
            f"dirpath={str(dirpath)[:40]!r}: no folder can have this name. Give one of "
            "at most 255 bytes, without control characters."
        ]
    try:
        as_storage_path(dirpath)
    except ConfigError as error:
        return [f"dirpath: {error}"]
    return []


def _as_tensor(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor(value)
