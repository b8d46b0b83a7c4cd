"""A module with blocks, its batches and its training, for tests of compile=."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.helpers.compare import QUIET
from tests.helpers.processes import DEVICE
from trainer import Trainer, TrainModule


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.up(x).relu()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Model(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("count", float(self.global_step))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def batches(sizes: tuple[int, ...] = (4, 4, 4, 3), seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, 6, generator=generator) for size in sizes]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def trained(module: Model, compile: Any, epochs: int = 2, ckpt_path: Any = None, **more: Any) -> Trainer:
    trainer = Trainer(accelerator=DEVICE, max_epochs=epochs, seed=3, compile=compile, **{**QUIET, **more})
    trainer.fit(module, batches(), batches((4, 2), seed=1), ckpt_path=ckpt_path)
    return trainer
