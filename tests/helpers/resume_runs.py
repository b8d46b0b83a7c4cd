"""The runs of the resume matrix: broken at a named point, resumed, and compared with an uninterrupted run."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torchmetrics.classification
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from tests.helpers.compare import QUIET
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import CSVLogger, ModelCheckpoint
from trainer.testing import compare_runs

SAMPLES, GLOBAL_BATCH, WINDOW, EPOCHS = 46, 8, 2, 2
STEPS = 3 * EPOCHS
"""An epoch has six micro-batches, the last one short, in three windows."""


class Cell(NamedTuple):
    """The settings of a training."""

    optimizer: str = "adamw"
    workers: int = 0
    strategy: str = "auto"

    def __str__(self) -> str:
        return f"{self.optimizer}-{self.workers}workers"


class BreakPoint(NamedTuple):
    """The hook at which a run is broken, and how."""

    hook: str
    when: int
    """The number of the hook's call that breaks the run, from 1."""
    how: str = "kill"
    """"kill": nothing is saved any more; "stop": trainer.stop; "signal"; "max_steps": the end of the run was there."""
    every: int = 1
    """Steps from checkpoint to checkpoint."""
    resumes_at: tuple[int, ...] = ()
    """The step with which the resumed run begins; several: that depends on when there is validation."""


BREAK_POINTS = {
    "end of step": BreakPoint("on_train_step_end", 1, "stop", every=2, resumes_at=(1,)),
    "mid-epoch": BreakPoint("on_train_batch_start", 3, resumes_at=(1,)),
    "inside a window": BreakPoint("on_before_backward", 4, resumes_at=(1,)),
    "inside validation": BreakPoint("on_validation_batch_end", 2, resumes_at=(2, 3)),
    "epoch end": BreakPoint("on_train_epoch_start", 2, resumes_at=(3,)),
    "after the last batch": BreakPoint("on_train_epoch_end", 1, resumes_at=(3,)),
}
MORE_BREAK_POINTS = {
    "steps after the last checkpoint": BreakPoint("on_train_batch_start", 11, every=4, resumes_at=(4,)),
    "max_steps": BreakPoint("", 4, "max_steps", resumes_at=(4,)),
    "start of an epoch": BreakPoint("on_train_epoch_start", 2, "signal", every=2, resumes_at=(3,)),
}
"""With `num_workers=0` only."""


class Killed(BaseException):
    """Ends a run as a kill would: what the run does about errors does not save anything."""


class Augmented(Dataset[Any]):
    """Samples with noise from all three global generators, or with fixed noise."""

    def __init__(self, fixed: bool = False) -> None:
        self.fixed = fixed
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.fixed:
            return self.x[index], self.y[index]
        noise = torch.randn(6) * 0.1 + np.random.normal() * 0.1 + random.random() * 0.1
        return self.x[index] + noise, self.y[index]


class Classifier(TrainModule):
    """A module with all kinds of state that a resume has to restore."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.kind = optimizer
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)
        self.listed = torchmetrics.CatMetric()
        self.several = torchmetrics.MetricCollection(
            [torchmetrics.classification.MulticlassPrecision(2), torchmetrics.classification.MulticlassRecall(2)]
        )

    def on_train_epoch_start(self) -> None:
        self.log("epochs_begun", 1.0 + float(torch.rand(())), reduce_fx="sum")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.layers(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("python", random.random() + np.random.rand(), on_step=False, on_epoch=True)
        self.accuracy.update(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.listed.update(loss.detach())
        self.several.update(logits, batch[1])
        return loss

    def on_train_step_end(self) -> None:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.log("listed", self.listed.compute().mean())
        self.listed.reset()
        for name, value in self.several.compute().items():
            self.log(name, value)
        self.several.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss + 0.01 * torch.rand(()))

    def on_validation_epoch_end(self) -> None:
        self.log("val_hook", torch.rand(()).item())

    def on_train_end(self) -> None:
        self.log("end", float(self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        if self.kind == "adamw":
            optimizer = AdamW(self.parameters(), lr=0.02)
            warm_up = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
            return [optimizer], [{"scheduler": warm_up, "interval": "step"}]
        sgd = SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = ReduceLROnPlateau(sgd, patience=0)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Count(Callback):
    """Count completed steps and validations."""

    runs_last = True

    def __init__(self) -> None:
        self.steps = self.validations = 0

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps += 1

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.sanity_checking:
            self.validations += 1
            trainer.log("validations", self.validations)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "validations": self.validations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.validations = state["steps"], state["validations"]


class Begin(Callback):
    """Record the step at which the run began."""

    step = -1

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.step = trainer.global_step


class SaveFinal(Callback):
    """Save the full state at the very end."""

    runs_last = True

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.save_checkpoint(Path(trainer.settings.default_root_dir) / "final")


def break_at(break_point: BreakPoint) -> Callback:
    """Return a callback that breaks the run at a point."""
    passed = 0

    def pass_by(trainer: Trainer, *rest: Any) -> None:
        nonlocal passed
        if trainer.sanity_checking:
            return
        passed += 1
        if passed == break_point.when and break_point.how == "stop":
            trainer.stop("broken")
        elif passed == break_point.when and break_point.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif passed == break_point.when:
            raise Killed

    callback = Callback()
    setattr(callback, break_point.hook, pass_by)
    return callback


def train(
    cell: Cell,
    folder: Path,
    more: list[Callback],
    every: int = 1,
    module: TrainModule | None = None,
    loader: Any = None,
    **settings: Any,
) -> int:
    """Train, or resume the last run. Returns the step at which this run began."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    begin = Begin()
    trainer = Trainer(
        **{
            **QUIET,
            "seed": 3,
            "devices": world,
            "strategy": "ddp" if world > 1 and cell.strategy == "auto" else cell.strategy,
            "precision": "16-mixed" if cell.optimizer == "sgd" else "32-true",
            "max_epochs": EPOCHS,
            "accumulate_grad_batches": WINDOW,
            "val_check_interval": 4 if cell.optimizer == "adamw" else 1.0,
            "num_sanity_val_steps": 1 if cell.optimizer == "adamw" else 0,
            "log_every_n_steps": 1 if cell.optimizer == "adamw" else 2,
            "logger": CSVLogger(),
            "enable_checkpointing": True,
            "callbacks": [begin, Count(), *more, ModelCheckpoint(every_n_train_steps=every)],
            "default_root_dir": folder,
            **settings,
        }
    )
    module = module or Classifier(cell.optimizer)
    if (folder / "version_0").exists():
        # A resumed run must not depend on the random state of the process before it.
        random.seed()
        np.random.seed()
        torch.seed()
    data = Augmented()
    if loader is None:
        loader = DataLoader(data, GLOBAL_BATCH // world, shuffle=True, num_workers=cell.workers)
    trainer.fit(module, loader, DataLoader(data, 12 // world), ckpt_path="last")
    return begin.step


def broken_and_resumed(cell: Cell, break_point: BreakPoint, folder: Path, **inputs: Any) -> int:
    """Break a run, resume it, and return the step at which the resumed run began."""
    made = {name: make() for name, make in inputs.items()}
    if break_point.how == "max_steps":
        train(cell, folder, [], max_steps=break_point.when, **made)
    else:
        try:
            train(cell, folder, [break_at(break_point)], break_point.every, **made)
        except (Killed, SystemExit):
            pass
        else:
            assert break_point.how == "stop", "the run has ended by itself"
    return train(cell, folder, [SaveFinal()], break_point.every, **{name: make() for name, make in inputs.items()})


def differences(uninterrupted: Path, resumed: Path) -> list[str]:
    """Return what differs by any bit."""
    logs = [(folder / "version_0" / "metrics.csv").read_text() for folder in (uninterrupted, resumed)]
    found = [] if logs[0] == logs[1] else ["metrics.csv:", *logs]
    return compare_runs(uninterrupted / "final", resumed / "final") + found


EVERY_CELL = tuple(Cell(optimizer, workers) for optimizer in ("adamw", "sgd") for workers in (0, 2))


def break_points(cell: Cell) -> list[str]:
    """Return the names of the points at which this cell is broken."""
    return [*BREAK_POINTS, *(MORE_BREAK_POINTS if cell.workers == 0 else {})]


def matrix(folder: str, wanted: dict[Cell, list[str]]) -> dict[tuple[Cell, str], list[str]]:
    """Break and resume each cell at its points, as one of the processes of this run; return what differs."""
    faulthandler.dump_traceback_later(850, exit=True)
    found = {}
    for cell, names in wanted.items():
        uninterrupted = Path(folder) / str(cell)
        train(cell, uninterrupted, [SaveFinal()])
        for name in names:
            break_point = {**BREAK_POINTS, **MORE_BREAK_POINTS}[name]
            resumed = Path(folder) / f"{cell}-{name}"
            begun = broken_and_resumed(cell, break_point, resumed)
            wrong_step = [f"began at step {begun}"] if begun not in break_point.resumes_at else []
            found[cell, name] = wrong_step + differences(uninterrupted, resumed)
    faulthandler.cancel_dump_traceback_later()
    return found


class Plain(Classifier):
    """A module that does not depend on how the global batch is split."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen: list[float] = []

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen += batch[0][:, 0].tolist() if self.trainer.training else []
        return batch


def plain(folder: str, micro_batch: int, window: int, stop_at: int | None = None) -> list[float]:
    """Train with the same losses on any number of processes. Returns the samples that this process has read."""
    torch.manual_seed(5)
    module = Plain()
    loader = DataLoader(Augmented(), micro_batch, shuffle=True)
    more: list[Callback] = [] if stop_at is None else [break_at(BreakPoint("on_train_step_end", stop_at, "stop"))]
    options = {"seed_per_sample": True, "accumulate_grad_batches": window, "val_check_interval": 1.0}
    train(Cell(), Path(folder), more, module=module, loader=loader, **options)
    return module.seen


def plain_on_two(folder: str) -> dict[str, list[float]]:
    """Run on two processes: uninterrupted, resumed from one process, and the first half for a resume on one process."""
    return {
        "uninterrupted": plain(f"{folder}/two", 4, 2),
        "one to two": plain(f"{folder}/one to two", 2, 4),
        "two to one": plain(f"{folder}/two to one", 4, 2, stop_at=4),
    }


def stateful(folder: str) -> dict[str, list[str]]:
    """Do the same as `matrix` for torchdata's loader, which restores its position, but not its workers' randomness."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    def make(workers: int) -> Any:
        data = Augmented(fixed=workers > 0)
        sampler = StatefulDistributedSampler(data, world, rank, seed=1)
        return StatefulDataLoader(data, GLOBAL_BATCH // world, sampler=sampler, num_workers=workers)

    found = {}
    for workers in (0, 2):
        uninterrupted = Path(folder) / f"stateful{workers}"
        train(Cell(), uninterrupted, [SaveFinal()], loader=make(workers))
        for name in ("inside a window", "inside validation", "epoch end"):
            resumed = Path(folder) / f"stateful{workers}-{name}"
            broken_and_resumed(Cell(), BREAK_POINTS[name], resumed, loader=lambda workers=workers: make(workers))
            found[f"StatefulDataLoader, {workers} workers, {name}"] = differences(uninterrupted, resumed)
    return found


def killed_for_good(folder: str, hook: str, step: int) -> None:
    """Train; kill the last process at this hook of the step after `step`, unless that is negative."""

    def kill(trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == step and trainer.rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    breaker = Callback()
    setattr(breaker, hook, kill)
    train(Cell(), Path(folder), [breaker, SaveFinal()])
