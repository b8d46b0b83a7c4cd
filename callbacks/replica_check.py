"""ReplicaCheck: find replicas of the weights that differ between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer.arguments import PositiveInt
from trainer.callback import Callback
from trainer.errors import TrainerError, first_of, format_ranks
from trainer.model.weights import AbsentParameter

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class ReplicaCheck(Callback):
    """Compare a checksum of each parameter between the processes, which under ddp have the same bits.

    A check reads the device, and takes as long as reading all weights once. Sharded parameters, and buffers, are
    not compared.

    Args:
        every_n_train_steps: steps from one check to the next; the last step of a run is checked too.

    Raises:
        TrainerError: replicas differ; names the parameters, the ranks, and the steps between which it happened.
    """

    agree_on = ("every_n_train_steps",)

    def __init__(self, every_n_train_steps: PositiveInt = 100) -> None:
        self.every_n_train_steps = every_n_train_steps
        self._equal_at: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._equal_at = None
        self._check(trainer, pl_module)

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.global_step % self.every_n_train_steps == 0:
            self._check(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.global_step != self._equal_at:
            self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.world_size == 1:
            return
        by_rank = trainer.strategy.processes.all_gather_object(checksums(module))
        others = [rank for rank, sums in enumerate(by_rank) if sums != by_rank[0]]
        if not others:
            self._equal_at = trainer.global_step
            return
        different = sorted({name for name, _ in by_rank[others[0]].items() ^ by_rank[0].items()})
        since = "before the first step" if self._equal_at is None else f"after step {self._equal_at}"
        raise TrainerError(
            f"the replicas differ: {first_of(different)} on {format_ranks(others)} from rank 0, {since}, seen at step "
            f"{trainer.global_step}. Look for weights that are changed outside of the optimizer, optimizers with other "
            "options on some ranks, and gradients that are not synchronized."
        )


@torch.no_grad()
def checksums(module: torch.nn.Module) -> dict[str, int]:
    """Return the sum of the bits of each replicated parameter, weighted by place; one copy from the device."""
    plain = {
        name: p.detach()
        for name, p in module.named_parameters()
        if not hasattr(p, "device_mesh") and not isinstance(p, AbsentParameter)
    }
    sums = {name: _weighted_sum(_bits(value)) for name, value in plain.items() if value.numel()}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def _weighted_sum(bits: torch.Tensor) -> torch.Tensor:
    """Return a sum that changes when two values are exchanged, or their signs; it takes a few megabytes of memory."""
    sums = [
        # Odd factors: no bit of a value is lost.
        (part * (2 * torch.arange(part.numel(), device=part.device) + 1)).sum() * (2 * number + 1)
        for number, part in enumerate(bits.flatten().split(2**18))
    ]
    return torch.stack(sums).sum()


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.contiguous().view(integers[real.element_size()])
