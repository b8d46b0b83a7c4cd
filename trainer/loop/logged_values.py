"""Logged values: read at a flush, remembered with their steps for monitors, and sent to the loggers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trainer.guards.guards import Guards
from trainer.guards.host_times import HostTimes
from trainer.loop.progress import Activity, Clock, Progress
from trainer.metrics.metric_log import MetricLog, ReducedMetrics
from trainer.metrics.monitor import Measured
from trainer.metrics.phases import LOGGING
from trainer.optimizers import TimedScheduler
from trainer.runs.resolved_config import ResolvedConfig

log = logging.getLogger("trainer")

_NEVER = Measured(0.0, -1, "interim")
"""The latest value of a name that was not logged yet."""


@dataclass
class LatestValues:
    """The latest values of all logged names, as of the last flush."""

    all: dict[str, float] = field(default_factory=dict)
    """For callbacks; `monitor=` reads these."""
    logger: dict[str, float] = field(default_factory=dict)
    progress_bar: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)
    """The values of `all`, each with the step at which it was measured."""

    def store(self, values: ReducedMetrics) -> None:
        """Store reduced values for the callbacks, the loggers and the progress bar."""
        self.all.update(values.all)
        self.logger.update(values.logger)
        self.progress_bar.update(values.progress_bar)

    def forget(self) -> None:
        """Forget all values."""
        for values in (self.all, self.logger, self.progress_bar, self.measured):
            values.clear()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the values that the block stores when it ends."""
        stored = (self.all, self.logger, self.progress_bar)
        before = [dict(values) for values in stored]
        yield
        for values, earlier in zip(stored, before, strict=True):
            values.clear()
            values.update(earlier)

    def announce(self, names: Iterable[str]) -> None:
        """Register the names that validations log, before the first real validation."""
        for name in names:
            self.measured.setdefault(name, Measured(0.0, -1, "validation"))

    def forget_validation(self, step: int) -> None:
        """Let the values of a validation after this step belong to no state: the weights have changed since."""
        for name, one in self.measured.items():
            if (one.kind, one.step) == ("validation", step):
                self.measured[name] = one._replace(step=-1)


class LoggedValues:
    """Reads the logged values of a run, and passes them on.

    Args:
        latest: where they are kept; it outlives the run.
        config, metrics, guards, activity, progress, clock, times: of the run.
    """

    _flushed_step = -1
    """The last step whose values went to the loggers."""

    def __init__(
        self,
        config: ResolvedConfig,
        latest: LatestValues,
        metrics: MetricLog,
        guards: Guards,
        activity: Activity,
        progress: Progress,
        clock: Clock,
        times: HostTimes,
    ) -> None:
        self.latest, self._metrics, self._guards, self._activity = latest, metrics, guards, activity
        self._progress, self._clock, self._times = progress, clock, times
        self._strategy, self._loggers, self._every = config.strategy, config.loggers, config.settings.log_every_n_steps
        self._also_trained: set[str] = set()
        """Names with values of validations that are logged in training, too."""
        self._reported = {""}
        """The warnings that were logged."""

    def read(self) -> dict[str, float]:
        """Return all logged values known so far; see `Trainer.read_metrics`. Collective."""
        metrics, counts = self._metrics, self._activity.name != "sanity checking"
        self.update(metrics.read_step())
        if counts and self._activity.evaluating:
            self.send(metrics.read_epoch(metrics.evaluation_hooks))
        if counts and self._progress.epoch_ended:
            self.send(metrics.read_epoch(metrics.hook_metrics))
        else:
            self.update(metrics.peek_epoch(metrics.hook_metrics), complete=False)
        return self.latest.all

    def flush_step(self) -> None:
        """Send the values of the last step to the loggers, once, every `log_every_n_steps`. Collective."""
        step = self._progress.step
        if self._every and step % self._every == 0 and self._flushed_step != step:
            self._flushed_step = step
            self.send(self._metrics.read_step())
            self._metrics.mark_flushed()

    def send(self, values: ReducedMetrics) -> None:
        """Store reduced values and send them to the loggers."""
        self.update(values)
        if values.logger and self._strategy.processes.is_global_zero and not self._clock.is_over:
            with self._metrics.phase(LOGGING), self._times.during(LOGGING):
                for logger in self._loggers:
                    logger.log_metrics(values.logger, self._progress.step)

    def update(self, values: ReducedMetrics, complete: bool = True) -> None:
        """Store reduced values for monitors, the loggers and the progress bar.

        `complete`: False for means over a part of an epoch, which belong to no step.
        """
        self._guards.check_numbers(self._activity.name == "training")
        measured, step = self.latest.measured, self._progress.step
        for name, value in values.all.items():
            kind, latest = values.kinds[name], measured.get(name, _NEVER)
            if not complete or kind == "past":
                measured.setdefault(name, Measured(value, -1, "interim"))
            elif self._activity.name == "validating" and kind == "epoch":
                measured[name] = Measured(value, step, "validation")
            elif latest.kind == "validation":
                self._also_trained.add(name)
            elif kind == "epoch" or (latest.step, latest.kind) != (step, "epoch"):
                measured[name] = Measured(value, step, kind)
        self.latest.store(values)

    def monitored(self, name: str) -> Measured | None:
        """Return the latest value of a logged name; None if it was not logged.

        A name that is logged in training and in validation has the validation's value, and a warning says so.
        """
        if name in self._also_trained:
            self.report_once(
                f"{name!r} is logged in training and in validation, and monitored: its values are those of the "
                "validations. Give the two different names to choose."
            )
        return self.latest.measured.get(name)

    def report_once(self, message: str) -> None:
        """Log a warning, unless it is empty or was logged before in this run."""
        if message not in self._reported:
            self._reported.add(message)
            self._strategy.processes.log.warning("%s", message)

    def new_value(self, config: TimedScheduler) -> float | None:
        """Return the value that a scheduler monitors; None if there is none since its last step. Collective."""
        assert config.monitor is not None
        self.read()
        measured = self.monitored(config.monitor)
        if measured is None or measured.step <= config.value_step:
            return None
        config.value_step = measured.step
        return measured.value

    def forget(self) -> None:
        """Forget all values, before the values of a checkpoint are restored within the run."""
        self.latest.forget()
        self._flushed_step = -1
