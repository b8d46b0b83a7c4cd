"""GradNormMonitor: log the norms of gradients, weights and updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer.callback import Callback
from trainer.callbacks.lr_monitor import named_optimizers
from trainer.loop.gradient_norms import clipping_finds_it
from trainer.strategy import own_parameters, total_norm

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer.module import TrainModule
    from trainer.settings import Settings
    from trainer.strategy import Strategy
    from trainer.trainer import Trainer


class GradNormMonitor(Callback):
    """Log the global norm of the gradients before clipping, and the norms of the weights and of their last update.

    `grad_norm` is logged in every step. Where the trainer clips by norm, it is the norm that clipping has found; under
    DeepSpeed that of the engine; elsewhere it takes a pass over the gradients. With several optimizers it is that of
    all their gradients, and `grad_norm/<name>` that of each; names are those of `LearningRateMonitor`, which logs the
    learning rates of the parameter groups.

    `weight_norm` and `update_norm` are logged in the first step and every `log_every_n_steps`. Under sharding that is a
    sum over processes, and for `update_norm` in that step a copy of the weights that this process holds.

    Args:
        weight_norm: log the norm of the trained parameters after the step.
        update_norm: log the norm of the difference that the step has made to them.
    """

    agree_on = ("weight_norm", "update_norm")

    def __init__(self, weight_norm: bool = True, update_norm: bool = True) -> None:
        self.weight_norm = weight_norm
        self.update_norm = update_norm
        self._norms: dict[int, torch.Tensor] = {}
        self._before: list[torch.Tensor] | None = None

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._norms, self._before = {}, None

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        if self.update_norm and self._before is None and measured(trainer.settings, trainer.global_step + 1):
            self._before = [weight.local.clone() for weight in own_parameters(trainer.strategy)]
        if not clipping_finds_it(trainer.settings, module):
            norm = trainer.gradient_norm(optimizer)
            if norm is not None:
                self._norms[id(optimizer)] = norm

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        norms = self._of_gradients(trainer)
        if measured(trainer.settings, trainer.global_step):
            norms |= self._of_weights(trainer.strategy)
        for name, norm in norms.items():
            # The largest of equal values is that value to the last bit; a mean need not be.
            trainer.log(name, norm, weight=1, on_step=True, on_epoch=False, reduce_fx="max")

    def _of_gradients(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        norms = {}
        for name, optimizer, _ in named_optimizers(trainer.optimizers, trainer.scheduler_configs):
            norm = self._norms.pop(id(optimizer), None)
            if norm is None and trainer.module.automatic_optimization:
                norm = trainer.gradient_norm(optimizer)
            if norm is not None:
                norms[f"grad_norm/{name.removeprefix('lr-')}"] = norm
        if not norms:
            return {}
        total = torch.linalg.vector_norm(torch.stack([*norms.values()]))
        return {**(norms if len(norms) > 1 else {}), "grad_norm": total}

    def _of_weights(self, strategy: Strategy) -> dict[str, torch.Tensor]:
        """Return the norms of the weights and of their update, and free the copy of before."""
        norms, before, self._before = {}, self._before, None
        weights = own_parameters(strategy) if self.weight_norm or before is not None else []
        if self.weight_norm:
            norms["weight_norm"] = total_norm(strategy, weights)
        if before is not None:
            changes = torch._foreach_sub([weight.local for weight in weights], before)
            updates = [weight._replace(local=change) for weight, change in zip(weights, changes, strict=True)]
            norms["update_norm"] = total_norm(strategy, updates)
        return norms


def measured(settings: Settings, step: int) -> bool:
    """Whether the norms of weights and updates are logged after this step."""
    return step == 1 or settings.logs_at(step)
