"""The range test: train with a growing learning rate, and find where the loss falls fastest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch

from trainer.callback import Callback
from trainer.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer.module import TrainModule
    from trainer.trainer import Trainer

SMOOTHING = 0.98
"""Weight of the former losses in the smoothed loss of a step, as in fastai's and Lightning's finders."""
SKIP_BEGIN, SKIP_END = 10, 1
"""Points at the ends of the curve that a suggestion leaves out."""
ENOUGH = SKIP_BEGIN + SKIP_END + 2
"""Points with which there is a suggestion: two of them have a slope."""


class LRFinder:
    """The curve of a range test.

    Args:
        mode: the learning rates grow by a factor ("exponential") or by an amount ("linear").
        lr_min, lr_max: the first and the last learning rate.
        num_training: the number of steps from one to the other.
    """

    def __init__(self, mode: str, lr_min: float, lr_max: float, num_training: int) -> None:
        self.mode, self.lr_min, self.lr_max, self.num_training = mode, lr_min, lr_max, num_training
        self.results: dict[str, list[float]] = {"lr": [], "loss": []}
        """The learning rates, and the smoothed losses after them."""
        self.stopped = ""
        """The reason for which the test has ended early, with the step and its learning rate."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        part = step / max(1, self.num_training - 1)
        if self.mode == "linear":
            return self.lr_min + part * (self.lr_max - self.lr_min)
        return float(self.lr_min * (self.lr_max / self.lr_min) ** part)

    def lack(self, steps: str = "num_training", low: str = "min_lr", high: str = "max_lr") -> str:
        """Return the reason why there is no suggestion, and what to do.

        Args:
            steps, low, high: the names of these arguments for the user.
        """
        points = len(self.results["lr"])
        if not self.stopped:
            return f"{points} points, too few for a suggestion: raise {steps}, or lower {low}"
        fix = f"lower {low} and {high}, or raise {steps}"
        if not points:
            fix = "no learning rate has acted yet, so look at data and module with Trainer(detect_anomaly=True)"
        return f"{points} points, too few for a suggestion, because {self.stopped}: {fix}"

    def suggestion(self, skip_begin: int = SKIP_BEGIN, skip_end: int = SKIP_END) -> float | None:
        """Return the learning rate at which the loss falls fastest; None if there are too few points.

        Args:
            skip_begin, skip_end: points to leave out at the ends of the curve.
        """
        index = self._steepest(skip_begin, skip_end)
        return None if index is None else self.results["lr"][index]

    def _steepest(self, skip_begin: int = SKIP_BEGIN, skip_end: int = SKIP_END) -> int | None:
        losses = torch.tensor(self.results["loss"], dtype=torch.float64)[
            skip_begin : len(self.results["loss"]) - skip_end
        ]
        if len(losses) < 2:
            return None
        (slopes,) = torch.gradient(losses)
        return int(slopes.argmin()) + skip_begin

    def plot(self, suggest: bool = False, show: bool = False, ax: Any = None) -> Any:
        """Return a figure of matplotlib with the curve.

        Args:
            suggest: mark the suggested learning rate.
            show: show the figure in a window.
            ax: draw here, instead of in a new figure.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise MissingPackageError("matplotlib", "the picture of the learning rates") from error
        figure, ax = pyplot.subplots() if ax is None else (ax.figure, ax)
        ax.plot(self.results["lr"], self.results["loss"])
        if self.mode == "exponential":
            ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_ylabel("smoothed loss")
        index = self._steepest() if suggest else None
        if index is not None:
            ax.plot(self.results["lr"][index], self.results["loss"][index], "o", color="red")
        if show:
            pyplot.show()
        return figure


class RangeTest(Callback):
    """Sets the learning rate of each step, and keeps the smoothed loss.

    Args:
        finder: gets the curve.
        early_stop_threshold: end when the smoothed loss is more than so many times the lowest one, and there are enough
            points for a suggestion, since small batches have such losses at any learning rate; None: do not.
    """

    def __init__(self, finder: LRFinder, early_stop_threshold: float | None) -> None:
        self.finder, self.threshold = finder, early_stop_threshold
        self._average = 0.0
        self._losses: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._set(trainer.global_step, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs is not None:
            self._losses.append(outputs["loss"])

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        own = [float(loss) for loss in self._losses]
        losses = [loss for of_rank in trainer.strategy.processes.all_gather_object(own) for loss in of_rank]
        self._losses.clear()
        step = trainer.global_step
        if losses:
            loss = sum(losses) / len(losses)
            self._average = SMOOTHING * self._average + (1 - SMOOTHING) * loss
            smoothed = self._average / (1 - SMOOTHING**step)
            lr = self.finder.lr_at(step - 1)
            if not math.isfinite(loss):
                self._stop(trainer, f"the loss of step {step}, with learning rate {lr:.3g}, is {loss}")
                return
            self.finder.results["lr"].append(lr)
            self.finder.results["loss"].append(smoothed)
            lowest = min(self.finder.results["loss"])
            enough = len(self.finder.results["loss"]) >= ENOUGH
            if self.threshold is not None and enough and smoothed > self.threshold * lowest:
                self._stop(trainer, f"the loss grows: at step {step}, with learning rate {lr:.3g}, it is {loss:.3g}")
        self._set(trainer.global_step, trainer.optimizers)

    def _stop(self, trainer: Trainer, reason: str) -> None:
        self.finder.stopped = reason
        trainer.stop(reason)

    def _set(self, step: int, optimizers: Iterable[Optimizer]) -> None:
        lr = self.finder.lr_at(step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr


def check_range(
    method: str, min_lr: float, max_lr: float, num_training: int, mode: Literal["exponential", "linear"] | str
) -> None:
    """Raise a ConfigError for arguments with which there is no range test."""
    if method != "fit":
        raise ConfigError(f"lr_find(method={method!r}): a range test trains: leave method out, or give 'fit'.")
    if not 0 < min_lr < max_lr < math.inf:
        raise ConfigError(f"lr_find(min_lr={min_lr!r}, max_lr={max_lr!r}): give 0 < min_lr < max_lr.")
    if type(num_training) is not int or num_training < 2:
        raise ConfigError(f"lr_find(num_training={num_training!r}): give an integer from 2.")
    if mode not in ("exponential", "linear"):
        raise ConfigError(f"lr_find(mode={mode!r}): allowed are 'exponential' and 'linear'.")
