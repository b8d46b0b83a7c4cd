"""The search for a learning rate: a range test finds where the loss falls, and constant rates near it are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from trainer.callback import Callback
from trainer.errors import ConfigError, require_package
from trainer.names.paths import answer_further_names

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer.module import TrainModule
    from trainer.trainer import Trainer

FACTOR = math.sqrt(10)
"""From one constant rate to the next."""
SURE = 3.0
"""Standard errors that a fall of the loss has to exceed, so that it is not chance."""
MARGIN = 2.0
"""Standard errors that comparisons subtract from a fall, because a rate should also be stable."""
ALMOST = 0.75
"""The part of the largest fall that a lower rate has to reach: a longer training will reach all of it."""
ROUNDING = 1e-5
"""The part of the loss up to which a fall may be an effect of rounding."""
LEAST_STEPS = 20
"""Steps of a training with a constant rate, at least."""
MOST_RATES = 8
"""Constant rates that are tried one below the other while none has a fall."""

Losses = list[float | None]
"""The loss of each step; None: it has skipped its batches."""
Attempt = Callable[["Rates"], Losses]
"""Trains from the same weights on the same batches as each other attempt."""


class Fall(NamedTuple):
    """The difference between the losses of the first weights and of a training, on the same batches."""

    mean: float
    error: float
    """The standard error of the mean."""

    @property
    def least(self) -> float:
        """The fall without its margin."""
        return self.mean - MARGIN * self.error


class LRFinder:
    """The curve of a range test, and the learning rate that was found.

    The loss of each step is compared with the loss of the first weights on the same batch, so that the difference does
    not depend on the batches. The range test, whose rate grows from step to step, finds the rate with the lowest loss.
    Trainings with constant rates above and below it show which rates last. The suggestion is the geometric mean of the
    rate with the largest sure fall and the lowest rate that falls almost as far.

    Args:
        mode: the learning rates grow by a factor ("exponential") or by an amount ("linear").
        lr_min, lr_max: the first and the last learning rate.
        num_training: the number of steps from one to the other.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        """The learning rates, and their smoothed losses, without the differences between batches."""
        self.falls: dict[float, Fall] = {}
        """The fall of the loss at each constant learning rate."""
        self.stopped = ""
        """The reason why there is no suggestion, or why a better one may be outside of the range; else ""."""
        self._found: float | None = None

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step of the range test, from 0."""
        part = step / max(1, self.num_training - 1)
        if self.mode == "linear":
            return self.lr_min + part * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** part)

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return a learning rate that trains; None if the loss falls at none, see `stopped`.

        Args:
            skip_begin, skip_end: without effect, since the suggestion is not a point of the curve.
        """
        return self._found

    # -- the search ----------------------------------------------------------------------------------------------------

    def search(self, attempt: Attempt, early_stop_threshold: float | None) -> None:
        """Find the learning rate.

        Args:
            attempt: trains with `Rates`, and returns their losses.
            early_stop_threshold: end the range test when the smoothed loss is so many times the lowest; None: do not.
                A negative loss has to rise by as much as a positive loss of the same size.
        """
        steps = self.num_training
        start = attempt(Rates([0.0] * steps))
        known = [loss for loss in start if loss is not None]
        if not known or not math.isfinite(known[-1]):
            self.stopped = (
                f"no descent seen: the loss of step {len(start)} is {start[-1]} (None: all steps skip their "
                "batches) before any learning rate has acted: look at data and module with Trainer(detect_anomaly=True)"
            )
            return
        level = fmean(known)

        def explodes(losses: Losses) -> bool:
            if early_stop_threshold is None:
                return False
            curve = smoothed(differences(losses, start))
            lowest = level + min(curve)
            size = lowest if lowest > 0 else max(abs(level), abs(lowest))  # of a likelihood, a similarity
            return curve[-1] - min(curve) > (early_stop_threshold - 1) * size

        rates = Rates([self.lr_at(step) for step in range(steps)], explodes)
        changes = differences(attempt(rates), start)
        curve = smoothed(changes)
        self.results["lr"] = [rate for rate, change in zip(rates.rates, changes, strict=False) if math.isfinite(change)]
        self.results["loss"] = [level + change for change in curve]
        if not any(changes):
            self.stopped = "no descent seen: the loss is the same with each learning rate"
            return
        best = self.results["lr"][curve.index(min(curve))] if curve else self.lr_min
        # The second time, for losses that vary much, with trainings that are four times as long.
        for length in (max(steps // 2, LEAST_STEPS), max(2 * steps, 4 * LEAST_STEPS)):
            if len(start) < length:
                start = attempt(Rates([0.0] * length))
            best = self._climb(attempt, start[:length], best)
            fall = self.falls[best]
            if fall.mean > max(SURE * fall.error, ROUNDING * abs(level)):
                self._found = math.sqrt(best * self._lowest(attempt, start[:length], best))
                if best * FACTOR > self.lr_max:
                    self.stopped = f"the loss falls furthest at {best:.3g}, where the range ends: try a higher max_lr"
                return
        self.stopped = (
            f"no descent seen: at no learning rate from {self.lr_min:.3g} to {self.lr_max:.3g} the loss falls by more "
            "than it varies from step to step. Give larger batches, more num_training, or another range"
        )

    def _climb(self, attempt: Attempt, start: Losses, rate: float) -> float:
        """Return the constant rate with the largest sure fall: near `rate`, or below it where the loss rises."""
        self.falls = {}

        def least(rate: float) -> float:
            return self._fall(attempt, start, rate).least

        while least(rate) > 0 and least(rate * FACTOR) > least(rate):
            rate *= FACTOR
        while least(rate / FACTOR) > least(rate) or (
            least(rate) <= 0 and rate / FACTOR >= self.lr_min and len(self.falls) < MOST_RATES
        ):
            rate /= FACTOR
        return max(self.falls, key=least)

    def _lowest(self, attempt: Attempt, start: Losses, best: float) -> float:
        """Return the lowest of the rates below the best that fall almost as far."""
        lowest, enough = best, ALMOST * self.falls[best].least
        while self._fall(attempt, start, lowest / FACTOR).least >= enough:
            lowest /= FACTOR
        return lowest

    def _fall(self, attempt: Attempt, start: Losses, rate: float) -> Fall:
        """Return the fall in the second half of a training with a constant rate."""
        if not self.lr_min * 0.99 <= rate <= self.lr_max * 1.01:
            return Fall(-math.inf, 0.0)
        known = next((one for one in self.falls if math.isclose(one, rate, rel_tol=0.01)), None)
        if known is not None:
            return self.falls[known]
        losses = attempt(Rates([rate] * len(start)))
        changes = differences(losses[len(start) // 2 :], start[len(start) // 2 :])
        whole = len(losses) == len(start) and len(changes) > 1 and all(map(math.isfinite, changes))
        error = stdev(changes) / math.sqrt(len(changes)) if whole else 0.0
        self.falls[rate] = Fall(-fmean(changes) if whole else -math.inf, error)
        return self.falls[rate]

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return a figure of matplotlib with the curve.

        Args:
            suggest: mark the suggested learning rate.
            show: show the figure in a window.
            ax: draw here, instead of in a new figure.
        """
        require_package("matplotlib", "the picture of the learning rates")
        from matplotlib import pyplot

        figure, ax = pyplot.subplots() if ax is None else (ax.figure, ax)
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("smoothed loss")
        if suggest and self._found is not None:
            found = self._found
            index = min(range(len(self.results["lr"])), key=lambda one: abs(math.log(self.results["lr"][one] / found)))
            ax.plot(found, self.results["loss"][index], "o", color="red")
        if show:
            pyplot.show()
        return figure


def differences(losses: Losses, start: Losses) -> list[float]:
    """Return the rise of each loss from the loss at the start, for steps that have both."""
    return [one - other for one, other in zip(losses, start, strict=False) if one is not None and other is not None]


def smoothed(changes: Sequence[float]) -> list[float]:
    """Return the median of each change and the changes before it; changes that are not finite are left out."""
    finite = [change for change in changes if math.isfinite(change)]
    width = max(3, len(changes) // 20)
    return [median(finite[max(0, last - width) : last + 1]) for last in range(len(finite))]


class Rates(Callback):
    """Gives each step of a training its own learning rate, and keeps its loss, the mean of all processes.

    Args:
        rates: of the steps.
        ends: called with the losses so far after each step; True, or a loss that is not finite, ends the training.
    """

    def __init__(self, rates: list[float], ends: Callable[[Losses], bool] | None = None) -> None:
        self.rates, self._ends = rates, ends
        self.losses: Losses = []
        self._of_step: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._set(trainer.global_step, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs:  # a skipped batch has none
            self._of_step.append(outputs["loss"])

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        own = [float(loss) for loss in self._of_step]
        losses = [loss for of_rank in trainer.strategy.processes.all_gather_object(own) for loss in of_rank]
        self._of_step.clear()
        loss = fmean(losses) if losses else None
        self.losses.append(loss)
        if loss is not None and (not math.isfinite(loss) or (self._ends is not None and self._ends(self.losses))):
            trainer.stop(f"the loss is {loss}")
        self._set(trainer.global_step, trainer.optimizers)

    def _set(self, step: int, optimizers: Iterable[Optimizer]) -> None:
        lr = self.rates[min(step, len(self.rates) - 1)]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr


def check_range(
    method: str, min_lr: float, max_lr: float, num_training: int, mode: Literal["exponential", "linear"] | str
) -> None:
    """Raise a ConfigError for arguments that allow no range test."""
    numbers_fit = 0 < min_lr < max_lr < math.inf and num_training >= 2
    if not numbers_fit or method != "fit" or mode not in ("exponential", "linear"):
        raise ConfigError(
            f"lr_find({method=}, {mode=}, {min_lr=}, {max_lr=}, {num_training=}): the method is 'fit', the mode "
            "'exponential' or 'linear'. Give 0 < min_lr < max_lr, and at least 2 steps."
        )


answer_further_names(__name__)
