"""Sparse gradients are clipped and measured as dense ones, or refused before the first step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.processes import run_distributed
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import ConfigError, TrainModule
from trainer.callbacks import BadStepGuard, GradNormMonitor
from trainer.model.gradients import grad_norm
from trainer.strategies.fsdp.clipping import clip_by_norm
from trainer.strategies.single import SingleDeviceStrategy


class Words(TrainModule):
    """A regression on embeddings; rows occur several times in a batch, and in the micro-batches of a window."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 1)
        self.norms: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.layer(self.embedding(batch)).squeeze(-1) - 30).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms += grad_norm(self, 2.0).values()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(sparse: bool, **options: Any) -> Words:
    module = Words(sparse)
    quiet(max_epochs=2, **options).fit(module, DataLoader(torch.arange(12) % 5, 3))
    return module


CLIPPING: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 1.0},
    "value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "window": {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
    "nothing": {},
}


@pytest.mark.parametrize("clipping", CLIPPING)
def test_sparse_gradients_are_clipped_and_measured_as_dense_ones(clipping: str) -> None:
    weights, norms = [], []
    for sparse in (False, True):
        monitor, guard = GradNormMonitor(), BadStepGuard("raise")
        module = fit(sparse, callbacks=[monitor, guard] if clipping != "value" else [monitor], **CLIPPING[clipping])
        weights.append(module.state_dict())
        norms.append(module.norms)
    torch.testing.assert_close(weights[1], weights[0])
    torch.testing.assert_close(norms[1], norms[0])


def _on_two() -> Any:
    return [fit(sparse, strategy="ddp", devices=2, gradient_clip_val=1.0).state_dict() for sparse in (False, True)]


def test_sparse_gradients_are_reduced_and_clipped_on_two_processes() -> None:
    (dense, sparse), others = run_distributed(_on_two, 2)
    torch.testing.assert_close(sparse, dense)
    torch.testing.assert_close(others[1], sparse, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_1", "deepspeed_stage_3"])
def test_a_strategy_that_shards_refuses_them_before_the_first_step(strategy: str) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    with raises_recorded(ConfigError):
        fit(True, strategy=strategy, devices=1)


@pytest.mark.parametrize("clip", ["one device", "sharded"])
def test_a_norm_whose_square_float16_cannot_hold_is_measured_and_clipped(clip: str) -> None:
    parameters = [nn.Parameter(torch.zeros(64, 64, dtype=torch.float16)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1000.0)
    expected = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None]).norm()
    strategy, optimizer = SingleDeviceStrategy(), torch.optim.SGD(parameters, 0.1)
    for value in (math.inf, 1.0):
        if clip == "sharded":
            norm: Any = clip_by_norm(parameters, parameters, value)
        else:
            norm = strategy.clip_gradients(optimizer, value, "norm")
        torch.testing.assert_close(norm, expected.float())
    clipped = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    assert float(clipped.norm()) == pytest.approx(1.0, rel=1e-3)
