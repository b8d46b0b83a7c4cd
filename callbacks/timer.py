"""Timer: measure the time of a run, and stop it when its time is used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from trainer.callback import Callback
from trainer.checkpoint.schema import NUMBER, require
from trainer.settings import read_duration

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

Duration = str | timedelta | dict[str, float] | float

STAGES = ("train", "validate", "test", "predict")


class Timer(Callback):
    """Stop training after `duration`. A resumed run continues to count from the time in its checkpoint.

    Args:
        duration: a `timedelta`, `"DD:HH:MM:SS"`, a dict of `timedelta`'s arguments (`{"hours": 12}`), or seconds. It
            counts all of training, validation included. None: only measure.
        interval: "step": stop after any step; "epoch": only at the end of an epoch.
        verbose: no effect: the reason of a stop is always logged.

    Raises:
        ConfigError: `duration` or `interval` is something else.
    """

    agree_on = ("duration", "interval")

    def __init__(
        self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step", verbose: bool = True
    ) -> None:
        super().__init__()
        self.duration = read_duration(duration)
        self.interval, self.verbose = interval, verbose
        self._before = dict.fromkeys(STAGES, 0.0)
        """Seconds of each stage before the current one: before a resume, and in finished evaluations of this run."""
        self._since: dict[str, float] = {}
        """The stages in progress, with the start of each."""

    # -- to read -------------------------------------------------------------------------------------------------------

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds so far in "train" (with the validation inside it), "validate", "test" or "predict"."""
        running = time.monotonic() - self._since[stage] if stage in self._since else 0.0
        return self._before[stage] + running

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds of training (or what `stage` would have) left, at least 0; None without a duration."""
        return None if self.duration is None else max(0.0, self.duration - self.time_elapsed(stage))

    def start_time(self, stage: str = "train") -> float | None:
        """Return the start of a stage in progress, by `time.monotonic`; None if it is not in progress."""
        return self._since.get(stage)

    def end_time(self, stage: str = "train") -> float | None:
        """Return the present time, by `time.monotonic`, as the end of a stage that is over; None otherwise."""
        return None if stage in self._since or not self.time_elapsed(stage) else time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed": {stage: self.time_elapsed(stage) for stage in STAGES}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require(state_dict, {"elapsed": dict.fromkeys(STAGES, NUMBER)}, "Timer")
        self._before = dict(state_dict["elapsed"])
        now = time.monotonic()
        self._since = dict.fromkeys(self._since, now)

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._before = dict.fromkeys(STAGES, 0.0)
            self._since = {}

    # -- when it runs out ----------------------------------------------------------------------------------------------

    def reason_to_stop(self) -> str | None:
        # Each process reads its own clock; the processes then agree on the step to stop at.
        if self.duration is None or self.time_elapsed("train") < self.duration:
            return None
        return f"the time is used up: {timedelta(seconds=round(self.duration))} of training"

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._begin("train")
        self._stop_if_over(trainer.stop)

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self.interval == "step":
            self._stop_if_over(trainer.stop)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._stop_if_over(trainer.stop)

    def _stop_if_over(self, stop: Callable[[str], None]) -> None:
        if (reason := self.reason_to_stop()) is not None:
            stop(reason)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def _begin(self, stage: str) -> None:
        self._since[stage] = time.monotonic()

    def _end(self, stage: str) -> None:
        self._before[stage] = self.time_elapsed(stage)
        self._since.pop(stage, None)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("train")

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._begin("validate")

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self._end("validate")

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._begin("test")

    def on_test_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("test")

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._begin("predict")

    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end("predict")
