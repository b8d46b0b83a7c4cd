"""A module whose `configure_optimizers` returns None runs through all epochs, and nothing changes its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import ConfigError, Trainer, TrainModule
from trainer.callbacks import BaseFinetuning, LearningRateMonitor, ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint

NAMES = ("single", "DDP x2", "FSDP x2")


class Collects(TrainModule):
    """Keeps what it sees in the first epoch, as methods without training do. Without a loss if `gives` is None."""

    def __init__(self, gives: Any = 0.0) -> None:
        super().__init__()
        self.gives = gives
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total += batch[0].sum(0)
        self.log("seen", float(batch_idx))
        if self.gives is None:
            return None
        return (self.layer(batch[0]) * self.gives).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(batch_idx))

    def configure_optimizers(self) -> None: ...


class NoLoss(Collects):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.total += batch[0].sum(0)


def _run(name: str) -> list[Any]:
    found: list[Any] = []
    for module in (Collects(1.0), NoLoss()):
        trainer = WAYS[name].trainer(max_epochs=2, seed=1, accumulate_grad_batches=3, gradient_clip_val=0.1)
        if isinstance(module, NoLoss) and name.startswith("FSDP"):
            continue
        torch.nn.init.ones_(module.layer.weight)
        trainer.fit(module, loader(8), loader(2))
        weights = trainer.full_state_dict(True)
        found.append((trainer.global_step, trainer.current_epoch, bool((weights["layer.weight"] == 1).all())))
    return found


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(_run, selected(request, "name"))


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_epochs_are_counted_and_no_weight_changes(name: str, results: dict[str, list[Any]]) -> None:
    skip_if_missing(name)
    steps = 6 if name == "single" else 4
    for rank in results[name]:
        assert rank == [(steps, 2, True)] * (1 if name.startswith("FSDP") else 2)


def test_one_warning_says_so_and_a_run_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeps = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)
    module = Collects()
    quiet(max_epochs=2, enable_checkpointing=True, logger=True, callbacks=[keeps, LearningRateMonitor()]).fit(
        module, loader(), loader(2)
    )
    assert caplog.text.count("configure_optimizers returned None") == 1
    assert [state["param_groups"] for state in read_checkpoint(keeps.best_model_path)["optimizers"]] == [[]]
    again = Collects()
    trainer = quiet(max_epochs=3)
    trainer.fit(again, loader(), ckpt_path=keeps.best_model_path)
    assert (trainer.global_step, trainer.current_epoch) == (24, 3)
    torch.testing.assert_close(again.total, module.total * 1.5)


def test_an_optimizer_has_no_place_in_such_a_checkpoint(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Collects(), loader())
    trainer.save_checkpoint(tmp_path / "point")

    class Trains(Collects):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with raises_recorded(Exception):
        quiet(max_epochs=2).fit(Trains(), loader(), ckpt_path=tmp_path / "point")


@pytest.mark.parametrize("none", [None, []], ids=str)
def test_manual_optimization_needs_none(none: Any, caplog: pytest.LogCaptureFixture) -> None:
    class ByHand(Collects):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return none

    trainer = quiet(max_epochs=2)
    trainer.fit(ByHand(), loader())
    assert trainer.current_epoch == 2
    assert "stepped no optimizer" not in caplog.text


def test_no_list_of_optimizers_is_empty() -> None:
    class Empty(Collects):
        def configure_optimizers(self) -> Any:
            return []

    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(Empty(), loader())


def test_deepspeed_needs_an_optimizer() -> None:
    skip_if_missing("ZeRO-2 x2")
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, strategy="deepspeed_stage_2").fit(Collects(), loader())


# -- frozen until the first epoch --------------------------------------------------------------------------------------


class Gradual(BaseFinetuning):
    """Freezes everything, and unfreezes it at the start of an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == self.epoch:
            self.make_trainable(pl_module)


def _unfreeze(name: str) -> list[Any]:
    found = []
    for callbacks in ([], [Gradual(0)]):
        module = Toy()
        trainer: Trainer = WAYS[name].trainer(max_epochs=2, seed=1, callbacks=callbacks)
        torch.nn.init.ones_(module.layer.weight)
        torch.nn.init.ones_(module.layer.bias)
        trainer.fit(module, loader(4, WAYS[name].micro_batch))
        found.append(trainer.full_state_dict(True)["layer.weight"].tolist())
    return found


@pytest.fixture(scope="module")
def unfrozen(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(_unfreeze, selected(request, "way"))


@pytest.mark.parametrize("way", NAMES)
def test_what_the_first_epoch_unfreezes_trains(way: str, unfrozen: dict[str, list[Any]]) -> None:
    skip_if_missing(way)
    for plain, finetuned in unfrozen[way]:
        torch.testing.assert_close(torch.tensor(finetuned), torch.tensor(plain))
        assert finetuned != [[1.0] * 4]


def test_what_stays_frozen_is_refused_before_the_first_batch() -> None:
    trainer = quiet(max_epochs=2, callbacks=[Gradual(1)])
    with raises_recorded(ConfigError):
        trainer.fit(Toy(), loader())
    assert trainer.global_step == 0


def test_later_epochs_may_freeze_an_optimizer() -> None:
    class Pauses(Toy):
        def on_train_epoch_start(self) -> None:
            self.layer.requires_grad_(self.current_epoch != 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if self.current_epoch != 1 else None

    trainer = quiet(max_epochs=3)
    trainer.fit(Pauses(), loader())
    assert trainer.current_epoch == 3
