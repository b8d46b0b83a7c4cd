"""One device against a hand-written torch loop: the same weights, buffers and optimizer states to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.processes import DEVICE
from trainer import Trainer, TrainModule, seed_everything

EPOCHS = 2
FEATURES, CLASSES = 6, 3


@dataclass
class Case:
    """A training that both the hand-written loop and the module below can run."""

    optimizers: Callable[[nn.Module], list[Optimizer]]
    samples: int = 40
    accumulate: int = 1
    clip: float | None = None
    clip_algorithm: str = "norm"
    scheduler: Callable[[Optimizer], Any] | None = None
    interval: str = "epoch"
    precision: str = "32-true"
    dropout: float = 0.0


def sgd(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, momentum=0.9)]


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2)]


def one_for_each_half(model: Any) -> list[Optimizer]:
    return [SGD(model.body.parameters(), lr=0.1, momentum=0.9), AdamW(model.head.parameters(), lr=1e-2)]


def every_step(optimizer: Optimizer) -> Any:
    return CosineAnnealingLR(optimizer, T_max=8)


def every_epoch(optimizer: Optimizer) -> Any:
    return ExponentialLR(optimizer, gamma=0.5)


def on_plateau(optimizer: Optimizer) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0, threshold_mode="abs")


CASES = {
    "sgd": Case(sgd),
    "sgd, short batch": Case(sgd, samples=38),
    "sgd, window of 3": Case(sgd, accumulate=3),
    "sgd, window of 3, short batch": Case(sgd, accumulate=3, samples=30),
    "adamw": Case(adamw),
    "adamw, window of 3": Case(adamw, accumulate=3),
    "adamw, window of 3, short batch": Case(adamw, accumulate=3, samples=30),
    "clipped by norm": Case(sgd, clip=0.05, accumulate=3),
    "clipped by value": Case(sgd, clip=0.01, clip_algorithm="value"),
    "scheduler by step": Case(sgd, scheduler=every_step, interval="step", accumulate=3, samples=30),
    "scheduler by epoch": Case(adamw, scheduler=every_epoch),
    "scheduler on plateau": Case(sgd, scheduler=on_plateau, samples=30),
    "bf16-mixed": Case(adamw, precision="bf16-mixed", accumulate=3, clip=0.05),
    "16-mixed": Case(sgd, precision="16-mixed", samples=10, accumulate=2, clip=0.05),
    "64-true": Case(adamw, precision="64-true", accumulate=3, samples=30),
    "bf16-true": Case(sgd, precision="bf16-true", accumulate=3),
    "dropout": Case(adamw, dropout=0.5, accumulate=3),
    "two optimizers": Case(one_for_each_half, accumulate=3, clip=0.05),
}
DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16}
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class Classifier(TrainModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(case.dropout))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizers = self.case.optimizers(self)
        if self.case.scheduler is None:
            return optimizers
        scheduler = {
            "scheduler": self.case.scheduler(optimizers[0]),
            "interval": self.case.interval,
            "monitor": "val_loss",
        }
        return {"optimizer": optimizers[0], "lr_scheduler": scheduler}


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (samples,), generator=generator))


def train_by_hand(model: Classifier, case: Case) -> tuple[list[Optimizer], Any]:
    """Train with plain torch, as a careful user would."""
    model.to(DEVICE, dtype := DTYPES.get(case.precision, torch.float32))
    for norm in [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)] if dtype.itemsize < 4 else ():
        norm.float()  # statistics lose digits in 16 bits
    # A generator of its own: torch's DataLoader would draw from the global one, and the trainer's does not.
    loader = DataLoader(make_data(case.samples), 4, generator=torch.Generator())
    batches = [(x.to(DEVICE, dtype), y.to(DEVICE)) for x, y in loader]
    optimizers = case.optimizers(model)
    parameters = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    scheduler = case.scheduler(optimizers[0]) if case.scheduler else None
    half = AUTOCAST.get(case.precision)
    scaler = torch.amp.GradScaler(DEVICE, enabled=case.precision == "16-mixed")
    for _ in range(EPOCHS):
        for first in range(0, len(batches), case.accumulate):
            window = batches[first : first + case.accumulate]
            samples = sum(len(x) for x, _ in window)
            equal = all(len(x) == len(window[0][0]) for x, _ in window)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for x, y in window:
                with torch.autocast(DEVICE, half) if half else nullcontext():
                    loss = cross_entropy(model(x), y)
                loss = loss / len(window) if equal else loss / (samples / len(x))
                scaler.scale(loss).backward()
            for optimizer, own in zip(optimizers, parameters, strict=True):
                scaler.unscale_(optimizer)
                if case.clip is not None and case.clip_algorithm == "norm":
                    nn.utils.clip_grad_norm_(own, case.clip)
                elif case.clip is not None:
                    nn.utils.clip_grad_value_(own, case.clip)
                scaler.step(optimizer)
            scaler.update()
            if scheduler is not None and case.interval == "step":
                scheduler.step()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(validation_loss(model, batches))
        elif scheduler is not None and case.interval == "epoch":
            scheduler.step()
    return optimizers, scheduler


def validation_loss(model: nn.Module, batches: list[Any]) -> float:
    model.eval()
    with torch.no_grad():
        total = sum(cross_entropy(model(x), y).item() * len(x) for x, y in batches)
    model.train()
    return total / sum(len(x) for x, _ in batches)


@pytest.mark.parametrize("name", CASES)
def test_one_device_has_the_same_bits_as_a_hand_written_loop(name: str) -> None:
    case = CASES[name]
    seed_everything(7)
    expected = Classifier(case)
    start = {key: value.clone() for key, value in expected.state_dict().items()}
    expected_optimizers, expected_scheduler = train_by_hand(expected, case)

    trainer = Trainer(
        seed=7,
        max_epochs=EPOCHS,
        precision=case.precision,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_algorithm,
        **QUIET,
    )
    module = Classifier(case)
    data = make_data(case.samples)
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 4))

    assert_same_bits(module.state_dict(), expected.state_dict())
    assert not torch.equal(module.head.weight, start["head.weight"].to(module.head.weight))
    ours, theirs = ([o.state_dict() for o in optimizers] for optimizers in (trainer.optimizers, expected_optimizers))
    assert any(group["state"] for group in theirs)
    assert_same_bits(ours, theirs)
    if expected_scheduler is not None:
        assert_same_bits(trainer.scheduler_configs[0].scheduler.state_dict(), expected_scheduler.state_dict())
        assert ours[0]["param_groups"][0]["lr"] != sgd(module)[0].param_groups[0]["lr"]


def test_every_case_is_a_different_training() -> None:
    """A case that changes nothing would test nothing."""
    ends = set()
    for case in CASES.values():
        seed_everything(7)
        model = Classifier(case)
        train_by_hand(model, case)
        ends.add(tuple(model.head.weight.double().flatten().tolist()))
    assert len(ends) == len(CASES)


@pytest.mark.parametrize(("accumulate", "line_search"), [(1, "strong_wolfe"), (3, None)])
def test_lbfgs_has_the_same_bits_as_a_hand_written_loop(accumulate: int, line_search: str | None) -> None:
    def optimizer_of(model: nn.Module) -> list[Optimizer]:
        return [LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=line_search)]

    case = Case(optimizer_of, accumulate=accumulate, clip=0.5)
    seed_everything(7)
    expected = Classifier(case)
    batches = list(DataLoader(make_data(case.samples), 4))
    optimizer = optimizer_of(expected)[0]
    for first in list(range(0, len(batches), accumulate)) * EPOCHS:
        window = batches[first : first + accumulate]

        def closure(window: list[Any] = window) -> torch.Tensor:
            optimizer.zero_grad()
            losses = []
            for x, y in window:
                losses.append(cross_entropy(expected(x), y) / len(window))
                losses[-1].backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            return torch.stack(losses).sum()

        optimizer.step(closure)

    trainer = Trainer(seed=7, max_epochs=EPOCHS, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, **QUIET)
    module = Classifier(case)
    trainer.fit(module, DataLoader(make_data(case.samples), 4))
    assert_same_bits(module.state_dict(), expected.state_dict())
    assert_same_bits(trainer.optimizers[0].state_dict(), optimizer.state_dict())
    assert trainer.global_step == EPOCHS * -(-10 // accumulate)


def test_everything_switched_on_changes_no_bit(tmp_path: Path) -> None:
    """Progress bar, summary, loggers and checkpoints do not influence the training."""
    case = CASES["dropout"]
    seed_everything(7)
    expected = Classifier(case)
    train_by_hand(expected, case)
    trainer = Trainer(
        seed=7, max_epochs=EPOCHS, accumulate_grad_batches=3, default_root_dir=tmp_path, log_every_n_steps=1
    )
    module = Classifier(case)
    data = make_data(case.samples)
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 4))
    assert_same_bits(module.state_dict(), expected.state_dict())
