"""The table of callbacks, and the guard against importing the folder under another name."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

import trainer.callbacks
from trainer import Callback, ConfigError
from trainer.callback import PROFILERS, callback_named
from trainer.callbacks import CALLBACKS


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
    assert found == set(CALLBACKS)
    assert set(PROFILERS.values()) <= set(CALLBACKS)


def test_by_name() -> None:
    assert callback_named("Timer") is CALLBACKS["Timer"]
    with pytest.raises(ConfigError, match=r"unknown callback 'EarlyStoping'. Did you mean 'EarlyStopping'"):
        callback_named("EarlyStoping")


def test_the_folder_refuses_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    monkeypatch.delitem(sys.modules, "callbacks", raising=False)
    with pytest.raises(ImportError, match=r"from trainer.callbacks import"):
        importlib.import_module("callbacks")
