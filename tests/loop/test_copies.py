"""A copy of a Trainer is a new one with the same arguments."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Toy, loader
from trainer import Callback, Trainer
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    ThroughputMonitor,
    Timer,
)


class Keeps(Callback):
    """Keeps the trainer and the module, as callbacks like to."""

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        self.trainer, self.module = trainer, module


class Named(Trainer):
    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.name = name


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def trainer_in(folder: Path) -> Named:
    callbacks = [Keeps(), ModelCheckpoint(), EarlyStopping("val_loss"), ProgressBar(), LearningRateMonitor(), Timer()]
    return Named(
        "mine",
        max_epochs=1,
        accelerator="cpu",
        callbacks=[*callbacks, ThroughputMonitor()],
        logger=[CSVLogger()],
        default_root_dir=folder,
        seed=4,
    )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, through_pickle])
@pytest.mark.parametrize("has_run", [False, True])
def test_a_copy_can_train(copied: Callable[[Any], Any], has_run: bool, tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    if has_run:
        trainer.fit(Toy(), loader(2), loader(1))
    before = torch.get_rng_state()
    other = copied(trainer)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(other) is Named
    assert (other.name, other.global_step, other.settings.max_epochs) == ("mine", 0, 1)
    assert (other.callbacks[0] is trainer.callbacks[0]) == (copied is copy.copy)
    other.fit(Toy(), loader(3), loader(1))
    assert other.global_step == 3
    assert trainer.global_step == 2 * has_run


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
def test_what_keeps_a_trainer_can_be_copied(copied: Callable[[Any], Any], tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    trainer.fit(Toy(), loader(2), loader(1))
    for callback in trainer.callbacks:
        assert type(copied(callback)) is type(callback)
