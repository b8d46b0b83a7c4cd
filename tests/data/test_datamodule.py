from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, TensorDataset

from tests.messages import raises_recorded
from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError
from trainer.hyperparameters import LEFT_OUT


class Mine(DataModule):
    def __init__(self, batch_size: int = 32, name: str = "x", data: Any = None) -> None:
        self.save_hyperparameters(ignore=["data"])
        self.data = data

    def train_dataloader(self) -> list[int]:
        return [self.hparams.batch_size]


def test_everything_has_a_default() -> None:
    module = DataModule()
    module.prepare_data()
    module.setup("fit")
    module.teardown("fit")
    assert module.prepare_data_per_node
    for name in ("train", "val", "test", "predict"):
        assert not module.overrides(f"{name}_dataloader")
        with raises_recorded(ConfigError):
            getattr(module, f"{name}_dataloader")()
    assert module.state_dict() == {}
    module.load_state_dict({})
    assert module.hparams == {}


def test_hyperparameters(caplog: pytest.LogCaptureFixture) -> None:
    module = Mine(batch_size=8, data=object())
    assert module.hparams == {"batch_size": 8, "name": "x"}
    assert module.train_dataloader() == [8]
    assert Mine().hparams is not Mine().hparams

    class Other(DataModule):
        def __init__(self, path: object) -> None:
            self.save_hyperparameters("path")

    other = Other(object())
    assert "Other: the hyperparameters path (object) are not data" in caplog.text
    assert other.hyperparameters_to_store() == ({}, {"path": LEFT_OUT})


def test_trainer_is_there_only_inside_a_run() -> None:
    module = Mine()
    assert module.trainer is None
    trainer: Any = object()
    module.attach(trainer)
    assert module.trainer is trainer
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.hparams == module.hparams
        assert copied.trainer is None
    module.attach(None)
    assert module.trainer is None


def test_overrides() -> None:
    assert Mine().overrides("train_dataloader")
    assert not Mine().overrides("val_dataloader")


def test_loaders_are_made_from_datasets() -> None:
    data = TensorDataset(torch.arange(6.0))
    made = DataModule.from_datasets(
        train_dataset=data, val_dataset=[data, data], test_dataset={"a": data}, batch_size=4
    )
    assert str(made) == "DataModule(train_dataloader, val_dataloader, test_dataloader)"
    assert isinstance(made.train_dataloader().sampler, RandomSampler)
    assert [len(loader) for loader in made.val_dataloader()] == [2, 2]
    assert isinstance(made.test_dataloader()["a"].sampler, SequentialSampler)
    assert not made.overrides("predict_dataloader")
