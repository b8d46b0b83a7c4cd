"""ModelCheckpoint: when checkpoints are written, what they are called, and which are kept."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.callbacks.base import Callback
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import ConfigError, did_you_mean, raise_problems

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
"""A name to be filled in, and its format."""

SMALLER_IS_BETTER = ("loss", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "wer", "cer", "fid")
LARGER_IS_BETTER = ("acc", "accuracy", "f1", "auc", "auroc", "iou", "map", "precision", "recall", "bleu", "psnr", "r2")


class ModelCheckpoint(Callback):
    """Writes checkpoints while training, and a last one when training ends or is stopped.

    The newest checkpoint is always kept (`save_last`) and called "last"; with `monitor` the `save_top_k` best ones are
    kept too, and the best of them is called "best": `fit(..., ckpt_path="last")`, `test(..., ckpt_path="best")`.

    Args:
        dirpath: folder of the checkpoints. Default: `checkpoints` in the run directory.
        filename: name of a checkpoint; `{epoch}`, `{step}` and logged names are filled in, as in
            "{epoch}-{val_loss:.2f}" -> "epoch=3-val_loss=0.17". Default: "{epoch}-{step}".
        monitor: logged name that decides which checkpoints are the best. Default: the newest are.
        mode: "min" or "max": which value of `monitor` is better. Default: told by the name (loss: min, acc: max).
        save_top_k: how many of the best (without monitor: of the newest) to keep; -1: all; 0: none.
        save_last: keep the newest one, whatever its value.
        every_n_train_steps: write after every so many steps.
        every_n_epochs: write at the end of every so many epochs (and after validations inside an epoch). The default, 1.
        train_time_interval: write after so much time; checked every `log_every_n_steps` steps on several processes.
        save_on_exception: write one when an error ends the run. On one process only: the others could be anywhere.
        auto_insert_metric_name: "{step}" becomes "step=12", not "12".
        verbose: say what was written.

    Raises:
        ConfigError: the arguments contradict each other.
    """

    after_module: ClassVar[bool] = True

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
        train_time_interval: timedelta | float | None = None,
        save_on_exception: bool = False,
        auto_insert_metric_name: bool = True,
        verbose: bool = False,
    ) -> None:
        _check_arguments(monitor, mode, save_top_k, every_n_train_steps, every_n_epochs, train_time_interval)
        raise_problems([*_wrong_filename(filename), *_wrong_flags(save_last, dirpath)], "ModelCheckpoint's arguments")
        self.dirpath = dirpath
        self.filename = filename or "{epoch}-{step}"
        self.monitor = monitor
        self.mode = mode or (_mode_of(monitor) if monitor is not None else "min")
        self.save_top_k = save_top_k
        self.save_last = save_last
        self.every_n_train_steps = every_n_train_steps
        by_epoch = every_n_train_steps is None and train_time_interval is None
        self.every_n_epochs = every_n_epochs or (1 if by_epoch else None)
        self.seconds = (
            train_time_interval.total_seconds() if isinstance(train_time_interval, timedelta) else train_time_interval
        )
        self.save_on_exception = save_on_exception
        self.auto_insert_metric_name = auto_insert_metric_name
        self.verbose = verbose
        self.kept: dict[str, float | None] = {}
        """Checkpoints on disk, oldest first, with the monitored value each was written at."""
        self.best: str | None = None
        self.last: str | None = None
        self.saved_step = -1
        self._folder: Path | None = None
        self._last_time = time.monotonic()

    # -- what users ask ------------------------------------------------------------------------------------------------

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

    # -- when ----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._folder = Path(self.dirpath) if self.dirpath is not None else trainer.run_dir / "checkpoints"
            if self._folder.exists() and not self._folder.is_dir():
                raise ConfigError(f"ModelCheckpoint(dirpath={str(self.dirpath)!r}) is a file: give a folder.")
            self._last_time = time.monotonic()
            if trainer.is_global_zero and self._folder.is_dir():
                CheckpointStore(self._folder).clean()

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.every_n_train_steps is not None:
            due = trainer.global_step % self.every_n_train_steps == 0
        else:
            due = self.seconds is not None and self._time_is_up(trainer)
        # When validation comes at this very step, its result belongs to this checkpoint.
        if due and not (self.monitor is not None and trainer.validation_due()):
            self._save(trainer, must_know=False)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.stage != "fit" or trainer.sanity_checking:
            return
        if self.every_n_train_steps is not None:
            if self.monitor is not None and trainer.global_step % self.every_n_train_steps == 0:
                self._save(trainer)
        elif self._epoch_is_due(trainer) and trainer.settings.val_check_interval != 1.0:
            self._save(trainer, must_know=False)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._epoch_is_due(trainer) and self.saved_step != trainer.global_step:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self.saved_step != trainer.global_step and trainer.global_step > 0 and (self.save_last or self.save_top_k):
            self._save(trainer, must_know=False)

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if not self.save_on_exception or trainer.stage != "fit" or trainer.global_step == self.saved_step:
            return
        if trainer.world_size > 1:
            log.warning("no checkpoint is written on an exception with several processes: the others may be anywhere")
        else:
            self._save(trainer, must_know=False)

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        return self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _time_is_up(self, trainer: Trainer) -> bool:
        """Decided by rank 0's clock; asked only now and then, because asking is a collective."""
        assert self.seconds is not None
        if trainer.world_size > 1 and trainer.global_step % trainer.settings.log_every_n_steps:
            return False
        up = trainer.strategy.broadcast_object(time.monotonic() - self._last_time >= self.seconds)
        if up:
            self._last_time = time.monotonic()
        return up

    # -- what ----------------------------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, must_know: bool = True) -> None:
        """Write a checkpoint, then delete those no longer wanted. `must_know`: the monitored value has to be there."""
        metrics = trainer.read_metrics()
        value = metrics.get(self.monitor) if self.monitor is not None else None
        if value is None and self.monitor is not None and must_know:
            raise ConfigError(
                f"ModelCheckpoint monitors {self.monitor!r}, which was not logged.{did_you_mean(self.monitor, metrics)} "
                f"Logged so far: {', '.join(sorted(metrics)) or 'nothing'}."
            )
        name = trainer.strategy.broadcast_object(self._free_name(self._format(trainer, metrics)))
        before = dict(self.kept)
        self.kept[name] = value
        self.last, self.saved_step = name, trainer.global_step
        self.best = self._find_best()
        dropped = self._not_wanted()
        for old in dropped:
            del self.kept[old]
        if name in dropped:
            return
        try:
            trainer.save_checkpoint(self._in_folder(name), {"metrics": metrics})
        except BaseException:
            self.kept, self.last = before, next(reversed(before), None)
            self.best = self._find_best()
            raise
        if trainer.is_global_zero:
            self._settle(name, [old for old in dropped if old != name])
        if self.verbose:
            trainer.print(f"step {trainer.global_step}: saved {self._in_folder(name)}")

    def _settle(self, name: str, dropped: list[str]) -> None:
        """The new checkpoint is committed: point at it, and only then delete others."""
        store = CheckpointStore(self._in_folder("."))
        store.set_pointer("last", name)
        if self.best is not None:
            store.set_pointer("best", self.best)
        for old in dropped:
            if self._in_folder(old).is_dir():
                store.remove(old)

    def _find_best(self) -> str | None:
        known = {name: value for name, value in self.kept.items() if value is not None and value == value}
        if not known:
            return None
        return min(known, key=known.__getitem__) if self.mode == "min" else max(known, key=known.__getitem__)

    def _not_wanted(self) -> list[str]:
        if self.save_top_k == -1:
            return []
        newest_first = list(reversed(self.kept))
        if self.monitor is not None:
            sign = 1 if self.mode == "min" else -1
            known = [name for name in newest_first if (value := self.kept[name]) is not None and value == value]
            wanted = sorted(known, key=lambda name: sign * (self.kept[name] or 0.0))[: self.save_top_k]
        else:
            wanted = newest_first[: self.save_top_k]
        if self.save_last:
            wanted.append(newest_first[0])
        return [name for name in self.kept if name not in wanted]

    def _format(self, trainer: Trainer, metrics: dict[str, float]) -> str:
        values: dict[str, float] = {**metrics, "epoch": trainer.current_epoch, "step": trainer.global_step}

        def fill(match: re.Match[str]) -> str:
            name, form = match[1], match[2] or ""
            if name not in values:
                raise ConfigError(
                    f"ModelCheckpoint(filename={self.filename!r}): {name!r} was not logged.{did_you_mean(name, values)} "
                    f"Known: {', '.join(sorted(values))}."
                )
            text = format(values[name], form)
            return f"{name}={text}" if self.auto_insert_metric_name else text

        return re.sub(FIELD, fill, self.filename).replace("/", "_")

    def _free_name(self, name: str) -> str:
        """The name, with a version if it is taken: an existing checkpoint is never overwritten."""
        candidate, version = name, 1
        while self._in_folder(candidate).exists():
            candidate, version = f"{name}-v{version}", version + 1
        return candidate

    def _in_folder(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self.kept), "best": self.best, "last": self.last, "saved_step": self.saved_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what is still on disk."""
        self.saved_step = state["saved_step"]
        self.kept = {name: value for name, value in state["kept"].items() if self._in_folder(name).is_dir()}
        self.last = state["last"] if state["last"] in self.kept else None
        self.best = self._find_best()


def _check_arguments(
    monitor: str | None, mode: str | None, save_top_k: int, steps: int | None, epochs: int | None, interval: Any
) -> None:
    problems = []
    if sum(trigger is not None for trigger in (steps, epochs, interval)) > 1:
        problems.append(
            "give one of every_n_train_steps, every_n_epochs, train_time_interval; for several add several ModelCheckpoints."
        )
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None and (type(value) is not int or value < 1):
            problems.append(f"{name}={value!r}: give a whole number from 1.")
    if type(save_top_k) is not int or save_top_k < -1:
        problems.append(f"save_top_k={save_top_k!r}: give a number, 0 for none, or -1 for all.")
    if mode not in (None, "min", "max"):
        problems.append(f"mode={mode!r}: allowed are 'min' and 'max'.{did_you_mean(str(mode), ['min', 'max'])}")
    if monitor is None and save_top_k > 1 and mode is not None:
        problems.append("mode without monitor has no meaning: give monitor='val_loss' or the like.")
    if interval is not None and not isinstance(interval, (timedelta, int, float)):
        problems.append(f"train_time_interval={interval!r}: give a timedelta, or seconds.")
    elif interval is not None and (interval.total_seconds() if isinstance(interval, timedelta) else interval) <= 0:
        problems.append(f"train_time_interval={interval!r}: give a time above 0.")
    if monitor is not None and not isinstance(monitor, str):
        problems.append(f"monitor={monitor!r}: give the name of a logged value, such as 'val_loss'.")
    raise_problems(problems, "ModelCheckpoint's arguments")


def _wrong_flags(save_last: Any, dirpath: Any) -> list[str]:
    problems = []
    if not isinstance(save_last, bool):
        problems.append(f"save_last={save_last!r}: give True or False.")
    if not isinstance(dirpath, (str, Path, type(None))):
        problems.append(f"dirpath={dirpath!r}: give a folder.")
    return problems


def _wrong_filename(filename: Any) -> list[str]:
    """What could not be filled in; better known now than when the first checkpoint is written."""
    if filename is None:
        return []
    if not isinstance(filename, str):
        return [f"filename={filename!r}: give a text such as '{{epoch}}-{{val_loss:.2f}}'."]
    if "{" in FIELD.sub("", filename) or "}" in FIELD.sub("", filename):
        return [f"filename={filename!r}: a brace has no partner. Write '{{epoch}}-{{val_loss:.2f}}' or the like."]
    problems = []
    for name, form in FIELD.findall(filename):
        try:
            format(0 if name in ("epoch", "step") else 0.0, form)
        except ValueError as error:
            problems.append(f"filename={filename!r}: {name!r} cannot be written as {form!r} ({error}). Use '.2f'.")
    return problems


def _mode_of(monitor: str) -> Literal["min", "max"]:
    words = re.split(r"[^a-z0-9]+", monitor.lower())
    smaller = any(word.endswith(known) for word in words for known in SMALLER_IS_BETTER)
    larger = any(word.endswith(known) for word in words for known in LARGER_IS_BETTER)
    if smaller == larger:
        raise ConfigError(
            f"ModelCheckpoint(monitor={monitor!r}): it is not clear whether smaller or larger is better. "
            "Give mode='min' or mode='max'."
        )
    return "min" if smaller else "max"
