"""A penalty of sharded weights in the loss is refused with words for what works, which trains as the penalty does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS
from trainer import ConfigError, Engine, seed_everything

STEPS, BATCH, FACTOR = 4, 8, 0.1


class InLoss(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + FACTOR * sum(p.square().sum() for p in self.layers[2].parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InGradients(InLoss):
    loss = MLP.loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.layers[2].parameters():
            p.grad.add_(p.detach(), alpha=2 * FACTOR)  # type: ignore[union-attr]


def train(kind: Any, name: str) -> dict[str, torch.Tensor]:
    seed_everything(1)
    trainer = WAYS[name].trainer(max_steps=STEPS, seed=1)
    trainer.fit(kind(), DataLoader(MLP.data(STEPS * BATCH), WAYS[name].micro_batch))
    return trainer.full_state_dict(everywhere=True)


def test_gradients_are_where_a_penalty_of_weights_goes() -> None:
    expected = train(InLoss, "single")
    for rank in run_distributed(train, 2, InGradients, "FSDP x2"):
        for key, value in rank.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)


def refused() -> list[str]:
    with pytest.raises(ConfigError) as of_trainer:
        train(InLoss, "FSDP x1")
    with pytest.raises(ConfigError) as of_engine:
        in_an_engine()
    return [str(of_trainer.value), str(of_engine.value)]


def in_an_engine() -> None:
    with Engine(strategy="fsdp", accelerator="cpu", devices=1) as engine:
        module = MLP()
        model, _ = engine.setup(module.layers, torch.optim.SGD(module.parameters(), lr=0.1))
        x, y = module.data(BATCH).tensors
        engine.backward(mse_loss(model(x)[:, 0], y) + sum(p.square().sum() for p in model.parameters()))


def test_a_penalty_in_the_loss_is_refused_with_what_works() -> None:
    for said in run_distributed(refused, 1)[0]:
        assert "p.grad.add_(p.detach(), alpha=2 * factor)" in said
        assert "AdamW's weight_decay" in said
