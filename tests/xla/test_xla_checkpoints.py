"""Checkpoints written under one strategy are read under another, on XLA devices and in processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import GPT
from trainer import Callback, Trainer, TrainModule
from trainer.checkpoint.format import read_checkpoint

STEPS, SAVED_AT = 20, 10
PROCESSES = {"single_device": 1, "ddp": 2, "fsdp": 2, "xla": 1, "xla_fsdp": 1}
ON_XLA = ("xla", "xla_fsdp")
"""Strategies that run in the test's own process; the others get processes of their own."""


class Watch(Callback):
    """Record the loss of each step, and save a checkpoint in the middle."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.losses: list[float] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.losses.append(trainer.read_metrics()["loss"])
        if trainer.global_step == SAVED_AT and self.path is not None:
            trainer.save_checkpoint(self.path)


def fit(strategy: str, until: int, start: str | None = None, save: str | None = None) -> dict[str, Any]:
    """Train up to step `until`, with clipping, windows of 3, a schedule, shuffled data and 81 samples an epoch."""
    watch, number = Watch(save), PROCESSES[strategy]
    trainer = Trainer(
        strategy=strategy,
        accelerator="auto" if strategy in ON_XLA else "cpu",
        devices=number,
        seed=3,
        max_steps=until,
        max_epochs=-1,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[watch],
        **QUIET,
    )
    module = GPT(ragged=True, tied=True, frozen=True)
    torch.manual_seed(99 if start else 3)
    trainer.fit(module, DataLoader(module.data(81), 8 // number, shuffle=True), ckpt_path=start)
    sharded = None
    if strategy in ON_XLA:
        sharded = {name: trainer.strategy.mesh.is_sharded(p) for name, p in module.named_parameters()}
        for parameter, state in trainer.optimizers[0].state.items():
            assert trainer.strategy.mesh.is_sharded(state["exp_avg"]) == trainer.strategy.mesh.is_sharded(parameter)
    return {"losses": watch.losses, "weights": trainer.full_state_dict(everywhere=True), "sharded": sharded}


def run(strategy: str, *args: Any) -> dict[str, Any]:
    if strategy in ON_XLA:
        return fit(strategy, *args)
    return run_distributed(fit, PROCESSES[strategy], strategy, *args)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> dict[str, Any]:
    """Return uninterrupted runs with a checkpoint in their middle, by strategy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return {strategy: run(strategy, STEPS, None, str(folder / strategy)) for strategy in PROCESSES}


CROSSINGS = [
    ("ddp", "xla"),
    ("xla", "ddp"),
    ("xla_fsdp", "fsdp"),
    ("fsdp", "xla_fsdp"),
    ("xla", "xla_fsdp"),
    ("xla_fsdp", "single_device"),
]


@pytest.mark.parametrize(("source", "target"), CROSSINGS, ids=lambda name: name)
def test_a_run_goes_on_under_another_strategy(source: str, target: str, uninterrupted: Any, folder: Path) -> None:
    expected = uninterrupted["single_device"]["losses"]
    resumed = run(target, STEPS, str(folder / source))
    assert len(resumed["losses"]) == STEPS - SAVED_AT
    assert resumed["losses"] == pytest.approx(expected[SAVED_AT:], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("strategy", ON_XLA)
def test_resuming_gives_the_same_bits(strategy: str, uninterrupted: Any, folder: Path) -> None:
    resumed = run(strategy, STEPS, str(folder / strategy))
    assert_same_bits(resumed["weights"], uninterrupted[strategy]["weights"])
    assert resumed["losses"] == uninterrupted[strategy]["losses"][SAVED_AT:]
    assert resumed["sharded"] == uninterrupted[strategy]["sharded"]
    assert any(resumed["sharded"].values()) == (strategy == "xla_fsdp")


@pytest.mark.parametrize("strategy", ON_XLA)
def test_a_checkpoint_has_plain_full_tensors_on_the_cpu(strategy: str, uninterrupted: Any, folder: Path) -> None:
    ours = read_checkpoint(folder / strategy)
    theirs = read_checkpoint(folder / "single_device")
    assert ours["model"].keys() == theirs["model"].keys()
    for name, tensor in theirs["model"].items():
        assert ours["model"][name].device.type == "cpu"
        torch.testing.assert_close(ours["model"][name], tensor, atol=1e-4, rtol=1e-4)
    (state,), (other,) = ours["optimizers"], theirs["optimizers"]
    assert state["state"].keys() == other["state"].keys()
    for name, values in other["state"].items():
        assert {key: value.shape for key, value in state["state"][name].items()} == {
            key: value.shape for key, value in values.items()
        }
