"""Callbacks that end a run at a step: with an error, or as asked."""

from __future__ import annotations

from typing import Any

from trainer import Callback, Trainer, TrainModule


class Crash(Callback):
    """A callback that ends the run with an error right after a complete step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.on_validation_start(trainer, module)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("crash")


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == self.step:
            trainer.stop("enough")
