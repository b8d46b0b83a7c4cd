"""LearningRateMonitor: names, and that a step's value is the rate it was made with."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, Logger
from trainer.callbacks import BadStepGuard, LearningRateMonitor, ModelCheckpoint


class Kept(Logger):
    """A logger that keeps all values: {name: [(step, value)]}."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, float]]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.values.setdefault(name, []).append((step, value))


class Configured(Toy):
    def __init__(self, configure: Any) -> None:
        super().__init__()
        self.second = torch.nn.Linear(4, 1)
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def rates(configure: Any, **options: Any) -> dict[str, list[tuple[int, float]]]:
    kept = Kept()
    settings = {"max_epochs": 2, "log_every_n_steps": 1}
    trainer = quiet(**settings, logger=kept, callbacks=[LearningRateMonitor(**options)])
    trainer.fit(Configured(configure), loader(3))
    return {name: values for name, values in kept.values.items() if name != "train_loss"}


def halving(optimizer: torch.optim.Optimizer, interval: str, **more: Any) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval, **more}}


def by_step(module: Any) -> Any:
    return halving(torch.optim.AdamW(module.parameters(), lr=1.0), "step")


def by_epoch(module: Any) -> Any:
    return halving(torch.optim.AdamW(module.parameters(), lr=1.0), "epoch")


STEPS = [(1, 1.0), (2, 0.5), (3, 0.25), (4, 0.125), (5, 0.0625), (6, 0.03125)]


def test_as_often_as_the_scheduler_steps() -> None:
    assert rates(by_step) == {"lr-AdamW": STEPS}
    assert rates(by_epoch) == {"lr-AdamW": [(3, 1.0), (6, 0.5)]}


def test_as_asked() -> None:
    assert rates(by_step, logging_interval="step") == {"lr-AdamW": STEPS}
    assert rates(by_step, logging_interval="epoch") == {"lr-AdamW": [(3, 1.0), (6, 0.125)]}
    assert rates(by_epoch, logging_interval="step")["lr-AdamW"] == [(n, 1.0 if n < 4 else 0.5) for n in range(1, 7)]


def test_a_resumed_epoch_logs_the_rate_of_its_start() -> None:
    uninterrupted, first, second = Kept(), Kept(), Kept()
    for kept, steps, ckpt_path in ((uninterrupted, 6, None), (first, 4, None), (second, 6, "last")):
        trainer = quiet(
            max_steps=steps,
            logger=kept,
            enable_checkpointing=True,
            callbacks=[LearningRateMonitor("epoch"), ModelCheckpoint(every_n_train_steps=2)],
        )
        trainer.fit(Configured(by_step), loader(3), ckpt_path=ckpt_path)
    # max_steps ends the first run inside its second epoch: on_train_epoch_end comes there and where the batches end.
    assert first.values["lr-AdamW"] == [(3, 1.0), (4, 0.125)]
    assert first.values["lr-AdamW"][:1] + second.values["lr-AdamW"] == uninterrupted.values["lr-AdamW"]


class OwnName(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr-SGD", 7.0)
        return super().training_step(batch, batch_idx)


def test_rates_are_not_mixed_with_other_values() -> None:
    with raises_recorded(ConfigError):
        quiet(max_steps=1, log_every_n_steps=1, callbacks=LearningRateMonitor()).fit(OwnName(), loader())


class FirstIsBad(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 0 else 1.0)


def test_an_epoch_whose_first_step_is_skipped_has_its_rate() -> None:
    kept = Kept()
    module = FirstIsBad()
    module.configure_optimizers = lambda: by_epoch(module)  # type: ignore[method-assign]
    callbacks = [LearningRateMonitor("epoch"), BadStepGuard("skip")]
    quiet(max_epochs=3, log_every_n_steps=1, logger=kept, callbacks=callbacks).fit(module, loader(3))
    assert [rate for _, rate in kept.values["lr-AdamW"]] == [1.0, 0.5, 0.25]
