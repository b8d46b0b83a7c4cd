"""With manual optimization fsdp trains what is in no block as a hand-written loop does, however often it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import once_per_module, run_distributed
from tests.helpers.realistic_modules import WIDTH, Block
from tests.helpers.strategy_runs import WAYS, run_each
from trainer import Engine, TrainModule, seed_everything

SAMPLES, GLOBAL_BATCH = 24, 8
NAMES = ("FSDP x2", "FSDP x2, SHARD_GRAD_OP", "FSDP x2, CPU offload")


class Adversarial(TrainModule):
    """Two networks of blocks with heads outside of the blocks, weights that are tied, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1))
        self.inwards, self.outwards = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outwards.weight = self.inwards.weight
        self.temperature = nn.Parameter(torch.ones(2))

    def losses(self, x: torch.Tensor) -> Any:
        """Yield the loss for each of the three optimizers in turn, computed when it is asked for."""
        made = self.generator(x)
        yield (self.judge(made.detach()) - 1).square().mean() + self.judge(x).square().mean()
        yield self.judge(made).square().mean() + self.outwards(self.inwards(made)).square().mean()
        yield (self.temperature.exp() * x.mean()).sum() + self.temperature.square().sum()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for loss, optimizer in zip(self.losses(batch[0]), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = [self.judge.parameters(), [*self.generator.parameters(), *self.inwards.parameters()]]
        parts[1] += [self.outwards.bias]  # type: ignore[operator]
        return [torch.optim.AdamW(part, lr=0.01) for part in (*parts, [self.temperature])]


def data() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2)))


def train(name: str) -> Any:
    trainer = WAYS[name].trainer(seed=1, max_epochs=2, watchdog_seconds=100)
    seed_everything(1)
    module = Adversarial().double()
    trainer.fit(module, DataLoader([(x.double(),) for (x,) in data()], GLOBAL_BATCH // 2))  # type: ignore[arg-type]
    return trainer.full_state_dict(everywhere=True)


def by_hand() -> dict[str, torch.Tensor]:
    seed_everything(1)
    module = Adversarial().double()
    optimizers = module.configure_optimizers()
    (x,) = data().tensors
    for start in [*range(0, SAMPLES, GLOBAL_BATCH)] * 2:
        for loss, optimizer in zip(module.losses(x[start : start + GLOBAL_BATCH].double()), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return module.state_dict()


results = once_per_module(lambda: run_each(train, NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_layers_outside_of_the_blocks_are_used_again_after_a_backward_and_a_step(name: str, results: Any) -> None:
    expected = by_hand()
    for rank in results[name]:
        assert rank.keys() == expected.keys()
        for key, value in rank.items():
            torch.testing.assert_close(
                value, expected[key], rtol=1e-5, atol=1e-6, msg=lambda message, key=key: f"{key}: {message}"
            )


def step_two_models(strategy: str) -> dict[str, torch.Tensor]:
    """Make two steps with the Engine, each by one backward through two models."""
    seed_everything(1)
    nets = [nn.Linear(4, 4), nn.Linear(4, 1)]
    with Engine(accelerator="cpu", devices=1, strategy=strategy, seed=1) as engine:
        (first, of_first), (second, of_second) = (engine.setup(net, SGD(net.parameters(), lr=0.1)) for net in nets)
        for _ in range(2):
            engine.backward(second(first(torch.ones(2, 4))).square().mean())
            for optimizer in (of_first, of_second):
                optimizer.step()
                optimizer.zero_grad()
        weights = [engine.full_state_dict(model, everywhere=True) for model in (first, second)]
    return {f"{number}.{name}": value for number, one in enumerate(weights) for name, value in one.items()}


def test_a_backward_through_two_models_reduces_the_gradients_of_both() -> None:
    (found,) = run_distributed(step_two_models, 1, "fsdp")
    torch.testing.assert_close(found, step_two_models("auto"))
