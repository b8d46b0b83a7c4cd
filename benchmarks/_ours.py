"""The benchmarks' work done by the trainer of this repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks._task import OFF, Net, Task, optimizer_of, train_with
from benchmarks._turns import Clock, Contender
from trainer import Engine, Trainer, TrainModule


class Regression(TrainModule):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)


class LoggedRegression(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


class Classification(TrainModule):
    def __init__(self, net: Net, classes: int) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__()
        self.net = net
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.net(x)
        self.log("val_loss", F.cross_entropy(logits, y))
        self.accuracy.update(logits, y)
        self.log("val_acc", self.accuracy)


def trainer(task: Task, folder: Path, **options: Any) -> Trainer:
    common: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": task.accumulate,
        "default_root_dir": folder,
    }
    return Trainer(**{**common, **options})


def all_on() -> dict[str, Any]:
    """Return the options for all on: both loggers; bar, model summary and checkpoints are on by default."""
    from trainer.callbacks import CSVLogger, TensorBoardLogger

    return {"logger": [CSVLogger(), TensorBoardLogger()]}


def training(task: Task) -> list[Contender]:
    """Return the contenders in training: everything off, one `self.log` per step, and everything on."""

    def off(clock: Clock, folder: Path) -> None:
        trainer(task, folder, **OFF).fit(Regression(Net(clock)), task.data())

    def off_and_log(clock: Clock, folder: Path) -> None:
        trainer(task, folder, **OFF).fit(LoggedRegression(Net(clock)), task.data())

    def on(clock: Clock, folder: Path) -> None:
        trainer(task, folder, **all_on()).fit(LoggedRegression(Net(clock)), task.data())

    def engine(clock: Clock, folder: Path) -> None:
        own_loop(task, clock)

    # Microseconds above a loop of 100: with a DataLoader, in a window, and with batches in memory.
    most_off, most_on = (12.0, None) if task.loader else (None, 7.0) if task.accumulate > 1 else (3.0, 8.0)
    most_logged = 6.0 if most_off == 3.0 else None
    return [
        Contender("ours, everything off", off, above=most_off),
        Contender("ours, off, one self.log per step", off_and_log, above=most_logged),
        Contender("ours, all on: bar, CSV, TensorBoard, checkpoints, self.log", on, above=most_on),
        Contender("ours, Engine: a loop of one's own", engine, above=most_off),
    ]


def own_loop(task: Task, clock: Clock) -> None:
    """Train with the loop of docs/engine.md."""
    with Engine(accelerator="cpu", devices=1) as engine:
        net = Net(clock)
        model, optimizer = engine.setup(net, optimizer_of(net))
        train_with(engine, task, model, optimizer, engine.setup_dataloaders(task.data()))


def validation(task: Task) -> list[Contender]:
    """Return the contenders in validation: torchmetrics, without and with the progress bar."""

    def run(clock: Clock, folder: Path, **options: Any) -> None:
        module = Classification(Net(clock, task.classes), task.classes)
        trainer(task, folder, **{**OFF, **options}).validate(module, task.data(), verbose=False)

    return [
        Contender("ours, validate: log(loss), log(torchmetrics)", run, above=4.0),
        Contender("ours, the same with the bar", lambda c, f: run(c, f, enable_progress_bar=True), above=4.0),
    ]
