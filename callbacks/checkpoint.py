"""ModelCheckpoint: decide when a checkpoint is written, and which ones are kept."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from trainer.arguments import Limit, local_path
from trainer.callback import Checkpoint
from trainer.callbacks.on_exception_checkpoint import can_save_after_error
from trainer.checkpoint.base_weights import FrozenWeights
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.disk import WriteError
from trainer.checkpoint.hook_checkpoint import entries_of
from trainer.checkpoint.kept import KeptCheckpoints
from trainer.checkpoint.left_out import LeftOutError
from trainer.checkpoint.lightning_file import FilesBeside, file_of, is_beside, share_written, writes_file
from trainer.checkpoint.manifest import is_committed
from trainer.checkpoint.retention import Retention, format_name, logged_names, template_problems
from trainer.checkpoint.storage import StoragePath, as_storage_path, kept_storage_path, real_path, require_writable
from trainer.errors import CheckpointError, first_of, raise_problems
from trainer.guards.host_times import SAVING
from trainer.loop.progress import Progress
from trainer.loop.training_state import files_beside, name_of_run_dir
from trainer.metrics.monitor import log_assumed_mode, not_logged, resolve_mode
from trainer.names.states import runs_as_lightning
from trainer.runs.monitors import refuse_missing_monitors
from trainer.settings import read_duration
from trainer.strategy import given_checkpoint_io

if TYPE_CHECKING:
    from trainer.loop.run import Run
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

Interval = Annotated[int, Limit("from", 0), "0: never"]


class ModelCheckpoint(Checkpoint):
    """Write checkpoints while training, and a last one when training ends or is stopped.

    The newest checkpoint is always kept (`save_last`) and called "last"; with `monitor` the `save_top_k` best ones are
    kept too, and the best of them is called "best": `fit(..., ckpt_path="last")`, `test(..., ckpt_path="best")`.

    A value belongs to the step it was measured at. A checkpoint waits for a validation, or an epoch's end, that is due
    at the same step. A checkpoint of a step without a value is kept only while it is the newest. Ties keep the older
    checkpoint. If a process ends between the writes of two ModelCheckpoints at one step, the run resumed from the first
    one's checkpoint begins with the second one's write.

    If weights or optimizer states are not finite (and were when training began), the checkpoint is written with a
    warning. It never becomes "last" or "best", and never replaces a finite one; only the newest of them is kept.

    Args:
        dirpath: folder of the checkpoints, or a URL that fsspec understands (s3://bucket/run). Default: `checkpoints`
            in the run directory.
        filename: name of a checkpoint; `{epoch}`, `{step}` and logged names are filled in, as in
            "{epoch}-{val_loss:.2f}" -> "epoch=3-val_loss=0.17"; nan stands for a value not known yet. Default:
            "{epoch}-{step}". Further checkpoints of the same name get a number. A checkpoint replaces another of its
            name in one step: with `filename="model"` there is always a checkpoint `model`.
        monitor: logged name that decides which checkpoints are the best, or "epoch" or "step". Default: the newest are.
        mode: "min" or "max": which value of `monitor` is better. Default: "min". A name for which larger is better
            (acc, f1, ...) needs "max".
        save_top_k: how many of the best (without monitor: of the newest) to keep; -1: all; 0: none.
        save_last: keep the newest one, whatever its value; False: do not. "last" is always a pointer. With
            `single_file`, True and "link" also make `last.ckpt` a link to the newest file.
        every_n_train_steps: write after every so many steps; 0: not by steps.
        every_n_epochs: write at the end of every so many epochs, and after validations inside an epoch; 0: not by
            epochs. Default: 1 if nothing else is set, not even to 0.
        train_time_interval: write after so much time, given as `max_time` is; 0: not by time. On several processes the
            time is checked every `log_every_n_steps` steps.
        async_save: training waits only until the state is copied in memory (which takes as much memory as the state);
            a thread writes it, one checkpoint at a time. The end of training, a stop and an error wait for it.
        on_write_error: "raise": a checkpoint that cannot be written (disk full, network down) ends the run; "warn":
            training continues, the previous checkpoint stays, and an error is logged. If the last weights cannot be
            saved either, the end of training raises WriteError, so that the process does not exit with 0.
        save_on_exception: write one when an error ends the run, on a single process only. A resume from it is not exact
            if the error came from inside a step: the step has drawn random numbers and updated BatchNorms, and its
            batches come again.
        save_weights_only: leave out the state of optimizers and schedulers; training cannot continue from it.
        save_on_train_epoch_end: with `every_n_epochs`: True: only where epochs end, not after validations inside them;
            False: only after validations. Default: both.
        auto_insert_metric_name: "{step}" becomes "step=12", not "12".
        verbose: print the path of each checkpoint written.
        trainable_only: hold only buffers and the weights that train (such as LoRA's adapters) or have changed since
            training began (such as a teacher that follows the model). Loading checks that the module has the same base
            weights.
        single_file: also write one file in Lightning's shape beside the folder, `<name>.ckpt`, for programs that read,
            copy or delete checkpoints as files. `best_model_path` and the other paths are then the file's. Default:
            in a process that runs as Lightning, if the place is not a URL. Rank 0 holds the full state in memory while
            it writes the file.

    Raises:
        ConfigError: the arguments contradict each other.
    """

    agree_on = (
        *("monitor", "mode", "save_top_k", "save_last", "every_n_train_steps", "every_n_epochs", "seconds"),
        *("async_save", "on_write_error", "names_in_filename"),
        *("trainable_only", "save_on_train_epoch_end", "save_weights_only", "single_file"),
    )

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
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
        single_file: bool | None = None,
    ) -> None:
        super().__init__()
        triggers = (every_n_train_steps, every_n_epochs, train_time_interval)
        problems = template_problems(filename)
        if sum(trigger not in (None, 0) for trigger in triggers) > 1:
            problems.append("give one of every_n_train_steps, every_n_epochs, train_time_interval to a callback.")
        raise_problems(problems, "ModelCheckpoint's arguments")
        place = None if dirpath is None else kept_storage_path(dirpath, "dirpath")
        self.dirpath = None if place is None else str(place)
        self._asks_for_file, self.single_file = single_file, writes_file(single_file, place)
        self.filename = filename or "{epoch}-{step}"
        self.names_in_filename = logged_names(self.filename)
        self.monitor = monitor
        self.mode = resolve_mode(mode, monitor or "", "ModelCheckpoint")
        self._unclear_mode = mode is None
        self.save_top_k = save_top_k
        self.save_last, self._links_last = save_last is not False, bool(save_last)
        self.every_n_train_steps = every_n_train_steps or None
        self.every_n_epochs = 1 if triggers == (None, None, None) else every_n_epochs or None
        self.seconds = read_duration(train_time_interval, "train_time_interval") or None
        self.async_save = async_save
        self.on_write_error = on_write_error
        self.save_on_exception = save_on_exception
        self.auto_insert_metric_name = auto_insert_metric_name
        self.verbose = verbose
        self.trainable_only = trainable_only
        self.save_weights_only = save_weights_only
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self._start_afresh(Path())

    def _start_afresh(self, folder: StoragePath, in_background: bool = False, files: FilesBeside | None = None) -> None:
        self._folder = folder
        retention = Retention(self.monitor is not None, self.mode, self.save_top_k, self.save_last)
        self._checkpoints = KeptCheckpoints(folder, retention, in_background, files, self._links_last)
        self._frozen = FrozenWeights()
        """The weights that `trainable_only` leaves out."""
        self._earlier_last: StoragePath | None = None
        """The checkpoint that this run was resumed from, if it is in another folder."""
        self._earlier_file: Path | None = None
        """The file that was given in its place."""
        self._earlier_best: tuple[StoragePath | None, float | None] = (None, None)
        """The best checkpoint beside it, with its value."""
        self._restored_best: tuple[str | None, float | None] = (None, None)
        """The name and value of the best checkpoint in the restored state."""
        self._restored_step = math.inf
        """The step of the checkpoint that the run was resumed from."""
        self._same_run = False
        """True if the run continues in the run directory of that checkpoint."""
        self._saved_place: tuple[int, int] | None = None
        """`_place` at the newest write; None before."""
        self._last_time = time.monotonic()
        self._time_is_up = False
        """A checkpoint is due by `train_time_interval`, until one is written."""
        self._step_of_due = -1
        """The last step with a checkpoint inside an epoch; the epoch may have ended there, if its length is unknown."""
        self._error: CheckpointError | None = None
        """An error of the writer that the other processes do not know of yet."""
        self._unsaved: CheckpointError | None = None
        """The error of the newest write, if it left no checkpoint of that step."""

    # -- for users -----------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> dict[str, float | None]:
        """The names of the checkpoints on disk, oldest first, each with its monitored value."""
        return self._checkpoints.listed.kept

    @property
    def nonfinite(self) -> Collection[str]:
        """The checkpoints in `kept` whose states are not finite."""
        return self._checkpoints.listed.nonfinite

    @property
    def last(self) -> str | None:
        """The name of the newest checkpoint whose state is finite."""
        return self._checkpoints.listed.last

    @property
    def best(self) -> str | None:
        """The name of the best checkpoint by its value."""
        return self._checkpoints.best

    def output_location(self) -> tuple[str, Path] | None:
        """Return the monitored value and the path of the best checkpoint; None without `monitor` or such a value."""
        score, path = self.best_model_score, self.best_model_path
        if self.monitor is None or score is None or "://" in path:
            return None
        return f"best {self.monitor} {float(score):.6g}:", Path(path)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint by `monitor`, or the newest without it. Empty before the first, and with `save_top_k=0`.

        A run resumed into another folder has the former run's best checkpoint until it writes one.
        """
        if self.monitor is None:
            return self.last_model_path if self.save_top_k else ""
        return str(self._earlier_best[0] or "") if self.best is None else self._path(self.best)

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The monitored value of the best checkpoint, a 0-dim tensor."""
        return _as_tensor(self._earlier_best[1] if self.best is None else self.kept[self.best])

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """The paths of the best checkpoints on disk, `save_top_k` at most, with their monitored values; best first."""
        return {self._path(name): torch.tensor(self.kept[name]) for name in self._checkpoints.best_names()}

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
        best = self._checkpoints.best_names()
        return next((_as_tensor(self.kept[name]) for name in reversed(self.kept) if name in best), None)

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the paths and values of `best_k_models` to a YAML file, by default `best_k_models.yaml`."""
        import yaml

        path = local_path(filepath or self._path("best_k_models.yaml"), "filepath")
        path.write_text(yaml.safe_dump({path: float(value) for path, value in self.best_k_models.items()}))

    @property
    def last_model_path(self) -> str:
        """The newest finite checkpoint, as `best_model_path`. Empty before the first."""
        return str(self._earlier_file or self._earlier_last or "") if self.last is None else self._path(self.last)

    def _path(self, name: str) -> str:
        folder = self._checkpoints.folder / name
        return str(file_of(folder) if self.single_file else folder)

    def newest_on_disk(self) -> str:
        return str(self._checkpoints.newest_committed() or self._earlier_last or "")

    @property
    def write_seconds(self) -> float | None:
        return self._checkpoints.write_seconds

    @property
    def unsaved(self) -> WriteError | None:
        if self._unsaved is None:
            return None
        return WriteError(f"{_sentence(self._unsaved)} {self._checkpoints.describe_former()}")

    # -- the begin and the end of a run --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        folder = as_storage_path(self.dirpath) if self.dirpath is not None else trainer.run_dir / "checkpoints"
        in_background = self.async_save and (trainer.is_global_zero or trainer.strategy.shards_state)
        by_plugin = given_checkpoint_io(trainer.strategy) is not None
        self.single_file = writes_file(self._asks_for_file, folder, by_plugin)
        self._start_afresh(folder, in_background, files_beside(trainer.run) if self.single_file else None)
        if not trainer.is_global_zero:
            return
        if self.monitor is not None and self._unclear_mode:
            log_assumed_mode(self.monitor, "ModelCheckpoint")
        require_writable(folder, f"ModelCheckpoint(dirpath={str(self.dirpath)!r})")
        try:
            CheckpointDirectory(folder).clean()
        except CheckpointError as error:
            log.warning("cannot delete the remains of interrupted writes in %s: %s", folder, error)

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
        self._frozen.base, self._restored_step = entries.get("base"), entries["progress"]["step"]
        self._same_run = entries["run_dir"] == name_of_run_dir(trainer.run_dir, trainer.settings)

    def state_dict(self) -> dict[str, Any]:
        return self._checkpoints.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the list of checkpoints, without those that no longer exist.

        Raises:
            CheckpointError: the state is not one of a ModelCheckpoint.
        """
        self._checkpoints.load_state_dict(state_dict, self._restored_step, self._same_run)
        self._restored_best = state_dict["best"], state_dict["kept"].get(state_dict["best"])

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.trainable_only:
            state, gather = trainer.strategy.module_state(), trainer.strategy.processes.all_gather_object
            self._frozen.begin(pl_module, state, gather)
        if trainer.is_global_zero and self.single_file:
            self._checkpoints.write_missing_files()
        origin, (best, value) = trainer.run.resumed_from, self._restored_best
        if origin is None:
            return
        if self._checkpoints.listed.step == trainer.global_step:
            self._saved_place = _place(trainer.progress)
        # Another ModelCheckpoint's folder has checkpoints of the same names.
        if any(_same_folder(one, origin.parent) for one in trainer.checkpoint_callbacks):
            if self._is_owed(trainer):
                self._save(trainer)
            return
        self._earlier_last, self._earlier_file = origin, trainer.run.resumed_file
        if best is not None and is_committed(origin.parent / best):
            earlier = origin.parent / best
            self._earlier_best = file_of(earlier) if self.single_file and is_beside(earlier) else earlier, value

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._finish_write(trainer)
        saved = self._checkpoints.listed.step == trainer.global_step
        # This step's checkpoint may be older than the validation after which a callback stopped the run.
        before = trainer.stop_reason is not None and self._saved_place not in (None, _place(trainer.progress))
        in_former_run = saved and not self.kept
        if trainer.global_step > 0 and (self.save_last or self.save_top_k) and not in_former_run:
            self._unsaved = None
            self._save(trainer, renew=before)
            self._finish_write(trainer)
        if self._checkpoints.listed.step == trainer.global_step:
            self._unsaved = None
        share_written(trainer.strategy.processes)
        if runs_as_lightning() and not self.single_file and trainer.is_global_zero:
            log.warning(
                "%s has folders alone. ModelCheckpoint(single_file=True) also writes files, on a disk.", self._folder
            )

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        if trainer.stage != "fit":
            return
        # No collectives: the other processes may be anywhere.
        self._checkpoints.writer.wait()
        self._poll_writer(trainer)
        if self._error not in (None, exception):
            log.error("%s", self._error)
        self._error = None
        if not self.save_on_exception or trainer.global_step == self._checkpoints.listed.step:
            return
        if can_save_after_error(trainer.world_size):
            self._save(trainer)
            self._finish_write(trainer)

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._checkpoints.writer.close()
        self._checkpoints.files = None  # it holds the run, and packages pickle callbacks

    # -- when one is due -----------------------------------------------------------------------------------------------

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.async_save:
            self._poll_writer(trainer)
            if self._error is not None:
                self._give_up(self._error)
        if self.seconds is not None and not self._time_has_run_out(trainer, self.seconds):
            return
        by_steps = self._time_is_up or self.every_n_train_steps is not None
        if by_steps and self._is_due_after_step(trainer):  # in each step, a call costs more than the question
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
        if self._is_due_after_epoch(trainer, trainer.current_epoch) or self._step_of_due == trainer.global_step:
            self._save(trainer, renew=self.monitor is not None or bool(self.names_in_filename))

    def _is_due_after_step(self, trainer: Trainer) -> bool:
        if not self._is_due_by_step(trainer.global_step):
            return False
        # Values of this step may be still to come, of a validation or of the epoch that ends here.
        waits = self.monitor is not None or bool(self.names_in_filename)
        return not (waits and (trainer.validation_due() or self._is_last_batch(trainer)))

    def _is_due_after_validation(self, trainer: Trainer, inside: bool) -> bool:
        """Whether a checkpoint is due at the end of the validation of this step, `inside` of an epoch or at its end."""
        by_epoch = inside and self.save_on_train_epoch_end is not True and self._is_due_by_epoch(trainer.current_epoch)
        return (by_epoch or self._is_due_by_step(trainer.global_step)) and not self._is_last_batch(trainer)

    def _is_due_after_epoch(self, trainer: Trainer, epoch: int) -> bool:
        at_end = self.save_on_train_epoch_end is not False or trainer.progress.validated_step == trainer.global_step
        return (at_end and self._is_due_by_epoch(epoch)) or self._is_due_by_step(trainer.global_step)

    def _is_due_by_epoch(self, epoch: int) -> bool:
        return self.every_n_epochs is not None and (epoch + 1) % self.every_n_epochs == 0

    def _is_due_by_step(self, step: int) -> bool:
        return self._time_is_up or (self.every_n_train_steps is not None and step % self.every_n_train_steps == 0)

    def _is_last_batch(self, trainer: Trainer) -> bool:
        return trainer.progress.batch == trainer.num_training_batches

    def _is_owed(self, trainer: Trainer) -> bool:
        """Whether a checkpoint was due at the step that was resumed from, which another callback has written.

        The process may have ended between the two writes, as in tests/helpers/programs/several_runs.py. The hooks of
        that step are not called again.
        """
        progress = trainer.progress
        if not self._checkpoints.loaded or progress.step in (0, self._checkpoints.listed.step):
            return False
        if progress.batch == 0:
            return self._is_due_after_epoch(trainer, progress.epoch - 1)
        if progress.validated_step == progress.step:
            return self._is_due_after_validation(trainer, inside=True)
        return self._is_due_after_step(trainer)

    def _time_has_run_out(self, trainer: Trainer, seconds: float) -> bool:
        """Whether it is time by rank 0's clock; looks every `log_every_n_steps` steps, as this is a collective."""
        if trainer.world_size > 1 and trainer.global_step % (trainer.settings.log_every_n_steps or 50):
            return False
        is_up: bool = trainer.strategy.processes.broadcast_object(time.monotonic() - self._last_time >= seconds)
        if is_up:
            self._time_is_up, self._last_time = True, time.monotonic()
        return is_up

    def monitor_problems(self, logged: Collection[str], missing: Callable[[str], bool]) -> list[str]:
        names = {self.monitor or "step", *self.names_in_filename} - {"epoch", "step"}
        owner = f"ModelCheckpoint(monitor={self.monitor!r}, filename={self.filename!r})"
        return [not_logged(owner, name, logged) for name in sorted(names) if missing(name)]

    # -- saving, in running order --------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, renew: bool = False) -> None:
        """Write a checkpoint, then delete those no longer kept; do nothing if this step's checkpoint has its value.

        Args:
            renew: replace this step's checkpoint all the same, because the epoch's values have come since.
        """
        if trainer.run.clock.is_over:
            return
        checkpoints, metrics, value = self._checkpoints, trainer.read_metrics(), self._value(trainer.run)
        again = checkpoints.listed.step == trainer.global_step
        known = self.kept.get(checkpoints.listed.newest or "") is not None
        if again and not renew and (value is None or known):
            return
        self._finish_write(trainer, due=True)
        if not checkpoints.would_keep(value, again):
            self._time_is_up = self._time_is_up and value is None  # else the next value decides
            return
        checkpoints.begin()
        if self.trainable_only:
            state, gather = trainer.strategy.module_state(), trainer.strategy.processes.all_gather_object
            self._frozen.update(trainer.module, state, gather)
        left_out: LeftOutError | None = None
        try:
            decide = partial(self._decide, trainer, metrics, again, value)
            trainer.save_with(partial(self._write, trainer), decide, self.save_weights_only)
        except WriteError as error:
            if trainer.is_global_zero:
                self._report(error)
            self._give_up(error)
            return
        except LeftOutError as error:
            left_out = error
        except BaseException:
            checkpoints.roll_back(failed=False)
            raise
        checkpoints.commit_list()
        self._time_is_up, self._unsaved = False, None
        if trainer.is_global_zero and not checkpoints.in_background:
            self._notify_saved(trainer, str(checkpoints.folder / (checkpoints.listed.newest or "")))
        if left_out is not None:
            raise left_out

    def _value(self, run: Run) -> float | None:
        """Return the monitored value of this step; None if it was not measured at this step."""
        if self.monitor in ("epoch", "step"):
            return float(run.progress.epoch_of_step if self.monitor == "epoch" else run.progress.step)
        measured = run.values.monitored(self.monitor or "")
        if measured is None or measured.step != run.progress.step:
            return None
        if measured.kind == "interim" and self.every_n_epochs is not None:
            return None  # a batch's value cannot be compared with means of epochs
        return measured.value

    def _decide(
        self, trainer: Trainer, metrics: Mapping[str, float], again: bool, value: float | None, nonfinite: list[str]
    ) -> dict[str, Any]:
        """Choose the name of the new checkpoint and the checkpoints to delete; return the new one's info. Collective.

        Raises:
            WriteError: the storage does not answer, on all processes.
        """
        self._checkpoints.choose(value, again, not nonfinite)
        wanted = self._name_now(trainer, metrics, value)
        free = self._checkpoints.free_name(wanted) if trainer.is_global_zero else wanted
        name = trainer.strategy.processes.broadcast_object(free)
        if isinstance(name, WriteError):
            raise name
        if nonfinite and trainer.is_global_zero and self._checkpoints.listed.newest not in self.nonfinite:
            log.warning(
                "step %d: weights or optimizer states are not finite (%s). The checkpoint %s is written for you to "
                "look at, and 'last' still points to %s.",
                trainer.global_step,
                first_of(nonfinite),
                name,
                self.last or "none",
            )
        self._saved_place = _place(trainer.progress)
        return {"metrics": metrics, **self._checkpoints.add(name, value, trainer.global_step, not nonfinite)}

    def _name_now(self, trainer: Trainer, metrics: Mapping[str, float], value: float | None) -> str:
        """Return the name of a checkpoint of this step, without a version."""
        values: dict[str, Any] = {**dict.fromkeys(self.names_in_filename, math.nan), **metrics}
        if self.monitor in self.names_in_filename:
            values[self.monitor] = math.nan if value is None else value
        values |= {"epoch": trainer.progress.epoch_of_step, "step": trainer.global_step}
        return format_name(self.filename, values, self.auto_insert_metric_name)

    def _write(self, trainer: Trainer, state: dict[str, Any], info: Mapping[str, Any]) -> None:
        # Of several callbacks in one folder, "best" is of the first with a monitor, and "last" can be trained on.
        beside = [one for one in trainer.checkpoint_callbacks if _same_folder(one, self._checkpoints.folder)]
        leads = next((one for one in beside if one.monitor is not None and one.save_top_k), None) is self
        trainable = "weights_only" not in info or all(one.save_weights_only for one in beside)
        group, group_of_thread = trainer.checkpoint_group, trainer.background_checkpoint_group
        self._checkpoints.write(self._frozen.left_out_of(state), info, group, group_of_thread, trainable, leads)

    def _notify_saved(self, trainer: Trainer, path: str) -> None:
        if self.verbose:
            trainer.print(f"step {trainer.global_step}: saved {path}")
        trainer.hooks.on_checkpoint_saved(path)
        for logger in trainer.loggers:
            logger.after_save_checkpoint(self)

    # -- writes in the background, and writes that fail ----------------------------------------------------------------

    def _finish_write(self, trainer: Trainer, due: bool = False) -> None:
        """Wait for the write in flight, and give its error to all processes. Collective."""
        if not self.async_save:
            return
        with trainer.run.times.during(SAVING):
            self._checkpoints.writer.wait(due)
        self._poll_writer(trainer)
        error, self._error = trainer.strategy.processes.broadcast_object(self._error), None
        if error is not None:
            self._give_up(error)

    def _poll_writer(self, trainer: Trainer) -> None:
        """Report on rank 0 what was committed since the last call, and keep the error; never waits."""
        path, error = self._checkpoints.writer.result()
        if not trainer.is_global_zero:
            return  # All have the same result; rank 0 broadcasts it.
        if path is not None:
            self._notify_saved(trainer, path)
        if error is not None:
            self._error = error
            self._report(error)

    def _report(self, error: CheckpointError) -> None:
        if self.on_write_error == "warn":
            log.error(
                "SAVING A CHECKPOINT HAS FAILED, and training continues (on_write_error='warn'): %s %s",
                _sentence(error),
                self._checkpoints.describe_former(),
            )

    def _give_up(self, error: CheckpointError) -> None:
        """Restore the list before the newest checkpoint, and raise the error if that is wanted."""
        self._checkpoints.roll_back(failed=True)
        self._unsaved = error
        if self.on_write_error == "raise":
            raise error


def _same_folder(callback: Checkpoint, folder: StoragePath) -> bool:
    return callback._folder is not None and real_path(callback._folder) == real_path(folder)


def _sentence(error: CheckpointError) -> str:
    """Return the message of an error with a full stop."""
    return f"{str(error).rstrip('.')}."


def _place(progress: Progress) -> tuple[int, int]:
    """Return the step of the last validation, and the epochs that have ended."""
    return progress.validated_step, progress.epoch + progress.epoch_ended


def _as_tensor(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor(value)
