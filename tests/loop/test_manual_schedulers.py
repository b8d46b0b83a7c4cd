"""With manual optimization the module steps its own schedulers, through `lr_schedulers()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, Trainer, TrainModule


class Manual(TrainModule):
    automatic_optimization = False

    def __init__(self, schedulers: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.schedulers = schedulers

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).square().mean())
        optimizer.step()
        ours = self.lr_schedulers()
        for scheduler in ours if isinstance(ours, list) else [ours]:
            scheduler.step()

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _ in range(self.schedulers)]


@pytest.mark.parametrize("schedulers", [1, 2])
def test_they_step_when_the_module_says_so_and_never_by_themselves(schedulers: int) -> None:
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Manual(schedulers), [torch.ones(1, 2)] * 3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5 ** (6 * schedulers)


class Halving:
    """A schedule that is none of torch's, and knows how often it was stepped."""

    def __init__(self) -> None:
        self.count = 0

    def halve(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Scheduled(Toy):
    """With manual optimization and a schedule; steps it by its method `halve`."""

    automatic_optimization = False

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self._loss(batch))
        self.optimizers().step()
        self.lr_schedulers().halve()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = self.schedule(optimizer) if callable(self.schedule) else self.schedule
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def test_a_schedule_of_the_user_is_in_the_checkpoint(tmp_path: Path) -> None:
    first, second = Halving(), Halving()
    trainer = quiet(max_steps=3)
    trainer.fit(Scheduled(first), loader(5))
    trainer.save_checkpoint(tmp_path / "three")
    quiet(max_steps=5).fit(Scheduled(second), loader(5), ckpt_path=tmp_path / "three")
    assert (first.count, second.count) == (3, 5)


class Automatic(Scheduled):
    automatic_optimization = True
    training_step = Toy.training_step


class Override(Automatic):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.halve()


def test_an_override_steps_a_schedule_without_step() -> None:
    halving = Halving()
    quiet(max_epochs=2).fit(Override(halving), loader(3))
    assert halving.count == 2


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        (Automatic, Halving()),
        (Automatic, ReduceLROnPlateau),
        (Automatic, lambda optimizer: ReduceLROnPlateau(optimizer)),
        (Override, lambda optimizer: ReduceLROnPlateau(optimizer)),
        (Scheduled, object()),
        (Override, object()),
        (Scheduled, lambda optimizer: optimizer),
        (Scheduled, {"scheduler": Halving(), "interval": "batch"}),
    ],
)
def test_what_is_no_schedule(kind: Any, schedule: Any) -> None:
    module = kind(None)
    module.schedule = (lambda optimizer: schedule) if isinstance(schedule, type) else schedule
    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(module, loader(1))


@pytest.mark.parametrize(
    ("option", "reported"), [({"monitor": "loss"}, 1), ({"frequency": 2}, 1), ({"interval": "step"}, 0)]
)
def test_options_without_an_effect_are_reported(
    option: dict[str, Any], reported: int, caplog: pytest.LogCaptureFixture
) -> None:
    quiet(max_epochs=1).fit(Scheduled({"scheduler": Halving(), **option}), loader(1))
    assert caplog.text.count("monitor and frequency of Halving have no effect") == reported


class Counted(torch.optim.SGD):
    scales: list[float]

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        self.scales.append(scale)
        return super().step(closure)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp"])
def test_arguments_of_the_optimizers_step(precision: str, strategy: str) -> None:
    class Passes(Toy):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self._loss(batch) * 1e-4)  # times the loss scale, float16 can hold it
            self.optimizers().step(scale=3.0)

        def configure_optimizers(self) -> Any:
            optimizer = Counted(self.parameters(), lr=0.1)
            optimizer.scales = []
            return optimizer

    trainer = quiet(max_epochs=1, precision=precision, strategy=strategy, devices=1)
    trainer.fit(Passes(), loader(2))
    optimizer: Any = trainer.optimizers[0]
    assert optimizer.scales == [3.0, 3.0]
