"""Gradients that a manual optimization keeps for a later step are part of a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import run_distributed
from tests.helpers.stops import StopsAt
from tests.helpers.toy import quiet
from trainer import Callback, Trainer, TrainModule
from trainer.checkpoint.format import read_checkpoint


class Accumulates(TrainModule):
    """Two networks with windows of their own, as GANs have: of 3 and of 2 batches."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.automatic_optimization, self.way = False, way
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        one, two = self.optimizers()
        loss = self.second(self.first(batch[0]).detach()).square().mean()
        loss.backward() if self.way == "direct" else self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            two.step()
            two.zero_grad()
        loss = (self.second(self.first(batch[0])) - 1).square().mean()
        loss.backward() if self.way == "direct" else self.manual_backward(loss)
        if (batch_idx + 1) % 3 == 0:
            one.step()
            one.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.first.parameters(), lr=0.05), torch.optim.SGD(self.second.parameters(), lr=0.1)


def train(folder: str, way: str, stops: tuple[int, ...], devices: int = 1, strategy: str = "auto") -> list[Any]:
    """Train two epochs of 7 steps with stops and resumes; return the weights."""
    for stop in (*stops, 1000):
        torch.manual_seed(0)
        module = Accumulates(way)
        features = torch.randn(28, 4, generator=torch.Generator().manual_seed(0))
        trainer = quiet(
            max_epochs=2,
            devices=devices,
            strategy=strategy,
            enable_checkpointing=True,
            default_root_dir=folder,
            callbacks=[StopsAt(stop)],
        )
        trainer.fit(module, DataLoader(TensorDataset(features), 4 // devices), ckpt_path="last")
    return [value.clone() for value in trainer.full_state_dict(everywhere=True).values()]


def with_and_without_stops(way: str, devices: int, strategy: str) -> tuple[list[Any], list[Any]]:
    one = train("one", way, (), devices, strategy)
    return one, train("two", way, (1, 4, 5, 11), devices, strategy)


@pytest.mark.parametrize(("way", "strategy"), [("manual", "auto"), ("direct", "auto"), ("manual", "fsdp")])
def test_a_resume_inside_a_window_of_the_users_is_exact(way: str, strategy: str) -> None:
    if strategy == "auto":
        results = [with_and_without_stops(way, 1, strategy)]
    else:
        results = run_distributed(with_and_without_stops, 2, way, 2, strategy)
    for expected, found in results:
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_windows_are_those_of_a_loop_by_hand() -> None:
    torch.manual_seed(0)
    module = Accumulates("direct")
    features = torch.randn(28, 4, generator=torch.Generator().manual_seed(0))
    one, two = module.configure_optimizers()
    for batch_idx in [*range(7)] * 2:
        batch = features[4 * batch_idx : 4 * batch_idx + 4]
        module.second(module.first(batch).detach()).square().mean().backward()
        if (batch_idx + 1) % 2 == 0:
            two.step()
            two.zero_grad()
        (module.second(module.first(batch)) - 1).square().mean().backward()
        if (batch_idx + 1) % 3 == 0:
            one.step()
            one.zero_grad()
    found = train("runs", "manual", (5,))
    assert all(torch.equal(*pair) for pair in zip(found, module.state_dict().values(), strict=True))


def test_gradients_that_were_used_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Each(Accumulates):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.second(self.first(batch[0])).square().mean())
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    trainer = quiet(max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    with caplog.at_level(logging.WARNING, "trainer"):
        trainer.fit(Each("manual"), DataLoader(TensorDataset(torch.randn(8, 4)), 4))
    assert not caplog.records
    state = read_checkpoint(trainer.checkpoint_callback.last_model_path)["optimizers"][0]["state"]
    assert {*state["first.weight"]} == {"step", "exp_avg", "exp_avg_sq"}


class TwoSteps(torch.optim.SGD):
    """Steps by two methods of its own, as sharpness-aware minimization does."""

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        torch.optim.SGD.step(self)
        self.zero_grad()


class Sharpness(Accumulates):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for step in (optimizer.first_step, optimizer.second_step):
            self.manual_backward(self.second(self.first(batch[0])).square().mean())
            step()

    def configure_optimizers(self) -> Any:
        return TwoSteps(self.parameters(), lr=0.1)


def test_what_another_method_of_the_optimizer_has_used_does_not_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet(max_epochs=1, default_root_dir=tmp_path, callbacks=[Saves(tmp_path / "saved")])
    trainer.fit(Sharpness("auto"), DataLoader(TensorDataset(torch.randn(6, 4)), 2))
    assert (tmp_path / "saved").exists()
    assert "wait for a later step" not in caplog.text


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            trainer.save_checkpoint(self.path)
