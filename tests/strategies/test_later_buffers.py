"""Buffers that are None at first, and what hooks add: a resume has the buffers, and is told of the rest at the save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.compare import assert_same_bits
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Engine, seed_everything
from trainer.callbacks import BadStepGuard, ModelCheckpoint
from trainer.errors import CheckpointError

NAMES = ("single", "DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")
FIRST, STOP, STEPS = 1, 3, 6
"""The steps before which the buffer is made, and after which a run stops, and all."""


class Centered(Toy):
    """As DINO: a center that a step makes; the second one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", None)
        self.register_buffer("passing", None, persistent=False)
        self.none_at: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.center is None:
            return y
        with torch.no_grad():
            self.center = 0.9 * self.center + 0.1 * y.mean(0)
        return y - self.center

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.center is None:
            self.none_at.append(self.global_step)
            if self.global_step >= FIRST:
                self.center = torch.ones(1)
        return nn.functional.mse_loss(self(batch[0]), batch[1])


def train(name: str, steps: int, path: str | None = None, module: Any = None) -> Any:
    seed_everything(1)
    module, way = Centered() if module is None else module, WAYS[name]
    trainer = way.trainer(max_steps=steps, seed=1)
    trainer.fit(module, DataLoader(loader(STEPS).dataset, way.micro_batch // 2), ckpt_path=path)
    return trainer


def in_one_go_and_stopped(name: str, folder: str) -> tuple[Any, Any, Any]:
    """Return the weights of one go, of a resumed one, and of the same module that goes back to before the buffer."""
    whole = train(name, STEPS).full_state_dict(everywhere=True)
    early, late = (f"{folder}/{name.replace(' ', '-')}-{steps}" for steps in (1, STOP))
    train(name, 1).save_checkpoint(early)
    train(name, STOP).save_checkpoint(late)
    resumed = train(name, STEPS, late).full_state_dict(everywhere=True)
    assert resumed["center"] != 1
    if "ZeRO" in name:  # which trains a module once
        return whole, resumed, whole
    module = Centered()
    train(name, STOP, module=module)
    return whole, resumed, train(name, STEPS, early, module).full_state_dict(everywhere=True)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_each(in_one_go_and_stopped, selected(request, "name"), str(tmp_path_factory.mktemp("later")))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_buffer_that_a_step_has_made(name: str, found: dict[str, list[Any]]) -> None:
    skip_if_missing(name)
    for whole, *others in found[name]:
        for other in others:
            assert_same_bits(whole, other)


def test_the_buffer_is_loaded_without_a_run_too(tmp_path: Path) -> None:
    trainer = train("single", STOP)
    trainer.save_checkpoint(tmp_path / "one")
    module = Centered.load_from_checkpoint(tmp_path / "one")
    assert_same_bits(module.center, trainer.full_state_dict()["center"])


def test_a_rewind_takes_the_buffer_away(tmp_path: Path) -> None:
    class Spoilt(Centered):
        def __init__(self) -> None:
            super().__init__()
            self.spoilt: list[int] = []  # a plain value would go back, too

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            spoils = self.global_step == FIRST and not self.spoilt
            self.spoilt += [batch_idx] if spoils else []
            return loss * float("nan") if spoils else loss

    module, saves = Spoilt(), ModelCheckpoint(every_n_train_steps=FIRST, dirpath=tmp_path)
    trainer = quiet(max_steps=STEPS, callbacks=[saves, BadStepGuard("rewind")], enable_checkpointing=True)
    trainer.fit(module, loader(2 * STEPS))
    assert module.none_at == [0, 1, 1]
    assert isinstance(module.center, torch.Tensor)


def test_an_engine_loads_the_buffer_and_takes_it_away(tmp_path: Path) -> None:
    with Engine(accelerator="cpu") as engine:
        module = Centered().layer
        module.register_buffer("center", None)
        model = engine.setup(module)
        engine.save(tmp_path / "before", {"model": model})
        module.center = torch.full((3,), 2.0)
        engine.save(tmp_path / "after", {"model": model})
        engine.load(tmp_path / "before", {"model": model})
        assert module.center is None
        engine.load(tmp_path / "after", {"model": model})
        assert_same_bits(module.center, torch.full((3,), 2.0))


class Growing(Toy):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.more = nn.Linear(1, 1)
            self.trainer.optimizers[0].add_param_group({"params": self.more.parameters()})


def test_layers_that_a_hook_adds_are_named_at_the_first_save_and_in_the_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_epochs=1, **options).fit(Growing(), loader(2))
        assert "came while training" not in caplog.text
        quiet(max_epochs=3, **options).fit(Growing(), loader(2), ckpt_path="last")
    (said,) = (text for text in caplog.messages if "came while training" in text)
    assert said.endswith("more.bias, more.weight")
    assert "__init__, configure_model or on_load_checkpoint" in said
    with raises_recorded(CheckpointError):
        quiet(max_epochs=4, **options).fit(Growing(), loader(2), ckpt_path="last")


def test_what_a_lenient_resume_leaves_out_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(Growing(), loader(2))
    trainer.save_checkpoint(tmp_path / "grown")
    with caplog.at_level(logging.WARNING, "trainer"):
        Growing.load_from_checkpoint(tmp_path / "grown", strict=False)
    assert "not in the module are left out: more.weight, more.bias" in caplog.text
