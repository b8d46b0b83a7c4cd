"""A module's overrides of `optimizer_step` and `optimizer_zero_grad`, bound when a run starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainer.module import TrainModule
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.loop.progress import Progress

OF_STEP = ("optimizer_step", "optimizer_zero_grad")
"""The methods that are called in place of the trainer's own, with automatic optimization."""


class SteppedOptimizer:
    """The optimizer that an override of `optimizer_step` gets; its other attributes are torch's.

    `step` clips and steps through the strategy, and returns the closure's result: the loss, computed already.
    """

    def __init__(self, optimizer: Optimizer, prepare: Callable[[Optimizer], None], step: Callable[..., None]) -> None:
        self.optimizer = optimizer
        self._prepare, self._step = prepare, step
        self.stepped = False

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this optimizer's parameters. `options`: further arguments of the torch optimizer's `step`."""
        loss = None if closure is None else closure()
        self.stepped = True
        self._prepare(self.optimizer)
        self._step(self.optimizer, **options)
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class OverriddenStep:
    """Calls a module's `optimizer_step`, as `run.step.update`.

    Args:
        prepare: calls the hook before a step, and clips.
        step: steps through the strategy.
        losses: the list of the losses of the window in progress.
    """

    def __init__(
        self,
        module: TrainModule,
        strategy: Strategy,
        progress: Progress,
        prepare: Callable[[Optimizer], None],
        step: Callable[..., None],
        losses: Sequence[torch.Tensor],
    ) -> None:
        self.module, self.strategy, self.progress = module, strategy, progress
        self._prepare, self._step, self._losses = prepare, step, losses

    def __call__(self, optimizer: Optimizer) -> None:
        """Call the module's `optimizer_step`, which may step an optimizer or not."""
        losses = self._losses
        batch_idx = self.progress.batch + max(1, len(losses)) - 1
        given = SteppedOptimizer(optimizer, self._prepare, self._step)
        self.module.optimizer_step(
            self.progress.epoch, batch_idx, given, lambda: torch.stack([*losses]).sum() if losses else None
        )
        if not given.stepped:
            self.strategy.unscale(optimizer)  # with loss scaling, whose `update` counts on it


class OverriddenZeroGrad:
    """Calls a module's `optimizer_zero_grad`, as `run.step.zero_grad`."""

    def __init__(self, module: TrainModule, progress: Progress) -> None:
        self.module, self.progress = module, progress

    def __call__(self, optimizer: Optimizer) -> None:
        """Call the module's `optimizer_zero_grad`, which may clear the gradients of an optimizer or not."""
        self.module.optimizer_zero_grad(self.progress.epoch, self.progress.batch, optimizer)
