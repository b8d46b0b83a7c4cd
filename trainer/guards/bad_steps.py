"""Refuse steps whose loss or gradients are not finite, or whose loss is far above the last ones, on all processes."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from trainer.callback import StepGuard
from trainer.data.loader import NO_ITEMS, Batch, Divisor, Loaders
from trainer.errors import TrainerError
from trainer.guards.gradient_norms import GradientNorms
from trainer.metrics.metric_log import MetricLog
from trainer.metrics.reductions import to_host
from trainer.model.weights import saved_buffers
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.loop.progress import Progress

LEAST_LOSSES = 10
"""Losses of good steps before a loss is compared with them."""
LEAST_SPREAD = 0.05
"""The least standard deviation of losses that counts, as a part of their mean: a loss may be nearly constant."""


class BadStep(NamedTuple):
    """A step that was refused."""

    step: int
    """The steps done before it."""
    epoch: int
    batch: int
    """The number of its first micro-batch in the epoch."""
    batches: int
    reason: str
    samples: list[Any]
    """Indices of the samples in the micro-batches of each reader; None where the loader does not say them."""


class LossWindow:
    """The losses of the last good steps, and the limit for the next one.

    Args:
        size: the number of losses that are kept.
        z_score: the number of standard deviations above the mean that a loss may be; None: no limit.
    """

    def __init__(self, size: int, z_score: float | None) -> None:
        self.losses: deque[float] = deque(maxlen=size)
        self._z_score = z_score

    def limit(self) -> float:
        """Return the largest loss that is not a spike; infinite while there are too few losses."""
        if self._z_score is None or len(self.losses) < min(LEAST_LOSSES, self.losses.maxlen or 0):
            return math.inf
        mean = sum(self.losses) / len(self.losses)
        spread = math.sqrt(sum((loss - mean) ** 2 for loss in self.losses) / len(self.losses))
        return mean + self._z_score * max(spread, LEAST_SPREAD * abs(mean))


class KeptBuffers:
    """The values of a module's buffers at the start of a step: a forward changes them before its loss is known.

    Only buffers in the `state_dict` are kept. A buffer is copied again if a step has changed it; statistics of norms
    are copied in each step, because torch's kernels change them without counting a version.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(owner, name) for _, owner, name in saved_buffers(module)]
        self._kept: dict[tuple[nn.Module, str], tuple[torch.Tensor, int, torch.Tensor]] = {}
        """The buffer in each place, its version, and a copy of its values."""

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers that may have changed since they were last copied."""
        copies, values = [], []
        for place in self._places:
            owner, name = place
            buffer, kept = owner._buffers[name], self._kept.get(place)
            if buffer is None:
                self._kept.pop(place, None)
            elif kept is None or kept[0] is not buffer:
                self._kept[place] = (buffer, buffer._version, buffer.detach().clone())
            elif kept[1] != buffer._version or isinstance(owner, _NormBase):
                self._kept[place] = (buffer, buffer._version, kept[2])
                copies.append(kept[2])
                values.append(buffer)
        if copies:
            torch._foreach_copy_(copies, values)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back the values that were kept."""
        for (owner, name), (buffer, version, values) in self._kept.items():
            setattr(owner, name, buffer)
            if buffer._version != version or isinstance(owner, _NormBase):
                buffer.copy_(values)


class BadSteps:
    """Judges the steps of a training by their losses and gradients.

    A loss that is not finite or too large is made NaN before the backward, on the device. The sum of the gradients
    carries the NaN to all processes, and their norm is read once per step: there is no other communication.

    Args:
        strategy, progress, metrics, norms, loaders: of the run.
        guard: holds this reader's losses, and the places of steps to leave out.
        measures: the norm has to be measured, because clipping does not find it.
    """

    def __init__(
        self,
        strategy: Strategy,
        progress: Progress,
        metrics: MetricLog,
        norms: GradientNorms,
        loaders: Loaders,
        guard: StepGuard,
        measures: bool,
    ) -> None:
        self._strategy, self._progress, self._metrics = strategy, progress, metrics
        self._norms, self._loaders, self._window, self._left_out = norms, loaders, guard.losses, guard.left_out
        self._losses: list[torch.Tensor] = []
        self.refused = 0
        """Number of steps that were bad."""
        self._measures, self._limit = measures, math.inf
        self._buffers = KeptBuffers(strategy.module)
        loaders.keep_indices()
        metrics.ignore_losses()  # they are judged here

    def leaves_out(self) -> bool:
        """Whether the next window is left out, because it was bad before the run went back.

        If not, a step begins, whose logged values count only if it is good.
        """
        if (self._progress.epoch, self._progress.batch) in self._left_out:
            return True
        self._losses.clear()
        self._limit = self._window.limit()
        self._buffers.keep()
        self._metrics.hold()
        return False

    def watch(self, loss: torch.Tensor, divisor: Divisor) -> torch.Tensor:
        """Return the loss of a micro-batch, times NaN if it is bad. Reads nothing from the device.

        Args:
            divisor: of the loss; infinite for a batch without items, whose loss is not judged.
        """
        if divisor is NO_ITEMS:
            return loss
        self._losses.append(loss.detach())
        good = torch.isfinite(loss) & (loss <= self._limit)
        return loss * torch.where(good, 1.0, math.nan)

    def measure(self, optimizer: Optimizer) -> None:
        """Measure gradients if clipping changes them without finding their norm: by value, or in the module's code."""
        if self._measures:
            self._strategy.unscale(optimizer)
            self._norms.of(optimizer)

    def accept(self) -> None:
        """Accept a step that changes nothing, because the module has skipped all its batches."""
        self._metrics.release(keep=True)

    def knows_norms(self, optimizers: list[Optimizer]) -> bool:
        """Whether the norms are known before the step; if not, the strategy's step refuses infinite ones and NaN."""
        return all(self._norms.of(optimizer) is not None for optimizer in optimizers)

    def judge(self, optimizers: list[Optimizer], window: list[Batch]) -> BadStep | None:
        """Return the step if it is bad, on all processes; keep its losses and logged values if it is good.

        A bad step's values are held back until `drop_values`, because its last hook may log more. Collective for a bad
        step.
        """
        norms = [norm for optimizer in optimizers if (norm := self._norms.of(optimizer)) is not None]
        numbers = to_host([*norms, *self._losses])
        of_gradients, losses = numbers[: len(norms)], numbers[len(norms) :]
        bad = None if all(map(math.isfinite, of_gradients)) else self._describe(of_gradients, losses, window)
        if bad is None:
            self._window.losses.extend(loss for loss in losses if loss <= self._limit)
            self._metrics.release(keep=True)
        else:
            self.refused += 1
            self._buffers.restore()
        return bad

    def drop_values(self) -> None:
        """Drop what was logged in a bad step and in its hooks."""
        self._metrics.release(keep=False)

    def _describe(self, norms: list[float], losses: list[float], window: list[Batch]) -> BadStep | None:
        """Return the bad step; None with loss scaling for gradients that only overflow. Collective."""
        progress, processes = self._progress, self._strategy.processes
        loader = self._loaders.train
        assert loader is not None
        samples = [loader.indices(progress.epoch, progress.batch + n) for n in range(len(window))]
        everywhere = processes.gather_reports((self._reason(losses), samples))
        found = [f"{words} on reader {reader}" for reader, (words, _) in enumerate(everywhere) if words]
        if not found and self._strategy.scaler is not None:
            return None
        return BadStep(
            progress.step,
            progress.epoch,
            progress.batch,
            len(window),
            "; ".join(found) or f"the norm of the gradients is {next(n for n in norms if not math.isfinite(n))}",
            [None if None in of_one else of_one for _, of_one in everywhere],
        )

    def _reason(self, losses: list[float]) -> str:
        """Return the problem of this reader's first bad loss; empty without one."""
        bad = [loss for loss in losses if not loss <= self._limit or not math.isfinite(loss)]
        return f"the loss is {bad[0]:.6g} (limit {self._limit:.6g})" if bad else ""


def explain(bad: BadStep) -> str:
    """Return the message for a bad step."""
    return (
        f"the step after step {bad.step} is bad: {bad.reason} (epoch {bad.epoch}, batches {bad.batch} to "
        f"{bad.batch + bad.batches - 1}, samples {str(bad.samples)[:300]})"
    )


class BadStepError(TrainerError):
    """A step was bad, and is not to be skipped."""
