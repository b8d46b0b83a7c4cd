"""Accelerators and strategies of a Trainer can be given, asked and compared as with Lightning."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import pytorch_lightning.accelerators as theirs
import torch
from pytorch_lightning.strategies import StrategyRegistry

from tests.helpers.toy import Toy, loader
from tests.messages import raises_recorded
from trainer import ConfigError, Trainer
from trainer.callbacks import ModelCheckpoint
from trainer.strategies import STRATEGIES, DDPStrategy, FSDPStrategy, SingleDeviceStrategy

ours: Any = import_module("trainer.accelerators")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["CPUAccelerator", "CUDAAccelerator", "MPSAccelerator", "XLAAccelerator"])
def test_what_an_accelerator_knows(name: str) -> None:
    mine, other = getattr(ours, name), getattr(theirs, name)
    assert mine.is_available() == other.is_available()
    assert mine().is_available() == other.is_available()
    assert issubclass(mine, ours.Accelerator)
    if name != "XLAAccelerator":  # Lightning's needs torch_xla
        assert mine.name() == other.name()
        assert mine.auto_device_count() == other.auto_device_count()


@pytest.mark.parametrize("devices", [1, 3, "2"])
def test_devices_of_the_cpu(devices: Any) -> None:
    assert ours.CPUAccelerator.parse_devices(devices) == theirs.CPUAccelerator.parse_devices(devices)
    with raises_recorded(ConfigError):
        ours.CPUAccelerator.parse_devices(0)
    with raises_recorded(ConfigError):
        ours.CUDAAccelerator.parse_devices(2)
    mine = ours.CPUAccelerator().get_device_stats(torch.device("cpu"))
    assert mine.keys() == theirs.CPUAccelerator().get_device_stats("cpu").keys()


def test_a_trainer_with_an_accelerator(tmp_path: Path) -> None:
    accelerator = ours.CPUAccelerator()
    trainer = Trainer(accelerator=accelerator, devices=1, max_epochs=1, default_root_dir=tmp_path, logger=False)
    trainer.fit(Toy(), loader(2))
    assert isinstance(trainer.accelerator, ours.CPUAccelerator)
    assert not isinstance(trainer.accelerator, ours.CUDAAccelerator)
    assert isinstance(Trainer(accelerator="cpu").accelerator, ours.Accelerator)
    again = Trainer(accelerator=accelerator, devices=1, max_epochs=2, default_root_dir=tmp_path, logger=False)
    checkpoint: Any = trainer.checkpoint_callback
    assert isinstance(checkpoint, ModelCheckpoint)
    again.fit(Toy(), loader(2), ckpt_path=checkpoint.best_model_path)
    assert again.current_epoch == 2

    class Own(ours.Accelerator):  # type: ignore[misc, name-defined]
        pass

    with raises_recorded(ConfigError):
        Trainer(accelerator=Own())


CLASSES = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "single_device": SingleDeviceStrategy}
ELSEWHERE = ("deepspeed_stage_3_offload_nvme", "single_xla", "single_tpu", "xla_debug")
"""Lightning's names that are answered in words."""


@pytest.mark.parametrize("name", StrategyRegistry.available_strategies())
def test_strategies_by_lightnings_names(name: str) -> None:
    if name in ELSEWHERE:
        with raises_recorded(ConfigError):
            Trainer(strategy=name)
    elif name not in STRATEGIES:
        strategy: Any = Trainer(strategy=name, accelerator="cpu", devices=2).strategy
        assert type(strategy) is CLASSES[name.split("_")[0]]
        if "unused" in name:
            assert strategy.options["find_unused_parameters"] == name.endswith("true")
        if name == "fsdp_cpu_offload":
            assert strategy.cpu_offload


def test_strategies_as_objects() -> None:
    for given in (SingleDeviceStrategy(), DDPStrategy(find_unused_parameters=True)):
        trainer = Trainer(strategy=given, accelerator="cpu", devices=1 + (type(given) is DDPStrategy))
        assert trainer.strategy is given
    assert "strategy" in inspect.signature(Trainer).parameters
