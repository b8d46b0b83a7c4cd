"""bfloat16, activation checkpointing, tied weights and random numbers work on XLA devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.strategy_models import GPT
from trainer import Callback, Trainer, TrainModule, seed_everything
from trainer.strategies.xla.strategy import XlaFsdpStrategy, XlaStrategy

KINDS = [XlaStrategy, XlaFsdpStrategy]
STEPS = 8


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.losses.append(trainer.read_metrics()["loss"])


def fit(strategy: Any, module: Any = None, **settings: Any) -> dict[str, Any]:
    """STEPS steps; the seed before the module is made, and again in the trainer."""
    seed_everything(5)
    module, losses = module() if module else GPT(tied=True), Losses()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu" if strategy == "single_device" else "auto",
        seed=5,
        max_steps=STEPS,
        max_epochs=-1,
        log_every_n_steps=1,
        callbacks=[losses],
        **QUIET,
        **settings,
    )
    trainer.fit(module, DataLoader(module.data(64), 8))
    return {"losses": losses.losses, "weights": trainer.full_state_dict(), "module": module, "trainer": trainer}


class Dtypes(GPT):
    """A module that records the dtypes of its computation."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.seen: set[tuple[str, torch.dtype]] = set()
        for layer in self.net.modules():
            if isinstance(layer, (nn.Linear, nn.LayerNorm)):
                layer.register_forward_hook(self.look)

    def look(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.seen.add((type(layer).__name__, output.dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_bfloat16_and_keeps_float32_weights(kind: Any) -> None:
    mixed, full = fit(kind(), Dtypes, precision="bf16-mixed"), fit(kind())
    assert ("Linear", torch.bfloat16) in mixed["module"].seen
    assert ("Linear", torch.float32) not in mixed["module"].seen
    assert {value.dtype for value in mixed["weights"].values()} == {torch.float32}
    assert mixed["losses"] == pytest.approx(full["losses"], abs=0.03)
    assert mixed["losses"] != full["losses"]
    assert mixed["losses"][-1] < mixed["losses"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_true_bfloat16_keeps_all_but_buffers_in_it(kind: Any) -> None:
    low, full = fit(kind(), Dtypes, precision="bf16-true"), fit(kind())
    assert {dtype for _, dtype in low["module"].seen} == {torch.bfloat16}
    buffers = dict(low["module"].named_buffers())
    for name, value in low["weights"].items():
        assert value.dtype == (torch.float32 if name in buffers else torch.bfloat16), name
    states = low["trainer"].optimizers[0].state.values()
    assert {state["exp_avg"].dtype for state in states} == {torch.bfloat16}
    assert low["losses"] == pytest.approx(full["losses"], abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_stay_one(kind: Any) -> None:
    net = fit(kind())["module"].net
    assert net.head.weight is net.tokens.weight
    assert net.head.weight.device.type == "xla"
    separate = fit(kind(), lambda: GPT(tied=False))["module"].net
    assert separate.head.weight is not separate.tokens.weight


class Noisy(TrainModule):
    """A module of three blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.4)) for _ in range(3)
        )
        self.outer = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)

    @staticmethod
    def data(samples: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(samples, 6, generator=generator)
        return torch.utils.data.TensorDataset(x, x.sum(1))


class Watched(Noisy):
    """A module that records the elements that each block's dropout keeps, in the order of calls."""

    dropout = 0.4

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        for block in self.blocks:
            block[2].p = self.dropout
            block[2].register_forward_hook(lambda *args: self.kept.append(args[2].detach() != 0))


class WithoutDropout(Watched):
    dropout = 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_activations_changes_nothing(kind: Any) -> None:
    once, twice = fit(kind(), WithoutDropout), fit(kind(), WithoutDropout, activation_checkpointing="auto")
    assert len(twice["module"].kept) == 2 * len(once["module"].kept) == 2 * 3 * STEPS
    assert twice["losses"] == pytest.approx(once["losses"], rel=1e-5, abs=1e-6)
    for name, value in once["weights"].items():
        torch.testing.assert_close(twice["weights"][name], value, atol=1e-6, rtol=1e-5)
    assert all("forward" not in vars(block) for block in twice["module"].blocks)


def test_recomputing_draws_the_same_random_numbers_again() -> None:
    run = fit(XlaStrategy(), Watched, activation_checkpointing="auto", accumulate_grad_batches=2)
    masks = [mask.cpu() for mask in run["module"].kept]
    assert len(masks) == 2 * 3 * 2 * STEPS
    for first in range(0, len(masks), 6):
        forward, backward = masks[first : first + 3], masks[first + 3 : first + 6]
        assert all(torch.equal(*pair) for pair in zip(forward, backward[::-1], strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 3 * 2 * STEPS


def test_the_seed_decides_the_numbers_on_the_devices() -> None:
    first, again = fit(XlaStrategy(), Noisy), fit(XlaStrategy(), Noisy)
    assert_same_bits(first["weights"], again["weights"])
    other = Trainer(strategy=XlaStrategy(), seed=6, max_steps=STEPS, max_epochs=-1, **QUIET)
    seed_everything(5)
    module = Noisy()
    seed_everything(6)
    other.fit(module, DataLoader(module.data(64), 8))
    assert not torch.equal(other.full_state_dict()["inner.weight"], first["weights"]["inner.weight"])


def test_dropout_draws_other_numbers_each_step() -> None:
    seen: list[torch.Tensor] = []

    class Look(Noisy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(nn.functional.dropout(torch.ones(64, device=self.device), 0.5))
            return super().training_step(batch, batch_idx)

    fit(XlaStrategy(), Look)
    masks = {tuple(mask.cpu().tolist()) for mask in seen}
    assert len(masks) == STEPS
