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


def test_without_a_scheduler_it_is_logged_by_step() -> None:
    configure = lambda module: torch.optim.SGD(module.parameters(), lr=0.1)  # noqa: E731
    assert rates(configure) == {"lr-SGD": [(n, 0.1) for n in range(1, 7)]}


def test_names() -> None:
    def named(module: Any) -> Any:
        return halving(torch.optim.AdamW(module.parameters(), lr=1.0), "step", name="my-lr")

    def groups(module: Any) -> Any:
        two = [{"params": module.layer.parameters()}, {"params": module.second.parameters(), "lr": 0.5}]
        return torch.optim.AdamW(two, lr=1.0)

    def named_groups(module: Any) -> Any:
        two = [
            {"params": module.layer.parameters(), "name": "body"},
            {"params": module.second.parameters(), "name": "head"},
        ]
        return torch.optim.AdamW(two, lr=1.0)

    assert list(rates(named)) == ["my-lr"]
    assert list(rates(groups)) == ["lr-AdamW/pg1", "lr-AdamW/pg2"]
    assert rates(groups)["lr-AdamW/pg2"][0] == (1, 0.5)
    assert list(rates(named_groups)) == ["lr-AdamW/body", "lr-AdamW/head"]


def test_two_optimizers_of_one_class() -> None:
    class Manual(Configured):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self._loss(batch) + self.second(batch[0]).pow(2).mean())
            for optimizer in self.optimizers():
                optimizer.step()

    kept = Kept()
    trainer = quiet(max_epochs=1, log_every_n_steps=1, logger=kept, callbacks=[LearningRateMonitor()])
    both = lambda m: [torch.optim.Adam(m.layer.parameters(), lr=1.0), torch.optim.Adam(m.second.parameters(), lr=2.0)]  # noqa: E731
    trainer.fit(Manual(both), loader(1))
    assert kept.values == {"lr-Adam": [(1, 1.0)], "lr-Adam-1": [(1, 2.0)]}


def test_momentum_and_weight_decay() -> None:
    def sgd(module: Any) -> Any:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    values = rates(sgd, log_momentum=True, log_weight_decay=True)
    assert {name: v[0][1] for name, v in values.items()} == {
        "lr-SGD": 0.1,
        "lr-SGD-momentum": 0.9,
        "lr-SGD-weight_decay": 0.01,
    }
    assert rates(by_step, log_momentum=True)["lr-AdamW-momentum"][0] == (1, 0.9)


def test_groups_of_one_name_are_numbered() -> None:
    def twice(module: Any) -> Any:
        groups = [{"params": part.parameters(), "name": "body"} for part in (module.layer, module.second)]
        return torch.optim.AdamW(groups)

    assert list(rates(twice)) == ["lr-AdamW/body-pg1", "lr-AdamW/body-pg2"]


def test_accumulation_does_not_change_the_value() -> None:
    kept = Kept()
    trainer = quiet(
        max_epochs=1, accumulate_grad_batches=3, log_every_n_steps=1, logger=kept, callbacks=[LearningRateMonitor()]
    )
    trainer.fit(Configured(lambda m: torch.optim.SGD(m.parameters(), lr=0.1)), loader(6))
    assert kept.values["lr-SGD"] == [(1, 0.1), (2, 0.1)]


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


def test_a_wrong_interval() -> None:
    with raises_recorded(ConfigError):
        LearningRateMonitor("epochs")


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
