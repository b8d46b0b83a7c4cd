"""GradNormMonitor: log the norms of gradients, weights and updates."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from trainer.callbacks.lr_monitor import ValueMonitor, group_names, named_optimizers
from trainer.guards.gradient_norms import clipping_finds_it
from trainer.strategy import OwnParameter, own_parameters, total_norm

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer.module import TrainModule
    from trainer.settings import Settings
    from trainer.trainer import Trainer


class GradNormMonitor(ValueMonitor):
    """Log the global norm of the gradients before clipping, and the norms of the weights and of their last update.

    `grad_norm` is logged in every step. It is the norm measured by clipping (or by DeepSpeed's engine), or else takes
    a pass over the gradients. With several optimizers it covers the gradients of all optimizers that stepped, and
    `grad_norm/<name>` is each optimizer's norm in its last step of a batch, under the name that `LearningRateMonitor`
    gives it.

    `weight_norm` and `update_norm` are logged in the first step and every `log_every_n_steps`. In these steps, sharded
    weights take a sum over the processes, and `update_norm` takes a copy of the weights that this process holds.

    With several parameter groups these steps also log the three norms of each group, under the name of its learning
    rate: `grad_norm/AdamW/pg1`, or `grad_norm/AdamW/body` for a group with a `"name"`. DeepSpeed's engine holds the
    gradients, so its groups have no `grad_norm`.

    Args:
        weight_norm: log the norm of the trained parameters after the step.
        update_norm: log the norm of the change that the step made to them.
    """

    agree_on = ("weight_norm", "update_norm")

    def __init__(self, weight_norm: bool = True, update_norm: bool = True) -> None:
        self.weight_norm = weight_norm
        self.update_norm = update_norm
        self._norms: dict[int, torch.Tensor] = {}
        self._of_groups: dict[str, torch.Tensor] = {}
        """Norms of the gradients of each parameter group in this step."""
        self._before: list[torch.Tensor] | None = None
        self._groups: dict[tuple[int, int], list[list[str]]] = {}
        """The parameters of each group, by the `id` of the optimizer and the number of its groups."""

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._norms, self._of_groups, self._before, self._groups = {}, {}, None, {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainModule, optimizer: Optimizer) -> None:
        if measured(trainer.settings, trainer.global_step + 1):
            if self.update_norm and self._before is None:
                self._before = [weight.local.clone() for weight in own_parameters(trainer.strategy)]
            self._measure_groups(trainer, optimizer)
        if not clipping_finds_it(trainer.settings, pl_module):
            norm = trainer.gradient_norm(optimizer)
            if norm is not None:
                self._norms[id(optimizer)] = norm

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        norms = self._gradient_norms(trainer)
        if measured(trainer.settings, trainer.global_step):
            norms |= self._of_groups | self._weight_norms(trainer)
        self._of_groups = {}
        for name, norm in norms.items():
            self.log_own(trainer, name, norm)

    def _gradient_norms(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        norms = {}
        for name, optimizer in self._named(trainer):
            norm = self._norms.pop(id(optimizer), None)
            if norm is None and trainer.module.automatic_optimization:
                norm = trainer.gradient_norm(optimizer)
            if norm is not None:
                norms[f"grad_norm/{name}"] = norm
        if not norms:
            return {}
        total = torch.linalg.vector_norm(torch.stack([*norms.values()]))
        return {**(norms if len(trainer.optimizers) > 1 else {}), "grad_norm": total}

    def _weight_norms(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """Return the norms of the weights and of their update, and free the copy of before."""
        before, self._before = self._before, None
        norms: dict[str, torch.Tensor] = {}
        if not self.weight_norm and before is None:
            return norms
        weights, groups = own_parameters(trainer.strategy), self._named_groups(trainer)

        def measure(key: str, parameters: list[OwnParameter]) -> None:
            norms[key] = total_norm(trainer.strategy, parameters)
            for name, members in groups.items():
                of_group = [one for one in parameters if one.name in members]
                norms[f"{key}/{name}"] = total_norm(trainer.strategy, of_group)

        if self.weight_norm:
            measure("weight_norm", weights)
        if before is not None:
            changes = torch._foreach_sub([weight.local for weight in weights], before)
            measure("update_norm", [w._replace(local=change) for w, change in zip(weights, changes, strict=True)])
        return norms

    def _measure_groups(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Keep the norms of the gradients of the optimizer's groups, if there are several."""
        if len(optimizer.param_groups) == 1:
            return
        owner = next(name for name, one in self._named(trainer) if one is optimizer)
        for group, suffix in zip(optimizer.param_groups, group_names(optimizer), strict=True):
            alone: Any = SimpleNamespace(param_groups=[group])
            norm = trainer.strategy.clip_gradients(alone, math.inf, "norm")
            if norm is not None:
                self._of_groups[f"grad_norm/{owner}/{suffix}"] = norm

    def _named_groups(self, trainer: Trainer) -> dict[str, list[str]]:
        """Return the names of the parameters of each group, by the group's name; empty if there is one group alone."""
        found: dict[str, list[str]] = {}
        for name, optimizer in self._named(trainer):
            key = (id(optimizer), len(optimizer.param_groups))
            if key not in self._groups:
                # From the state, since a strategy may have put other tensors in place of the groups' parameters.
                saved = trainer.strategy.optimizer_state(optimizer)["param_groups"]
                self._groups[key] = [group["params"] for group in saved]
            for suffix, members in zip(group_names(optimizer), self._groups[key], strict=True):
                found[f"{name}/{suffix}".removesuffix("/")] = members
        return found if len(found) > 1 else {}

    def _named(self, trainer: Trainer) -> list[tuple[str, Optimizer]]:
        """Return the optimizers with their names in the logs."""
        named = named_optimizers(trainer.optimizers, trainer.scheduler_configs)
        return [(name.removeprefix("lr-"), optimizer) for name, optimizer, _ in named]


def measured(settings: Settings, step: int) -> bool:
    """Whether the norms of weights and updates are logged after this step."""
    return step == 1 or settings.logs_at(step)
