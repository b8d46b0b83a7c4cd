"""Step: what a training calls in each step, bound when it begins, and what the step in progress has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from trainer.data.loader import Batch, Divisor
from trainer.guards.direct_backward import RefusingDirectBackward
from trainer.guards.guards import Guards
from trainer.guards.optimizer_overrides import OverriddenStep, OverriddenZeroGrad
from trainer.loop.accumulation import NO_DIVISOR, loss_divisors
from trainer.loop.callback_list import CallbackList, nothing
from trainer.loop.progress import Progress
from trainer.metrics.metric_log import MetricLog
from trainer.metrics.phases import BACKWARD, FORWARD, OPTIMIZER, during
from trainer.module import TrainModule
from trainer.optimizers import zero_grad_fast
from trainer.settings import Settings
from trainer.strategy import Strategy, inherits


class Training(Protocol):
    """The part of a run that a step needs."""

    module: TrainModule
    strategy: Strategy
    hooks: CallbackList
    optimizers: list[Optimizer]
    metrics: MetricLog
    guards: Guards
    progress: Progress
    closure_needed: bool

    @property
    def settings(self) -> Settings: ...

    def phase(self, name: str) -> Any: ...

    def transfer(self) -> Callable[[Any], Any]: ...


class Step:
    """The calls of a step: of the strategy, of hooks, and of the module's overrides."""

    outputs: Any = None
    """The outputs of the last micro-batch, for `on_train_batch_end`."""
    data: Any = None
    """That micro-batch, on the device."""

    def __init__(self, run: Training) -> None:
        module, strategy, hooks = run.module, run.strategy, run.hooks
        automatic = module.automatic_optimization
        self._run, self._module, self._strategy, self._metrics = run, module, strategy, run.metrics
        self.losses: list[torch.Tensor] = []
        """The losses of the micro-batches as passed to backward, if an optimizer or an override asks for their sum."""
        self.updates = automatic and not run.closure_needed
        """False if the update is part of the step's forward and backward: by the module itself, or in a closure."""
        self.weighs_items = module.overrides("num_items")
        """True if losses are weighted by the items that the module counts."""
        self.divides_loss = self.weighs_items or strategy.processes.readers > 1
        """False if the loss of a window of one micro-batch goes into backward as it is."""
        self.syncs_gradients = not inherits(strategy, "gradient_sync")
        """False if the strategy needs no context for gradients that are incomplete within a window."""

        self.transfer = run.transfer()
        unscaled = automatic and strategy.precision.loss_scaling
        call_step = RefusingDirectBackward(strategy.call_step, run.optimizers) if unscaled else strategy.call_step
        self.forward: Callable[..., Any] = during(run.phase, FORWARD, call_step)
        self.backward: Callable[[torch.Tensor], None] = during(run.phase, BACKWARD, strategy.backward)
        self.backward_with_hooks = _with_hooks(hooks, self.backward)
        self.after_backward = [] if inherits(strategy, "end_window") else [strategy.end_window]
        self._cleared = run.optimizers if automatic else []
        self.zero_grad: Callable[[Optimizer], None] = _in_turn(hooks.on_before_zero_grad, zero_grad_fast)

        clips = run.settings.gradient_clip_val is not None or module.overrides("configure_gradient_clipping")
        looks = [hooks.on_before_optimizer_step, self._clip if clips else nothing]
        unscales = looks != [nothing, nothing] or _unscales_before_steps(strategy, run.optimizers)
        self.prepare_update: Callable[[Optimizer], None] = _in_turn(strategy.unscale if unscales else nothing, *looks)
        self.update_alone: Callable[..., None] = during(run.phase, OPTIMIZER, strategy.step)
        self.update: Callable[[Optimizer], None] = _in_turn(self.prepare_update, self.update_alone)
        ends = strategy.scaler is not None or not inherits(strategy, "end_step")
        self.after_update = [strategy.end_step] if ends else []
        self._bind_overrides(run)

    def _bind_overrides(self, run: Training) -> None:
        """Have the module's overrides of `optimizer_step` and `optimizer_zero_grad` take the place of these calls."""
        overrides_step = self._cleared and self._module.overrides("optimizer_step")
        if overrides_step:
            self.update = OverriddenStep(
                self._module, self._strategy, run.progress, self.prepare_update, self.update_alone, self.losses
            )
        if self._cleared and self._module.overrides("optimizer_zero_grad"):
            override = OverriddenZeroGrad(self._module, run.progress)
            self.zero_grad = _in_turn(run.hooks.on_before_zero_grad, override)
        if overrides_step and self._strategy.scaler is not None:  # the scale may have changed since a step left out
            self.zero_grad = _in_turn(self.zero_grad, self._strategy.scale_gradients)
        if overrides_step or run.closure_needed:
            self.backward_with_hooks = partial(self._remembering, self.backward_with_hooks)

    def begin(self, window: list[Batch], repeated: bool = False) -> Sequence[Divisor]:
        """Begin a step without gradients; return the divisors of its losses.

        Args:
            repeated: a closure runs the same step again.
        """
        self.outputs = self.data = None
        self.losses.clear()
        self._metrics.start_window(window[0].data, window[0].samples, repeated)
        if self._run.guards.buffers is not None:
            self._run.guards.buffers.follow(self._run.progress.step)
        for optimizer in self._cleared:
            self.zero_grad(optimizer)
        if len(window) == 1 and not self.divides_loss:
            return NO_DIVISOR
        return loss_divisors(window, self._module, self._strategy, self.weighs_items)

    def begin_batch(self, batch: Batch, position: int, repeated: bool = False) -> Any:
        """Return a micro-batch of a window on the device, and call its first hook, which may end the epoch.

        Args:
            position: in the window.
            repeated: as for `begin`.
        """
        run, skipping = self._run, self._run.guards.skipping
        if position > 0:
            run.metrics.start_batch(batch.data, batch.samples)
        data = run.metrics.batch = self.transfer(batch.data)
        if not repeated:
            run.hooks.on_train_batch_start(data, run.progress.batch + position)
            if skipping.may_end_epochs and skipping.ends_epoch(position):
                return None
        if position == 0 and run.guards.trainable is not None:
            run.guards.trainable.follow(run.metrics.window)
        return data

    def _clip(self, optimizer: Optimizer) -> None:
        settings = self._run.settings
        value, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
        self._module.configure_gradient_clipping(optimizer, value, algorithm)

    def _remembering(self, backward: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())
        backward(loss)


def _unscales_before_steps(strategy: Strategy, optimizers: list[Optimizer]) -> bool:
    """Whether gradients are unscaled before a step even if nothing looks at them in between."""
    if strategy.scaler is None:
        return not inherits(strategy, "unscale")
    # A fused optimizer unscales in its own kernel; not the shards of DTensors.
    return strategy.shards_state or not all(getattr(one, "_step_supports_amp_scaling", False) for one in optimizers)


def _in_turn(*calls: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes these calls, without those of hooks that nothing overrides."""
    needed = [call for call in calls if call is not nothing]
    if len(needed) < 2:
        return needed[0] if needed else nothing

    def call_each(*args: Any) -> None:
        for call in needed:
            call(*args)

    return call_each


def _with_hooks(hooks: CallbackList, backward: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return the backward with the hooks before and after it."""
    before, after = hooks.on_before_backward, hooks.on_after_backward

    def call(loss: torch.Tensor) -> None:
        before(loss)
        backward(loss)
        after()

    has_hooks = before is not nothing or after is not nothing
    return call if has_hooks else backward
