"""Optimizers and schedules of a configuration: schedules of schedules, functions, and factories as arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from tests.messages import raises_recorded
from trainer import TrainModule
from trainer.config.loading import load
from trainer.config.read import read
from trainer.config.tree import Diagnostics
from trainer.errors import ConfigError

STEPS = 8


class Line(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(STEPS, 1)), 1)


class Made(Line):
    """Makes its optimizer and schedule by functions that it is given, as with LightningCLI."""

    def __init__(
        self,
        optimizer: Callable[[Iterable[Any]], Optimizer] = AdamW,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        loss: Callable[[torch.Tensor], torch.Tensor] = torch.square,
    ) -> None:
        super().__init__()
        self.make, self.schedule, self.loss = optimizer, scheduler, loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.layer(batch[0])).mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        step = self.schedule and {"scheduler": self.schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, **({"lr_scheduler": step} if step else {})}


def halved(step: int) -> float:
    """A factor of a learning rate."""
    return 0.5**step


def warmed_up(optimizer: Optimizer, steps: int) -> LRScheduler:
    """A schedule that is made by a function."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def built(text: str, *typed: tuple[str, str], folder: Path) -> Any:
    """Return the trainer and module of a configuration, and those of the configuration that the run would keep."""
    found = Diagnostics()
    file = folder / "run.yaml"
    file.write_text(text + "\ntrainer: {max_epochs: 1, accelerator: cpu, logger: false, enable_checkpointing: false}\n")
    configuration = load(read([str(file)], [], found), found)
    file.write_text(configuration.resolved)
    again = load(read([str(file)], [], found), found)
    assert again.resolved == configuration.resolved
    return configuration.build()[:2], again.build()[:2]


def rates(text: str, folder: Path) -> list[float]:
    """Return the learning rate of each step."""
    of_both = []
    for trainer, module in built(text, folder=folder):
        used: list[float] = []
        module.on_train_batch_start = lambda *_, used=used, module=module: used.append(
            module.trainer.optimizers[0].param_groups[0]["lr"]
        )
        trainer.fit(module)
        of_both.append(used)
    assert of_both[0] == of_both[1]
    return of_both[0]


def by_hand(schedule: Callable[[Optimizer], LRScheduler]) -> list[float]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, used = schedule(optimizer), []
    for _ in range(STEPS):
        optimizer.step()
        used.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return used


def transformers_cosine(optimizer: Optimizer) -> LRScheduler:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 2, STEPS)


SCHEDULES: dict[str, tuple[str, Callable[[Optimizer], LRScheduler]]] = {
    "warm-up, then cosine": (
        """
  class_path: SequentialLR
  milestones: [3]
  schedulers:
  - {class_path: LinearLR, start_factor: 0.1, total_iters: 3}
  - class_path: torch.optim.lr_scheduler.CosineAnnealingLR
    init_args: {T_max: 5}
""",
        lambda made: SequentialLR(made, [LinearLR(made, 0.1, total_iters=3), CosineAnnealingLR(made, 5)], [3]),
    ),
    "a function of a factor": (
        "{class_path: LambdaLR, lr_lambda: tests.config.test_schedules.halved}",
        lambda made: LambdaLR(made, halved),
    ),
    "several factors": (
        "{class_path: LambdaLR, lr_lambda: [tests.config.test_schedules.halved]}",
        lambda made: LambdaLR(made, [halved]),
    ),
    "a function that makes the schedule": (
        "{class_path: tests.config.test_schedules.warmed_up, init_args: {steps: 4}}",
        lambda made: warmed_up(made, 4),
    ),
    "a function of transformers": (
        "{class_path: transformers.get_cosine_schedule_with_warmup, num_warmup_steps: 2, num_training_steps: 8}",
        transformers_cosine,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_a_file_has_the_rates_of_one_by_hand(name: str, tmp_path: Path) -> None:
    text, schedule = SCHEDULES[name]
    as_step = (
        text.replace("class_path:", "interval: step, class_path:", 1) if text[0] == "{" else f"{text}  interval: step\n"
    )
    found = rates(
        f"module: tests.config.test_schedules.Line\noptimizer: {{class_path: SGD, lr: 0.1}}\nlr_scheduler: {as_step}",
        tmp_path,
    )
    assert found == by_hand(schedule)


MADE: dict[str, tuple[str, str, float]] = {
    "the class alone": ("{optimizer: torch.optim.AdamW}", "AdamW", 1e-3),
    "with arguments": ("{optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.2}}}", "SGD", 0.2),
    "its default": ("{loss: torch.abs}", "AdamW", 1e-3),
    "a schedule, too": (
        "{optimizer: {class_path: torch.optim.SGD, lr: 0.2}, scheduler: {class_path: "
        "torch.optim.lr_scheduler.StepLR, step_size: 1, gamma: 0.5}}",
        "SGD",
        0.2 * 0.5**7,
    ),
    "an object that can be called": ("{loss: {class_path: torch.nn.Softplus, beta: 2.0}}", "AdamW", 1e-3),
}


@pytest.mark.parametrize("name", MADE)
def test_a_module_gets_functions_and_factories(name: str, tmp_path: Path) -> None:
    arguments, kind, last = MADE[name]
    text = f"module: {{class_path: tests.config.test_schedules.Made, init_args: {arguments}}}"
    for trainer, module in built(text, folder=tmp_path):
        trainer.fit(module)
        (optimizer,) = trainer.optimizers
        assert type(optimizer).__name__ == kind
        assert trainer.global_step == STEPS
    assert rates(text, tmp_path)[-1] == pytest.approx(last)


WRONG = (
    "{optimizer: torch.optim.AdamWW}",
    "{optimizer: {class_path: torch.optim.SGD, learning_rate: 0.2}}",
    "{loss: torch.pi}",
    "{scheduler: {class_path: torch.optim.lr_scheduler.StepLR}}",
    "{loss: {class_path: torch.optim.lr_scheduler.StepLR, step_size: 1}}",
)


@pytest.mark.parametrize("arguments", WRONG)
def test_what_is_no_such_function_is_reported(arguments: str, tmp_path: Path) -> None:
    with raises_recorded(ConfigError):
        built(f"module: {{class_path: tests.config.test_schedules.Made, init_args: {arguments}}}", folder=tmp_path)
