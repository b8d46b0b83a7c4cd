"""Numbers of numpy in optimizers, schedulers, states and hyperparameters: stored exactly, or refused at the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, MultiStepLR

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, CheckpointError, DataModule
from trainer.callbacks import CSVLogger, ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.testing import compare_runs

RATES = [np.float64(0.1), np.float32(0.1), np.float16(0.1), np.array(0.1), np.array(0.1, np.float32), np.int64(1)]


class Numbers(Callback):
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"a": np.float32(0.1), "b": np.bool_(True), "c": np.arange(3), 4: {np.int64(2): 1}}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Net(Toy):
    def __init__(self, rate: Any = 0.1, betas: tuple[Any, ...] = (np.float32(0.9), np.int64(2))) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.save_hyperparameters(ignore=["rate"] if isinstance(rate, np.ndarray) else [])
        self.rate = rate

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.rate, momentum=np.float64(0.5))
        schedulers = [ExponentialLR(optimizer, np.float32(0.7)), MultiStepLR(optimizer, [np.int64(1), np.int64(3)])]
        return [optimizer], schedulers

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_module"] = {"best": np.float64(0.25), "flags": [np.bool_(False), np.uint8(3)]}


class Data(DataModule):
    def __init__(self) -> None:
        self.save_hyperparameters(size=np.int64(4))

    def train_dataloader(self) -> Any:
        return loader(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.int32(7)}


def fit(folder: Path, rate: Any, epochs: int, ckpt_path: str | None = None) -> str:
    callbacks = [ModelCheckpoint(folder / "checkpoints", save_top_k=-1), Numbers()]
    trainer = quiet(max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(Net(rate), datamodule=Data(), ckpt_path=ckpt_path)
    return callbacks[0].last_model_path  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: f"{type(rate).__name__} {rate.dtype}")
def test_a_resumed_run_has_the_same_numbers_and_types(rate: Any, tmp_path: Path) -> None:
    uninterrupted = fit(tmp_path / "one", rate, 4)
    resumed = fit(tmp_path / "two", rate, 4, fit(tmp_path / "two", rate, 2))
    ignored = ["run_dir", "callbacks.ModelCheckpoint*", "callback_identities.ModelCheckpoint*"]
    found = compare_runs(uninterrupted, resumed, ignored)
    assert found == []
    checkpoint = read_checkpoint(resumed)
    group = checkpoint["optimizers"][0]["param_groups"][0]
    assert isinstance(group["initial_lr"], type(rate))
    assert group["initial_lr"].dtype == rate.dtype
    assert [type(key) for key in checkpoint["schedulers"][1]["milestones"]] == [np.int64, np.int64]
    assert checkpoint["callbacks"]["Numbers"]["b"] is np.True_
    assert type(checkpoint["added"]["of_module"]["best"]) is np.float64
    assert type(checkpoint["data"]["seen"]) is np.int32


def test_hyperparameters_are_built_again_and_logged_as_plain_numbers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints")
    trainer = quiet(max_epochs=1, callbacks=checkpoint, enable_checkpointing=True, logger=logger)
    trainer.fit(Net(np.float32(0.25)), datamodule=Data())
    module = Net.load_from_checkpoint(checkpoint.last_model_path)
    assert [type(one) for one in (module.hparams.rate, *module.hparams.betas)] == [np.float32, np.float32, np.int64]
    logged = json.loads((tmp_path / "hparams.json").read_text())
    assert logged["module"] == {"rate": 0.25, "betas": [float(np.float32(0.9)), 2]}
    assert logged["data"] == {"size": 4}


@pytest.mark.parametrize("wrong", [np.array(0.1), np.array(["a"]), np.datetime64("2026-01-01")])
def test_a_hyperparameter_that_is_no_number_is_reported_in_the_constructor(
    wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Net(betas=(wrong,))
    assert "the hyperparameters betas[0] (" in caplog.text


@pytest.mark.parametrize("holder", ["optimizer", "scheduler"])
def test_what_no_checkpoint_holds_is_refused_before_the_first_step(holder: str, tmp_path: Path) -> None:
    class Odd(Toy):
        def on_train_epoch_start(self) -> None:
            raise AssertionError("training has begun")

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            scheduler = ExponentialLR(optimizer, 0.5)
            if holder == "optimizer":
                optimizer.param_groups[0]["since"] = np.datetime64("2026-01-01")
            else:
                scheduler.since = np.datetime64("2026-01-01")  # type: ignore[attr-defined]
            return [optimizer], [scheduler]

    with raises_recorded(CheckpointError):
        quiet(max_epochs=1, callbacks=ModelCheckpoint(tmp_path), enable_checkpointing=True).fit(Odd(), loader(1))


def test_it_is_not_refused_where_nothing_is_saved() -> None:
    class Odd(Toy):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=0.1)
            optimizer.param_groups[0]["since"] = np.datetime64("2026-01-01")
            return optimizer

    quiet(max_epochs=1).fit(Odd(), loader(1))
