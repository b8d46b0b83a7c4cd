"""The norms of gradients before clipping: as clipping has found them, or measured where nothing clips by norm."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer

from trainer.metrics.metric_log import MetricLog
from trainer.module import TrainModule
from trainer.settings import Settings
from trainer.strategy import Strategy


class GradientNorms:
    """The norms of the window in progress, by optimizer. They are tensors on the device, which nothing reads here."""

    def __init__(self, strategy: Strategy, metrics: MetricLog) -> None:
        self._strategy, self._metrics = strategy, metrics
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        """The window and the norm, by the `id` of an optimizer."""

    def remember(self, optimizer: Optimizer, norm: torch.Tensor | None) -> None:
        """Keep the norm that a strategy has found while it clipped, once per window: later ones are of what is left."""
        if norm is not None and self._kept(optimizer) is None:
            self._known[id(optimizer)] = (self._metrics.window, norm)

    def of(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Return the norm of an optimizer's gradients in this window; None: known after the step only. Collective."""
        if self._kept(optimizer) is None:
            self.remember(optimizer, self._strategy.clip_gradients(optimizer, math.inf, "norm"))
        return self._kept(optimizer)

    def forget(self) -> None:
        """Forget all norms: the numbers of windows begin again where a run goes back to a checkpoint."""
        self._known.clear()

    def _kept(self, optimizer: Optimizer) -> torch.Tensor | None:
        window, norm = self._known.get(id(optimizer), (-1, None))
        return norm if window == self._metrics.window else None


def clipping_finds_it(settings: Settings, module: TrainModule) -> bool:
    """Whether the trainer clips by norm after `on_before_optimizer_step`, and so finds the norm by itself."""
    clips = settings.gradient_clip_val is not None and settings.gradient_clip_algorithm == "norm"
    return clips and module.automatic_optimization and not module.overrides("configure_gradient_clipping")
