"""The table of callbacks, and the guard against importing the folder under another name."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

import trainer.callbacks
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Logger, Trainer
from trainer.callback import DEFAULT_CALLBACKS, Checkpoint, callback_named
from trainer.callbacks import CALLBACKS
from trainer.errors import MissingPackageError
from trainer.settings import PROFILERS


def test_every_callback_of_the_folder_is_in_the_table() -> None:
    found = set()
    for module in pkgutil.iter_modules(trainer.callbacks.__path__):
        members = vars(importlib.import_module(f"trainer.callbacks.{module.name}"))
        found |= {
            name
            for name, value in members.items()
            if isinstance(value, type)
            and issubclass(value, Callback)
            and value.__module__ == f"trainer.callbacks.{module.name}"
        }
    assert found - {"AveragingCallback", "ValueMonitor"} == set(CALLBACKS)  # bases of two of them each
    assert set(PROFILERS.values()) <= set(CALLBACKS)
    assert {CALLBACKS[name].in_place_of for name in DEFAULT_CALLBACKS.values()} == set(DEFAULT_CALLBACKS)


def test_by_name() -> None:
    assert callback_named("Timer") is CALLBACKS["Timer"]
    with raises_recorded(ConfigError):
        callback_named("EarlyStoping")


def test_the_folder_refuses_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    monkeypatch.delitem(sys.modules, "callbacks", raising=False)
    with pytest.raises(ImportError, match=r"from trainer.callbacks import"):
        importlib.import_module("callbacks")


@pytest.mark.parametrize("argument", DEFAULT_CALLBACKS)
def test_a_callback_of_the_user_replaces_a_default(argument: str) -> None:
    base: type[Callback] = Checkpoint if argument == "enable_checkpointing" else Callback
    own = type("Own", (base,), {"in_place_of": argument})()
    inherited = type("Mine", (CALLBACKS[DEFAULT_CALLBACKS[argument]],), {})()
    for given in (own, inherited):
        kinds = {type(callback).__name__ for callback in Trainer(callbacks=[given], logger=False).callbacks}
        others = set(DEFAULT_CALLBACKS.values()) - {DEFAULT_CALLBACKS[argument]}
        assert kinds == others | {type(given).__name__}


@pytest.mark.parametrize(
    "name",
    ["DeviceStatsMonitor", "MLFlowLogger", "RichProgressBar", "TensorBoardLogger", "WandbLogger"],
)
def test_a_missing_package_is_named_at_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.errors.find_spec", lambda package: None)
    own = CALLBACKS[name]()
    given: dict[str, Any] = {"logger": own} if isinstance(own, Logger) else {"callbacks": own}
    with raises_recorded(MissingPackageError):
        quiet(max_steps=1, **given).fit(Toy(), loader(1))
