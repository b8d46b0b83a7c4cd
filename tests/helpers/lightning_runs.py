"""Run one scenario through Lightning and through this package, and record what happened.

A scenario is written once, for the classes of a `Library`. What the two runs did is compared piece by piece
(`PIECES`); where they differ on purpose, the scenario names a row of `docs/migrating.md`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from pytorch_lightning.loggers.logger import Logger as LightningLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainer
from trainer.callbacks import EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor, ModelCheckpoint
from trainer.logger import Logger

PIECES = ("losses", "rates", "hooks", "module_hooks", "logged", "metrics", "weights", "end", "saved", "best", "noted")
"""Names of the compared fields of `Record`."""


@dataclass
class Record:
    """The record of one run."""

    losses: list[float] = field(default_factory=list)
    """The loss of each training micro-batch."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of the first group at each training micro-batch."""
    hooks: list[Any] = field(default_factory=list)
    """The callbacks' hooks in order, with their arguments."""
    module_hooks: list[Any] = field(default_factory=list)
    """The module's hooks in order, with their arguments."""
    logged: list[tuple[int, str, float]] = field(default_factory=list)
    """Values that the logger got: the number of completed steps, name and value."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`trainer.callback_metrics` at the end."""
    weights: dict[str, list[float]] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    """Counters at the end."""
    saved: list[str] = field(default_factory=list)
    """Names of the checkpoints that were kept."""
    best: Any = None
    """Name and score of the best checkpoint."""
    noted: list[Any] = field(default_factory=list)
    """Notes of the scenario's own module and callbacks."""


@dataclass(frozen=True)
class Library:
    """The classes that a scenario is written with."""

    name: str
    Trainer: Any
    Module: Any
    DataModule: Any
    Callback: Any
    ModelCheckpoint: Any
    EarlyStopping: Any
    GradientAccumulationScheduler: Any
    LearningRateMonitor: Any

    @property
    def is_lightning(self) -> bool:
        return self.name == "lightning"


LIGHTNING = Library(
    "lightning",
    pytorch_lightning.Trainer,
    pytorch_lightning.LightningModule,
    pytorch_lightning.LightningDataModule,
    pytorch_lightning.Callback,
    pytorch_lightning.callbacks.ModelCheckpoint,
    pytorch_lightning.callbacks.EarlyStopping,
    pytorch_lightning.callbacks.GradientAccumulationScheduler,
    pytorch_lightning.callbacks.LearningRateMonitor,
)
OURS = Library(
    "ours",
    trainer.Trainer,
    trainer.TrainModule,
    trainer.DataModule,
    trainer.Callback,
    ModelCheckpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)

MOVED_HOOKS = {"on_before_zero_grad": "zero_grad", "on_validation_model_zero_grad": "zero_grad of a validation"}
"""Hooks that come at another place on purpose -> the row of the table that says so; they are not recorded."""
CALLBACK_HOOKS = [
    name
    for name in dir(pytorch_lightning.Callback)
    if name.startswith("on_") and name not in ("on_exception", "on_load_checkpoint", "on_save_checkpoint", *MOVED_HOOKS)
]
MODULE_HOOKS = [
    name
    for name in dir(pytorch_lightning.core.hooks.ModelHooks)
    if name.startswith("on_") and not name.endswith(("model_eval", "model_train")) and name not in MOVED_HOOKS
]


def event(name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return a hook with its arguments. Lightning leaves out the index of the only evaluation loader, which is 0."""
    written = (name, *map(brief, arguments))
    evaluates = name.startswith(("on_validation_batch", "on_test_batch", "on_predict_batch"))
    length = {"start": 4, "end": 5}.get(name.rpartition("_")[2], 0)
    return (*written, 0) if evaluates and len(written) == length - 1 else written


def brief(value: Any) -> Any:
    """Return a value in the form in which two runs can be compared."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.requires_grad)
    if isinstance(value, Mapping):
        return {key: brief(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [brief(item) for item in value]
    return type(value).__name__.removeprefix("Lightning").replace("_MockOptimizer", "NoOptimizer")


def callback_of(library: Library, record: Record) -> Any:
    """Return a callback that writes down every hook that Lightning's callbacks have."""

    def hook(name: str) -> Callable[..., None]:
        def write(self: Any, trainer: Any, module: Any, *arguments: Any, **named: Any) -> None:
            record.hooks.append(event(name, [*arguments, *named.values()]))

        return write

    return type("EveryHook", (library.Callback,), {name: hook(name) for name in CALLBACK_HOOKS})()


def base_of(library: Library, record: Record) -> Any:
    """Return a small regression module that writes down its losses and learning rates; scenarios derive from it."""

    class Net(library.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.body = nn.Linear(4, 8)
            self.head = nn.Linear(8, 1)
            self.record = record

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(x)))

        def loss_of(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return nn.functional.mse_loss(self(x), y)

        def wrote(self, loss: torch.Tensor) -> torch.Tensor:
            record.losses.append(loss.item())
            optimizers = self.trainer.optimizers
            record.rates.append(optimizers[0].param_groups[0]["lr"])
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.wrote(self.loss_of(batch))
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.loss_of(batch))

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("test_loss", self.loss_of(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Net


def hooked(Net: Any, record: Record) -> Any:  # noqa: N803
    """Return the class with every module hook of Lightning's writing itself down."""

    def hook(name: str) -> Callable[..., Any]:
        def write(self: Any, *arguments: Any, **named: Any) -> Any:
            record.module_hooks.append(event(name, [*arguments, *named.values()]))
            own = getattr(super(cls, self), name, None)
            return own(*arguments, **named) if own else None

        return write

    cls = type("Hooked", (Net,), {name: hook(name) for name in MODULE_HOOKS})
    return cls


def loader(samples: int = 12, batch_size: int = 3, seed: int = 7) -> DataLoader[Any]:
    """Return samples in their order: 4 inputs and one target each."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)


class TheirLog(LightningLogger):
    """Lightning's side of the logger. Its step is the index of the last step; ours is the number of steps."""

    name = "log"
    version = 0

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        completed = 0 if step is None else step + 1
        self.record.logged += [(completed, name, float(value)) for name, value in metrics.items() if name != "epoch"]


class OurLog(Logger):
    def __init__(self, record: Record) -> None:
        self.record = record

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.record.logged += [(step, name, float(value)) for name, value in metrics.items() if name != "epoch"]


@dataclass(frozen=True)
class Scenario:
    """One run, written for both libraries."""

    name: str
    part: Any = object
    """A class that is laid over the `Net` of a library: their `record` is where it notes what it sees."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Library, Record, Path], list[Any]] = lambda library, record, folder: []
    action: Callable[[Any, Any], Any] = lambda trainer, module: trainer.fit(module, loader(), loader(seed=8))
    exact: bool = True
    """Compare numbers to the bit; False: to 1e-6 (accumulation adds in another order)."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """Piece -> the row of the table of differences that explains it."""


def run(library: Library, scenario: Scenario, folder: Path) -> Record:
    """Run a scenario through one library."""
    record = Record()
    folder = folder / library.name
    net = base_of(library, record)
    cls = hooked(net if scenario.part is object else type("Net", (scenario.part, net), {}), record)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": [TheirLog(record) if library.is_lightning else OurLog(record)],
        "default_root_dir": folder,
        **scenario.settings,
    }
    callbacks = [*scenario.callbacks(library, record, folder), callback_of(library, record)]
    if any(isinstance(callback, library.ModelCheckpoint) for callback in callbacks):
        settings["enable_checkpointing"] = True
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("pytorch_lightning").setLevel(logging.CRITICAL)
        run_of = library.Trainer(callbacks=callbacks, **settings)
        module = cls()
        scenario.action(run_of, module)
    record.logged.sort(key=lambda one: one[:2])  # the order of the names of a step means nothing
    record.metrics = {name: float(value) for name, value in run_of.callback_metrics.items()}
    record.weights = {name: value.detach().flatten().tolist() for name, value in module.state_dict().items()}
    record.end = {
        "global_step": run_of.global_step,
        "current_epoch": run_of.current_epoch,
        "module.global_step": module.global_step,
        "module.current_epoch": module.current_epoch,
    }
    for callback in callbacks:
        if isinstance(callback, library.ModelCheckpoint):
            record.saved += sorted(_stem(path) for path in (folder / "checkpoints").glob("*") if _is_checkpoint(path))
            score = callback.best_model_score
            best = _stem(Path(callback.best_model_path)) if callback.best_model_path else ""
            record.best = (best, None if score is None else float(score))
    return record


def _is_checkpoint(path: Path) -> bool:
    return path.suffix == ".ckpt" or (path.is_dir() and not path.name.startswith("."))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".ckpt")
