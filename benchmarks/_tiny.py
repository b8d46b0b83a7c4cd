"""A model so small that the host determines the time of a step: the work of `benchmarks gpu --part overhead`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks._gpt2 import Stopwatch
from trainer import TrainModule


class Tiny(TrainModule):
    """A perceptron 32-64-1."""

    def __init__(self, watch: Stopwatch, logs: bool) -> None:
        super().__init__()
        self.watch, self.logs = watch, logs
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.watch.tick()
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)
