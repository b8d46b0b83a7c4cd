"""A small module that is awkward for DeepSpeed, the loop of its strategies by hand, and torch's own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer import TrainModule
from trainer.checkpoint.shards import Shard
from trainer.precision import PRECISIONS
from trainer.strategies import Strategy
from trainer.strategies.deepspeed.strategy import (
    DeepSpeedStage1Strategy,
    DeepSpeedStage2OffloadStrategy,
    DeepSpeedStage2Strategy,
    DeepSpeedStage3OffloadStrategy,
    DeepSpeedStage3Strategy,
    DeepSpeedStrategy,
)
from trainer.strategy import StepOptions

SMALL = {"zero_optimization": {"reduce_bucket_size": 1000}}
# With the default threshold DeepSpeed would not shard the parameters of a small module.
SHARD_ALL = {
    "zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 40, "reduce_bucket_size": 1000}
}
ENGINES: dict[str, Callable[[], DeepSpeedStrategy]] = {
    "1": DeepSpeedStage1Strategy,
    "2": DeepSpeedStage2Strategy,
    "3": lambda: DeepSpeedStage3Strategy(SHARD_ALL),
    "3, small ones not sharded": lambda: DeepSpeedStage3Strategy(SMALL),
    "2 offload": DeepSpeedStage2OffloadStrategy,
    "3 offload": lambda: DeepSpeedStage3OffloadStrategy(SHARD_ALL),
}
WINDOWS = (3, 2, 1, 3, 2, 1)
"""Micro-batches of each step: the last one of an epoch of six is shorter."""
CLIP = 1.0


class Net(TrainModule):
    """A module with parameters of its own, tied ones, frozen ones, a buffer, and odd sizes.

    late: layers are built in `configure_model`.
    """

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        if not late:
            self.build()

    def build(self) -> None:
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 5, bias=False).requires_grad_(False)
        self.last = nn.Linear(7, 3)
        self.tied = nn.Linear(7, 3)
        self.tied.weight = self.last.weight
        self.register_buffer("shift", torch.arange(3.0))

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            self.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        together = self.last(hidden) + 0.1 * self.tied(hidden)
        return together * self.scale + self.shift + 0.1 * self.frozen(hidden).sum(-1, keepdim=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        # The module's own parameter is used after its forward has released the gathered parameters.
        return ((self(x) - y) ** 2).mean() + 0.01 * (self.scale**2).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return ((self(x) - y) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02)


def windows() -> list[list[Any]]:
    """Return the global batches, by step and micro-batch."""
    random = torch.Generator().manual_seed(1)

    def batch() -> Any:
        return torch.randn(4, 6, generator=random), 3 * torch.randn(4, 3, generator=random)

    return [[batch() for _ in range(number)] for number in WINDOWS]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on one process with torch alone; return the losses, and the weights at the end."""
    torch.manual_seed(0)
    module = Net()
    optimizer = module.configure_optimizers()
    scheduler = schedule(optimizer)
    losses = []
    for window in windows():
        optimizer.zero_grad()
        total = 0.0
        for batch in window:
            loss = module.training_step(batch, 0) / len(window)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses, {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


class Running:
    """A module that has been set up under a strategy."""

    def __init__(
        self,
        strategy: Strategy,
        precision: str = "32-true",
        late: bool = False,
        state: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.strategy = strategy
        strategy.setup_environment("cpu", PRECISIONS[precision])
        # All ranks have to get the values of rank 0.
        torch.manual_seed(seed + strategy.processes.rank)
        self.module = Net(late)
        with strategy.init_context(self.module, will_load_checkpoint=state is not None):
            self.module.configure_model()
        self.begin(state)

    def begin(self, state: dict[str, Any] | None = None) -> None:
        """Set up for training, or for going on from the result of `state` after the given steps."""
        strategy = self.strategy
        strategy.setup_module(self.module, for_training=True)
        if state is not None:
            strategy.load_module_state(state["model"])
        optimizer = self.module.configure_optimizers()
        self.scheduler = schedule(optimizer)
        (self.optimizer,) = strategy.setup_optimizers([optimizer], StepOptions(clip_value=CLIP))
        self.done = 0
        if state is not None:
            strategy.load_optimizer_state(self.optimizer, state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.done = state["done"]

    def steps(self, number: int) -> list[float]:
        """Train more steps as the trainer's loop does; return their losses."""
        return [self.step(window) for window in windows()[self.done : self.done + number]]

    def step(self, window: list[Any]) -> float:
        strategy, rank, ranks = self.strategy, self.strategy.processes.rank, self.strategy.processes.world_size
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for position, (x, y) in enumerate(window):
            mine = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
            with strategy.gradient_sync(last=position == len(window) - 1):
                loss = strategy.call_step("training_step", strategy.to_device((x[mine], y[mine])), 0)
                # This process's share of the mean over all samples, when the strategy averages over the processes.
                loss = loss / len(window) * (strategy.processes.world_size / ranks)
                strategy.backward(loss)
            total += loss.detach().float()
        strategy.unscale(self.optimizer)
        strategy.clip_gradients(self.optimizer, CLIP, "norm")
        strategy.step(self.optimizer)
        strategy.end_step()
        self.scheduler.step()
        self.done += 1
        return float(strategy.processes.sum(total)) / ranks

    def state(self) -> dict[str, Any]:
        """Return the state of a checkpoint as full tensors, on every process."""
        return {
            "model": gather_full(self.strategy, self.strategy.module_state()),
            "optimizer": gather_full(self.strategy, self.strategy.optimizer_state(self.optimizer)),
            "scheduler": self.scheduler.state_dict(),
            "done": self.done,
        }


def gather_full(strategy: Strategy, state: Any) -> Any:
    """Gather a sharded state from all processes; each element has to be there exactly once."""
    if isinstance(state, dict):
        return {name: gather_full(strategy, value) for name, value in state.items()}
    if not isinstance(state, Shard):
        return state.clone() if isinstance(state, torch.Tensor) else state
    total = torch.full((math.prod(state.shape),), math.nan, dtype=state.local.dtype)
    for shape, extent, local in strategy.processes.all_gather_object((state.shape, state.extent, state.local)):
        assert shape == state.shape
        assert local.numel() == extent.numel
        part = extent.take(total)
        assert part.isnan().all()
        part.copy_(local.reshape(-1))
    assert not total.isnan().any()
    return total.view(state.shape)


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Return the names of the entries in which two states differ by any bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = {*one, *other}
        if set(one) != names or set(other) != names:
            return [f"{where}: names {set(one) ^ set(other)}"]
        return [
            found for name in sorted(names, key=str) for found in differences(one[name], other[name], f"{where}/{name}")
        ]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return [] if same else [f"{where}: {one.dtype} {tuple(one.shape)}, {other.dtype} {tuple(other.shape)}"]
    return [] if one == other else [f"{where}: {one!r} and {other!r}"]


def strictly() -> None:
    """Turn warnings into errors, as under pytest."""
    warnings.simplefilter("error")
