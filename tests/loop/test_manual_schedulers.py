"""With manual optimization the module steps its own schedulers, through `lr_schedulers()`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainer import Trainer, TrainModule


class Manual(TrainModule):
    automatic_optimization = False

    def __init__(self, schedulers: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.schedulers = schedulers

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).square().mean())
        optimizer.step()
        ours = self.lr_schedulers()
        for scheduler in ours if isinstance(ours, list) else [ours]:
            scheduler.step()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(self.schedulers)]


@pytest.mark.parametrize("schedulers", [1, 2])
def test_they_step_when_the_module_says_so_and_never_by_themselves(schedulers: int) -> None:
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Manual(schedulers), [torch.ones(1, 2)] * 3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 ** (6 * schedulers)
