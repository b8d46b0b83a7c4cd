"""A class that a callback or logger has as its second base is constructed, too, where Lightning does so."""

from __future__ import annotations

from typing import Any

import pytest

from trainer import Callback, DataModule
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    GradientAccumulationScheduler,
    MLFlowLogger,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    TensorBoardLogger,
    ThroughputMonitor,
    Timer,
    WandbLogger,
)


class Mixin:
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.connected: list[str] = []


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Callback, ()),
        (DataModule, ()),
        (CSVLogger, ()),
        (EarlyStopping, ("val_loss",)),
        (GradientAccumulationScheduler, ({0: 1},)),
        (MLFlowLogger, ()),
        (ModelCheckpoint, ()),
        (OnExceptionCheckpoint, ("folder",)),
        (TensorBoardLogger, ()),
        (ThroughputMonitor, (len,)),
        (Timer, ()),
        (WandbLogger, ()),
    ],
)
def test_the_second_base_is_constructed(kind: type, arguments: tuple[Any, ...]) -> None:
    assert type(f"With{kind.__name__}", (kind, Mixin), {})(*arguments).connected == []
