"""EarlyStopping: end the run when a logged value no longer gets better."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from trainer.arguments import PositiveInt
from trainer.callback import Callback
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.metrics.monitor import log_assumed_mode, not_logged, resolve_mode
from trainer.runs.monitors import refuse_missing_monitors

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


STATE = {
    "best_score": (NUMBER, None),
    "last_score": (NUMBER, None),
    "wait_count": Integer(),
    "place": (None, "train epoch", "validation"),
    "value_step": Integer(-1),
    "stopping_reason": (str, None),
    "stopped_epoch": Integer(),
    "settings": dict,
}


class EarlyStoppingReason(IntEnum):
    """The kinds of reasons to stop."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


REASONS = {
    "better than the threshold": EarlyStoppingReason.STOPPING_THRESHOLD,
    "divergence threshold": EarlyStoppingReason.DIVERGENCE_THRESHOLD,
    "has not improved": EarlyStoppingReason.PATIENCE_EXHAUSTED,
    "is not finite": EarlyStoppingReason.NON_FINITE_METRIC,
}
"""Parts of the messages -> their kinds."""


class EarlyStopping(Callback):
    """Stop the run when `monitor` has not improved in `patience` checks.

    The value is checked after each validation. It is checked after each training epoch if it is known only then (such
    as the mean of a training metric), or if the run does not validate. Each value is checked once.

    Args:
        monitor: name of a logged value.
        min_delta: the smallest change that counts as an improvement is larger than this. If negative, a value that is
            worse by less counts, too.
        patience: checks in a row without improvement before the stop.
        mode: "min" or "max": which values are better. Default: "min". A name for which larger is better (acc, f1, ...)
            needs "max".
        strict: raise an error when `monitor` was not logged. If False, skip such a check, with one warning.
        check_finite: stop when the value is NaN or infinite.
        stopping_threshold: stop when the value is better than this.
        divergence_threshold: stop when the value is worse than this.
        verbose: print each value that is checked.
        log_rank_zero_only: no effect: only rank 0 prints.
        check_on_train_epoch_end: True: check after training epochs only; False: after validations only. Default: as
            described above.

    Raises:
        ConfigError: an argument is not valid; or, at the first check, `monitor` was not logged.
    """

    runs_last: ClassVar[bool] = True
    stops_early = True
    agree_on = (
        *("monitor", "min_delta", "patience", "mode", "strict", "check_finite"),
        *("stopping_threshold", "divergence_threshold", "check_on_train_epoch_end"),
    )

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: PositiveInt = 3,
        verbose: bool = False,
        mode: Literal["min", "max"] | None = None,
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = False,
    ) -> None:
        super().__init__()
        self.monitor = monitor
        self.min_delta = min_delta
        self.patience = patience
        self.mode = resolve_mode(mode, monitor, "EarlyStopping")
        self._unclear_mode = mode is None
        self.strict = strict
        self.check_finite = check_finite
        self.stopping_threshold = stopping_threshold
        self.divergence_threshold = divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.verbose, self.log_rank_zero_only = verbose, log_rank_zero_only
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._best: float | None = None
        self.last_score: float | None = None
        self.stopped_epoch = 0
        """The epoch of the stop; 0 before."""
        self.stopping_reason_message: str | None = None
        """The reason for the stop, as a sentence; None before."""
        self.wait_count = 0
        """Checks in a row without improvement."""
        self._checked_at = {None: None, True: "train epoch", False: "validation"}[self.check_on_train_epoch_end]
        self._value_step = -1
        """The step of the last value that was checked."""
        self._warned = self._has_other_settings = False

    @property
    def state_key(self) -> str:
        return f"EarlyStopping({self.monitor})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_score": self._best,
            "last_score": self.last_score,
            "wait_count": self.wait_count,
            "place": self._checked_at,
            "value_step": self._value_step,
            "stopping_reason": self.stopping_reason_message,
            "stopped_epoch": self.stopped_epoch,
            "settings": {name: getattr(self, name) for name in self.agree_on},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require(state_dict, STATE, self.state_key)
        self._best = state_dict["best_score"]
        self.last_score = state_dict["last_score"]
        self.wait_count = state_dict["wait_count"]
        self._value_step = state_dict["value_step"]
        self.stopping_reason_message = state_dict["stopping_reason"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._has_other_settings = state_dict["settings"] != self.state_dict()["settings"]
        if self.check_on_train_epoch_end is None:
            self._checked_at = state_dict["place"]

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._start_afresh()
            if self._unclear_mode and trainer.is_global_zero:
                log_assumed_mode(self.monitor, "EarlyStopping")

    def reason_to_stop(self) -> str | None:
        return None if self._has_other_settings else self._reason_to_stop()

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        """Stop at once if the run had stopped, and is started again with the same settings."""
        earlier = None if self.stopping_reason_message is None else self.stopped_epoch
        if trainer.run.clock.postponed_stop is None:  # the run continues: the reason in its checkpoint is outdated
            self.stopping_reason_message, self.stopped_epoch = None, 0
        if self.reason_to_stop() is not None:
            self._stop_if_due(trainer)
        if earlier is not None and self.stopping_reason_message is not None:
            self.stopped_epoch = earlier

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.stage == "fit" and not trainer.sanity_checking and self._checked_at != "train epoch":
            self._check(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._checked_at != "validation" and trainer.progress.epoch_ended:
            self._check(trainer, "train epoch")

    def _check(self, trainer: Trainer, checked_at: str) -> None:
        logged = list(trainer.read_metrics())
        measured = trainer.run.values.monitored(self.monitor)
        if measured is None:
            if self.strict:
                refuse_missing_monitors(trainer.run)
            elif not self._warned and not trainer.run.may_still_be_logged(self.monitor):
                self._warned = True
                log.warning("%s This check is skipped (strict=False).", not_logged(self._owner, self.monitor, logged))
        elif measured.step > self._value_step and (measured.kind != "interim" or self._checked_at == "validation"):
            self._checked_at, self._value_step = checked_at, measured.step
            self._take(measured.value)
            if self.verbose:
                trainer.print(f"{self.monitor} = {measured.value:.6g}; best {self._best}")
            self._stop_if_due(trainer)

    def monitor_problems(self, logged: Collection[str], missing: Callable[[str], bool]) -> list[str]:
        return [not_logged(self._owner, self.monitor, logged)] if self.strict and missing(self.monitor) else []

    @property
    def _owner(self) -> str:
        return f"EarlyStopping(monitor={self.monitor!r})"

    def _take(self, score: float) -> None:
        self.last_score = score
        if self._reason_in(score) is not None:
            return  # as in Lightning, a value that ends the run is neither an improvement nor the lack of one
        if self._is_better(score, float(self.best_score), self.min_delta):
            self._best, self.wait_count = score, 0
        else:
            self.wait_count += 1

    def _is_better(self, score: float, than: float, by: float = 0.0) -> bool:
        """Compare as Lightning does, in the dtype of logged values: there, 0.6 is not more than 0.1 above 0.5."""
        value, other = torch.tensor(score, device="cpu"), torch.tensor(than, device="cpu")
        return bool(value + by < other if self.mode == "min" else value - by > other)

    def _stop_if_due(self, trainer: Trainer) -> None:
        reason = self._reason_to_stop()
        if reason is not None:
            self.stopping_reason_message, self.stopped_epoch = reason, trainer.current_epoch
            trainer.stop(reason)

    @property
    def best_score(self) -> torch.Tensor:
        """The best value so far, a 0-dim tensor; infinite before the first check."""
        first = math.inf if self.mode == "min" else -math.inf
        return torch.tensor(first if self._best is None else self._best, device="cpu")

    @property
    def stopping_reason(self) -> EarlyStoppingReason:
        """The kind of the reason: Lightning's enumeration."""
        message = self.stopping_reason_message or ""
        found = (reason for part, reason in REASONS.items() if part in message)
        return next(found, EarlyStoppingReason.NOT_STOPPED)

    def _reason_to_stop(self) -> str | None:
        """Return the reason to stop after the last value; None: there is none."""
        reason = None if self.last_score is None else self._reason_in(self.last_score)
        if reason is None and self.wait_count >= self.patience:
            best = "none" if self._best is None else f"{self._best:.6g}"
            checks = "validation" if self._checked_at == "validation" else "epoch"
            waited = f"{self.wait_count} {checks}{'' if self.wait_count == 1 else 's'}"
            reason = f"early stopping: {self.monitor} has not improved in {waited}; best {best}"
        return reason

    def _reason_in(self, score: float) -> str | None:
        """Return the reason to stop that lies in a value alone."""
        value = f"{self.monitor} = {score:.6g}"
        if self.check_finite and not math.isfinite(score):
            return f"early stopping: {value} is not finite"
        if self.stopping_threshold is not None and self._is_better(score, self.stopping_threshold):
            return f"early stopping: {value} is better than the threshold {self.stopping_threshold:g}"
        if self.divergence_threshold is not None and self._is_better(self.divergence_threshold, score):
            return f"early stopping: {value} is worse than the divergence threshold {self.divergence_threshold:g}"
        return None
