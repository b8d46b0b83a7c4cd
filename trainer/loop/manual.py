"""Manual optimization: steps in which the module calls backward and steps its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.data.loader import Batch
from trainer.errors import ConfigError
from trainer.loop.accumulation import StepOutputs, checked_loss, outputs_for_hooks, with_loss_divisors
from trainer.loop.run import Run
from trainer.loop.skipping import ends_epoch
from trainer.optimizers import copy_gradients, needs_closure
from trainer.profiling import BACKWARD, FORWARD, OPTIMIZER


def manual_training_step(run: Run, window: list[Batch]) -> StepOutputs:
    """Call `training_step` with the only batch of the window; the module calls `manual_backward` and the optimizers."""
    (batch,), batch_idx = (
        with_loss_divisors(window, run.module, run.strategy, run.weights_loss_by_items),
        run.progress.batch,
    )
    data = run.transfer(batch.data, 0)
    run.metrics.start_batch(data, batch.samples)
    run.manual_loss_divisor = batch.loss_divisor
    run.hooks.on_train_batch_start(data, batch_idx)
    if run.may_end_epochs and ends_epoch(run, 0):
        return None, None, []
    if run.trainable is not None:
        run.trainable.follow()
    steps = run.manual_steps
    with run.phase(FORWARD):
        outputs = run.strategy.call_step("training_step", data, batch_idx)
    if run.manual_steps > steps:
        run.strategy.end_step()
    return outputs_for_hooks(run, outputs), data, []


def manual_backward(run: Run, loss: torch.Tensor) -> None:
    """Run backward for `TrainModule.manual_backward`."""
    if run.module.automatic_optimization:
        raise ConfigError(
            "manual_backward is for automatic_optimization = False: set that in the module's __init__, or return "
            "the loss from training_step and let the trainer do the rest."
        )
    checked_loss(loss, run.module, run.settings.detect_anomaly, "manual_backward got")
    run.metrics.watch_loss(run.progress.step + 1, loss)
    run.manual_backwards += 1
    if run.manual_loss_divisor is not None:
        loss = loss / run.manual_loss_divisor
    run.hooks.on_before_backward(loss)
    with run.phase(BACKWARD):
        run.strategy.backward(loss)
    if run.reuses_memory:  # whether another forward follows before the step is for the module to decide
        copy_gradients(run.module.parameters())
    run.hooks.on_after_backward()


class ManualOptimizer:
    """Wrapper of an optimizer for `training_step`, with `automatic_optimization = False`.

    `step` goes through the strategy (loss scaling, sharding); other attributes are those of the torch optimizer.
    """

    def __init__(self, optimizer: Optimizer, run: Run) -> None:
        self.optimizer = optimizer
        self._run = run

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        """Update this optimizer's parameters. `options`: further arguments of the torch optimizer's `step`."""
        run = self._run
        if run.manual_backwards == 0 and closure is None:
            self._check_first_step()
        run.manual_steps += 1
        if closure is not None and run.strategy.scaler is not None:
            if needs_closure(self.optimizer):
                raise ConfigError(f"{type(self.optimizer).__name__} does not work with loss scaling: use 'bf16-mixed'.")
            closure()  # its gradients are scaled, and the optimizer would use them so
            closure = None
        if closure is None:
            run.strategy.unscale(self.optimizer)
            run.hooks.on_before_optimizer_step(self.optimizer)
        with run.phase(OPTIMIZER):
            run.strategy.step(self.optimizer, closure and partial(self._evaluate, closure), **options)
        # Autocast would give later forwards of this training_step the weights from before.
        torch.clear_autocast_cache()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        self._run.hooks.on_before_optimizer_step(self.optimizer)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this optimizer's parameters."""
        self._run.hooks.on_before_zero_grad(self.optimizer)
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Disable gradients of the other optimizers' parameters within the block.

        `sync_grad=False`: do not reduce gradients over processes yet, because more micro-batches follow.
        """
        with self._run.module.toggled_optimizer(self), self._run.strategy.gradient_sync(last=sync_grad):
            yield

    def _check_first_step(self) -> None:
        """Raise ConfigError for a step before any `manual_backward`: gradients are missing or not reduced."""
        run, kind = self._run, type(self.optimizer).__name__
        if run.module.automatic_optimization:
            raise ConfigError(
                f"{kind}.step() was called, but the trainer steps too: leave it out of training_step, or set "
                "automatic_optimization = False."
            )
        if not any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
            raise ConfigError(f"{kind}.step() found no gradient: call self.manual_backward(loss) before it.")
        if run.strategy.processes.world_size > 1 or run.strategy.scaler is not None:
            raise ConfigError(
                "loss.backward() leaves the gradients unscaled, and different on every process: call "
                "self.manual_backward(loss) instead."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
