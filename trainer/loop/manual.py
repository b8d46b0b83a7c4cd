"""Manual optimization: the module calls backward and steps its optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.data.loader import Batch, Divisor
from trainer.errors import ConfigError
from trainer.loop.run import Run
from trainer.loop.step import checked_loss, divided, outputs_for_hooks
from trainer.optimizers import copy_gradients, needs_closure, parameters_of
from trainer.strategy import DIRECT_BACKWARD, backward_with, has_gradients

log = logging.getLogger("trainer")


class ManualOptimization:
    """A training whose module calls backward and steps its optimizers."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.batches = self.backwards = self.steps = 0
        """Number of calls of `training_step`, of `manual_backward` and of an optimizer's `step`."""
        self._loss_divisor: Divisor = None
        self._wrapped: list[ManualOptimizer] = []
        self._stepped: dict[int, int] = {}
        """The number of backwards until the last step of each optimizer, by its id."""
        self.reached: set[int] = set()
        """The ids of optimizers with gradients of a `manual_backward` since their last `step` or `zero_grad`."""
        self.synced = True
        """False if the last gradients are not reduced over processes yet."""
        self._dtype = torch.get_default_dtype()
        self._in_backward = self._in_step = False
        """True while the trainer itself calls backward, or steps an optimizer."""

    def wait_for(self, optimizer: Optimizer) -> bool:
        """Whether gradients may wait for an optimizer: a backward has followed its last step.

        True, too, if all backwards so far were direct calls of `loss.backward()`, which are not counted.
        """
        return self.backwards == 0 or self.backwards > self._stepped.get(id(optimizer), 0)

    def optimizers(self) -> list[ManualOptimizer]:
        """Return the run's optimizers as `training_step` gets them; empty before the strategy has them."""
        if not self._wrapped:
            self._wrapped = [ManualOptimizer(optimizer, self) for optimizer in self.run.optimizers]
        return self._wrapped

    def training_step(self, window: list[Batch]) -> None:
        """Call `training_step` with the only batch of the window; the module calls `manual_backward` and optimizers."""
        run, (batch,), batch_idx = self.run, window, self.run.progress.batch
        (self._loss_divisor,) = run.step.begin(window)
        data = run.step.begin_batch(batch, 0)
        if run.guards.skipping.epoch_ended:
            return
        self.batches += 1
        steps = self.steps
        with self._refusing_direct_calls():
            outputs = run.step.forward("training_step", data, batch_idx)
        # With loss scaling also after a step left out because its gradients were not finite: the scale has to fall.
        if self.steps > steps or run.strategy.scaler is not None:
            run.strategy.end_step()
        step = run.progress.step + 1
        if run.settings.logs_at(step):  # in gloo, a flush that meets a collective of another size ends the process
            self._check_calls(f"step {step}")
        run.step.outputs, run.step.data = outputs_for_hooks(outputs) if run.hooks.take_outputs else None, data

    def backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        """Run backward for `TrainModule.manual_backward`. `args`, `options`: of `torch.Tensor.backward`."""
        run = self.run
        if run.module.automatic_optimization:
            raise ConfigError(
                "manual_backward is for automatic_optimization = False: set that in the module's __init__, or return "
                "the loss from training_step and let the trainer do the rest."
            )
        checked_loss(loss, run.module, run.settings.detect_anomaly, "manual_backward got")
        with self.outside_forward():
            run.metrics.watch_loss(run.progress.step + 1, loss, self._loss_divisor)
            self.backwards += 1
            loss = divided(loss, self._loss_divisor)
            run.hooks.on_before_backward(loss)
            for optimizer in run.optimizers:
                run.strategy.scale_gradients(optimizer)
            self._in_backward = True
            with backward_with(run.strategy, *args, **options):
                run.step.backward(loss)
            self._in_backward = False
            if run.reuses_memory:  # another forward may follow before the step
                copy_gradients(run.module.parameters())
            self.reached.update(id(optimizer) for optimizer in run.optimizers if has_gradients(optimizer))
            run.hooks.on_after_backward()

    def outside_forward(self) -> AbstractContextManager[Any]:
        """Return the context for work of `training_step` beside the forward, as with automatic optimization."""
        return self.run.strategy.precision.update_context(self.run.strategy.device, self._dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context for a closure that an optimizer calls in its step."""
        return self.run.strategy.precision.forward_context(self.run.strategy.device)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None, **options: Any) -> None:
        """Step an optimizer through the strategy. `options`: further arguments of its `step`."""
        self.steps += 1
        self._stepped[id(optimizer)] = self.backwards
        self.reached.discard(id(optimizer))
        self._in_step = True
        self.run.step.update_alone(optimizer, closure, **options)
        self._in_step = False
        self.run.guards.gradient_norms.mark_stepped(optimizer)

    @contextmanager
    def _refusing_direct_calls(self) -> Iterator[None]:
        """Refuse `loss.backward()` and steps of the torch optimizers in the block, where they would train wrongly.

        All parameters are watched, because such a loss may reach a single one, on which the processes then differ.
        """
        strategy, optimizers = self.run.strategy, self.run.optimizers
        handles: list[Any] = []
        if strategy.scaler is not None or strategy.processes.world_size > 1:
            watched = {p for p in parameters_of(optimizers) if p.requires_grad}
            handles += [p.register_post_accumulate_grad_hook(self._refuse_backward) for p in watched]
        if strategy.scaler is not None or strategy.shards_state:
            handles += [optimizer.register_step_pre_hook(self._refuse_step) for optimizer in optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _refuse_backward(self, parameter: torch.Tensor) -> None:
        if not self._in_backward:
            raise ConfigError(DIRECT_BACKWARD)

    def _refuse_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        if not self._in_step:
            raise ConfigError(
                f"the step of torch's {type(optimizer).__name__} itself would use gradients that are scaled, or leave "
                "out what the strategy does: call the step of self.optimizers(), not that of its `.optimizer`."
            )

    def check_epoch(self) -> None:
        """Check, at an epoch's end, that the module stepped its optimizers, equally often on all processes. Collective.

        Raises:
            ConfigError: the processes called `manual_backward` or `step` different numbers of times: the weights
                differ.
        """
        if self.steps == 0 < self.batches and parameters_of(self.run.optimizers):
            log.warning("training_step stepped no optimizer in an epoch: call self.optimizers().step() in it")
        self._check_calls(f"the end of epoch {self.run.progress.epoch}")

    def _check_calls(self, until: str) -> None:
        calls = f"{self.backwards} times manual_backward and {self.steps} times optimizer.step"
        self.run.strategy.processes.wait_for_all(f"{calls} until {until}")


class ManualOptimizer:
    """Wrapper of an optimizer for `training_step`, with `automatic_optimization = False`.

    `step` goes through the strategy (loss scaling, sharding); all other attributes are the torch optimizer's.
    """

    def __init__(self, optimizer: Optimizer, manual: ManualOptimization) -> None:
        self.optimizer = optimizer
        self._manual, self._run = manual, manual.run
        self._result: Any = None
        """The value that the closure of a step returned."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the torch optimizer, for torch's schedulers and `isinstance`."""
        return type(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this optimizer's parameters; return what `closure` returned first, as torch's do.

        `options`: further arguments of the torch optimizer's `step`.
        """
        run = self._run
        if closure is None and id(self.optimizer) not in self._manual.reached:
            self._check_gradients()
        if closure is not None and run.strategy.scaler is not None:
            if needs_closure(self.optimizer):
                raise ConfigError(f"{type(self.optimizer).__name__} does not work with loss scaling: use 'bf16-mixed'.")
            self._result = closure()  # its gradients are scaled, and the optimizer would use them so
            closure = None
        with self._manual.outside_forward():
            if closure is None:
                run.strategy.unscale(self.optimizer)
                run.guards.gradient_norms.renew(self.optimizer)
                run.hooks.on_before_optimizer_step(self.optimizer)
            self._manual.step(self.optimizer, closure and partial(self._evaluate, closure), **options)
        result, self._result = self._result, None
        return result

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        norms = self._run.guards.gradient_norms
        norms.mark_stepped(self.optimizer)
        with self._manual.forward_context():
            result = closure()
        if self._result is None:
            self._result = result
        norms.renew(self.optimizer)
        self._run.hooks.on_before_optimizer_step(self.optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this optimizer's parameters."""
        self._run.hooks.on_before_zero_grad(self.optimizer)
        self._manual.reached.discard(id(self.optimizer))
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Disable gradients of the other optimizers' parameters within the block.

        `sync_grad=False`: do not reduce gradients over processes yet, because more micro-batches follow.
        """
        self._manual.synced = sync_grad
        with self._run.module.toggled_optimizer(self.optimizer), self._run.strategy.gradient_sync(last=sync_grad):
            yield

    def _check_gradients(self) -> None:
        """Raise ConfigError if the first step has no gradients, or if a gradient was not reduced by the strategy."""
        run, kind = self._run, type(self.optimizer).__name__
        if run.module.automatic_optimization:
            raise ConfigError(
                f"{kind}.step() was called, but the trainer steps too: leave it out of training_step, or set "
                "automatic_optimization = False."
            )
        if not has_gradients(self.optimizer):
            if self._manual.backwards == 0:
                raise ConfigError(f"{kind}.step() found no gradient: call self.manual_backward(loss) before it.")
        elif run.strategy.processes.world_size > 1 or run.strategy.scaler is not None:
            raise ConfigError(
                f"{kind}.step() found gradients that no self.manual_backward(loss) has left since its last step or "
                "zero_grad: set by hand they are unscaled, and different on every process. Call "
                "self.manual_backward(loss) for them, and change what it leaves if need be."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
