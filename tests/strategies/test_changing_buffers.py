"""Buffers with which a step computes are those of reader 0 at its start, so that an evaluation changes no training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.strategy_runs import WAYS, run_each
from tests.tiers import selected
from trainer import TrainModule, seed_everything

WIDTH, STEPS, MICRO_BATCH = 4, 4, 4
NAMES = ("DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")


class Centered(TrainModule):
    """DINO's center and MoCo's queue: one is changed in place, the other replaced, in every second step."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("queue", torch.zeros(2, WIDTH))
        self.register_buffer("unchanged", torch.ones(WIDTH), persistent=False)

    def loss(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y = self.layer(x)
        self.center.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)  # type: ignore[operator]
        if step % 2:
            self.queue = torch.cat([self.queue[1:], y.detach()[:1]])
        return (y - self.center - self.queue.mean(0) - self.unchanged).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = self.loss(batch[0], batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.norm(self.layer(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(STEPS * 2 * MICRO_BATCH, WIDTH, generator=torch.Generator().manual_seed(3)))


def train(name: str, manual: bool, validates: bool) -> dict[str, torch.Tensor]:
    settings = {"val_check_interval": 1} if validates else {"limit_val_batches": 0}
    trainer = WAYS[name].trainer(seed=1, max_epochs=1, num_sanity_val_steps=0, watchdog_seconds=100, **settings)
    seed_everything(1)
    trainer.fit(Centered(manual), DataLoader(data(), MICRO_BATCH), DataLoader(data(), 2 * MICRO_BATCH))
    return trainer.full_state_dict(everywhere=True)


def train_each(name: str) -> list[Any]:
    ways = [False] if "ZeRO" in name else [False, True]
    return [train(name, manual, validates) for manual in ways for validates in (False, True)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        return run_each(train_each, selected(request, "name"))


def by_hand() -> nn.Module:
    seed_everything(1)
    module = Centered()
    optimizer = module.configure_optimizers()
    parts = data().tensors[0].split(MICRO_BATCH)
    for step, (first, second) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        center, queue = module.center.clone(), module.queue.clone()  # type: ignore[operator]
        other = module.loss(second, step)
        module.center, module.queue = center, queue
        optimizer.zero_grad()
        (module.loss(first, step) + other).div(2).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("name", NAMES)
def test_each_step_begins_with_the_buffers_of_reader_0(name: str, results: Any) -> None:
    expected = by_hand().state_dict()
    for number, rank in enumerate(results[name]):
        for state in rank:
            for key in ("layer.weight", "layer.bias", *(("center", "queue") if number == 0 else ())):
                torch.testing.assert_close(state[key], expected[key], rtol=0, atol=1e-6)
