"""`trainer.callbacks` can be replaced and extended between runs, as packages that log by themselves do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer
from trainer.callbacks import CSVLogger, ModelCheckpoint


class Notes(Callback):
    """Notes its name, the order of calls."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    @property
    def state_key(self) -> str:
        return self.name

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.calls.append(self.name)


def appended(trainer: Trainer, new: Callback) -> None:
    trainer.callbacks.append(new)


def added(trainer: Trainer, new: Callback) -> None:
    trainer.callbacks += [new]


def replaced(trainer: Trainer, new: Callback) -> None:
    trainer.callbacks = [new]


@pytest.mark.parametrize("fits_before", [0, 1])
@pytest.mark.parametrize(("change", "called"), [(appended, "ab"), (added, "ab"), (replaced, "b")])
def test_the_next_run_calls_the_callbacks_that_are_set(
    change: Callable[[Trainer, Callback], None], called: str, fits_before: int
) -> None:
    calls: list[str] = []
    trainer = quiet(max_steps=1, callbacks=[Notes("a", calls)])
    for _ in range(fits_before):
        trainer.fit(Toy(), loader())
    calls.clear()
    new = Notes("b", calls)
    change(trainer, new)
    assert trainer.callbacks[-1] is new
    trainer.fit(Toy(), loader())
    assert "".join(calls) == called


def test_loggers_stay_and_what_the_settings_leave_out_is_left_out() -> None:
    logger, calls = CSVLogger("logs"), list[str]()
    trainer = quiet(max_steps=1, logger=logger)
    trainer.callbacks = [ModelCheckpoint(), Notes("a", calls)]
    trainer.fit(Toy(), loader())
    assert [type(one) for one in trainer.callbacks] == [Notes, CSVLogger]
    assert trainer.loggers == [logger]
    assert not trainer.checkpoint_callbacks


class Sets(Callback):
    """Sets the callbacks within a run."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.callbacks = []


def test_what_is_wrong_is_refused() -> None:
    trainer = quiet(max_steps=1, callbacks=[Sets()])
    with raises_recorded(ConfigError):
        trainer.callbacks = ["early stopping"]  # type: ignore[list-item]
    with raises_recorded(ConfigError):
        trainer.callbacks = [kept := Callback(), kept]
    with raises_recorded(ConfigError):
        trainer.fit(Toy(), loader())
    assert [type(one) for one in trainer.callbacks] == [Sets]
