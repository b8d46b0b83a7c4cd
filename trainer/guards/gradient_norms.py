"""The norms of gradients before clipping: found by clipping, or measured if nothing clips by norm."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from trainer.metrics.metric_log import MetricLog
from trainer.module import TrainModule
from trainer.settings import Settings
from trainer.strategy import Strategy


class GradientNorms:
    """The norms of the window in progress, by optimizer; of its last step, if it steps several times.

    They are tensors on the device, and are not read here.
    """

    def __init__(self, strategy: Strategy, metrics: MetricLog) -> None:
        self._strategy, self._metrics = strategy, metrics
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        """The window and the norm, by the `id` of an optimizer."""
        self._stepped: set[int] = set()
        """The ids of optimizers that have made the step of their norm."""

    def remember(self, optimizer: Optimizer, norm: torch.Tensor | None) -> None:
        """Keep the norm that clipping has found, once per step: a later one is the norm of clipped gradients."""
        self.renew(optimizer)
        if self._kept(optimizer) is None:
            self._keep(optimizer, norm)

    def mark_stepped(self, optimizer: Optimizer) -> None:
        """Keep the norm for the hooks that follow, until the optimizer begins another step in this window."""
        self._stepped.add(id(optimizer))

    def renew(self, optimizer: Optimizer) -> None:
        """Forget the norm of an optimizer that has stepped, because another step begins."""
        if id(optimizer) in self._stepped:
            self._stepped.discard(id(optimizer))
            self._known.pop(id(optimizer), None)

    def of(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Return the norm of an optimizer's gradients in this window; None: known after the step only. Collective."""
        if self._kept(optimizer) is None:
            self._keep(optimizer, self._strategy.clip_gradients(optimizer, math.inf, "norm"))
        return self._kept(optimizer)

    def forget(self) -> None:
        """Forget all norms: the numbers of windows begin again where a run goes back to a checkpoint."""
        self._known.clear()
        self._stepped.clear()

    def _keep(self, optimizer: Optimizer, norm: torch.Tensor | None) -> None:
        if norm is not None:
            self._known[id(optimizer)] = (self._metrics.window, norm)

    def _kept(self, optimizer: Optimizer) -> torch.Tensor | None:
        window, norm = self._known.get(id(optimizer), (-1, None))
        return norm if window == self._metrics.window else None


def clipping_finds_it(settings: Settings, module: TrainModule) -> bool:
    """Whether the trainer finds the norm when it clips by norm, after `on_before_optimizer_step`."""
    clips = settings.gradient_clip_val is not None and settings.gradient_clip_algorithm == "norm"
    return clips and module.automatic_optimization and not module.overrides("configure_gradient_clipping")
