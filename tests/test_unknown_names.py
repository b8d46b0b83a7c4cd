"""An unknown name of a package is answered with the current or nearest name, by `import` and as an attribute."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pickle
import subprocess
import sys

import pytest
import torch

from tests.messages import raises_recorded
from trainer import Trainer
from trainer.errors import ConfigError
from trainer.strategies import DDPStrategy

UNKNOWN = [
    ("trainer.callbacks", "EarlyStoping", "Did you mean 'EarlyStopping'? Known: "),
    ("trainer.strategies", "FSDPStrateg", "Did you mean 'FSDPStrategy'? Known: "),
    ("trainer", "Trainr", "Did you mean 'Trainer'? Known: "),
    ("trainer", "xyzzy", "Known: Callback, "),
    ("trainer", "ModelCheckpoint", "Use trainer.callbacks.ModelCheckpoint. Known: "),
    ("trainer", "XlaStrategy", "Use trainer.strategies.XlaStrategy. Known: "),
]
PACKAGES = ["trainer", "trainer.callbacks", "trainer.strategies"]


@pytest.mark.parametrize(("package", "name", "advice"), UNKNOWN)
def test_the_error_gives_the_current_or_nearest_name(package: str, name: str, advice: str) -> None:
    with pytest.raises(ImportError, match=f"^unknown name in {package}: '{name}'. ") as imported:
        exec(f"from {package} import {name}")
    assert advice in str(imported.value)
    assert "no_such_name" not in str(imported.value)
    assert (imported.value.name, type(imported.value)) == (package, ImportError)
    with pytest.raises(AttributeError) as looked_up:
        getattr(importlib.import_module(package), name)
    assert str(looked_up.value) == str(imported.value)


@pytest.mark.parametrize("package", PACKAGES)
def test_it_is_an_attribute_error_to_all_others(package: str) -> None:
    module = importlib.import_module(package)
    assert not hasattr(module, "StepTimes")
    assert getattr(module, "StepTimes", None) is None
    with pytest.raises(AttributeError, match="StepTimes"):
        pickle.loads(f"c{package}\nStepTimes\n.".encode())
    assert inspect.getmembers(module)
    assert inspect.unwrap(module) is module  # type: ignore[arg-type]
    doctest.DocTestFinder().find(module)
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{package}.nothing'"):
        importlib.import_module(f"{package}.nothing")


def test_submodules_and_stars_are_imported() -> None:
    lines = [
        "from trainer import launchers, cli",
        "from trainer.callbacks import timer",
        "from trainer.strategies import ddp",
    ]
    lines += [f"from {package} import *" for package in PACKAGES]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


class OfEarlierVersion(DDPStrategy):
    def bakward(self, loss: torch.Tensor) -> None: ...

    def barrier(self) -> None: ...

    def compress(self) -> None: ...


def test_a_strategy_with_a_name_that_is_never_used_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer(strategy=OfEarlierVersion(), accelerator="cpu", devices=1)
    expected = {"bakward": "Did you mean 'backward'?", "barrier": "Use strategy.processes.barrier."}
    for name, advice in expected.items():
        assert f"OfEarlierVersion.{name} is never used: Strategy has no such name. {advice}" in str(refused.value)
    assert "compress" not in str(refused.value)


def test_an_option_of_lightnings_strategies_is_answered_in_words() -> None:
    with raises_recorded(ConfigError):
        DDPStrategy(cluster_environment="slurm")  # type: ignore[call-arg]
