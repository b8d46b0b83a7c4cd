"""The benchmarks' work done by other trainers that are installed: set up for speed, and with defaults."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks import _peers_engines as engines
from benchmarks._task import OFF, Net, Task, optimizer_of, train_with
from benchmarks._turns import Clock, Contender

Run = Callable[[Task, Clock, Path], None]


def training(task: Task) -> list[Contender]:
    """Return the contenders that are installed; Composer needs a separate environment."""
    ways: dict[str, dict[str, Run]] = {
        "pytorch_lightning": {
            "Lightning, everything off": partial(lightning, off=True),
            "Lightning, barebones=True": partial(lightning, barebones=True),
            "Lightning, defaults": lightning,
            "Lightning, off, one self.log per step": partial(lightning, off=True, log=True),
            "Lightning, all on: bar, CSV, TensorBoard, checkpoints, self.log": partial(lightning, log=True, both=True),
        },
        "lightning_fabric": {"Fabric": fabric},
        "accelerate": {"Accelerate": accelerate},
        "transformers": {
            "HF Trainer, everything off": partial(engines.hf, off=True),
            "HF Trainer, defaults": engines.hf,
            "HF Trainer, all on: bar, TensorBoard, checkpoints, log every 50": partial(engines.hf, on=True),
        },
        "ignite": {
            "Ignite, own update function": engines.ignite,
            "Ignite, create_supervised_trainer": partial(engines.ignite, supervised=True),
            "Ignite, all on: bar, TensorBoard, checkpoints, loss": partial(engines.ignite, on=True),
        },
        "composer": {
            "Composer, everything off": partial(engines.composer, off=True),
            "Composer, defaults": engines.composer,
        },
        "keras": {
            "Keras, verbose=0": partial(engines.keras, verbose=0),
            "Keras, defaults": partial(engines.keras, verbose="auto"),
        },
    }
    if task.accumulate > 1:
        del ways["keras"]  # counts optimizer steps inside the optimizer; nothing like the others
    return _installed(task, ways)


def validation(task: Task) -> list[Contender]:
    ways: dict[str, dict[str, Run]] = {
        "pytorch_lightning": {
            "Lightning, metric.update only": partial(lightning_validate, log=False),
            "Lightning, log(loss), log(torchmetrics)": partial(lightning_validate, log=True),
        },
        "accelerate": {"Accelerate": accelerate_validate},
        "ignite": {"Ignite, its own Accuracy and Loss": engines.ignite_validate},
    }
    return _installed(task, ways)


def _installed(task: Task, ways: dict[str, dict[str, Run]]) -> list[Contender]:
    found = {package: runs for package, runs in ways.items() if find_spec(package) is not None}
    return [Contender(name, partial(run, task)) for runs in found.values() for name, run in runs.items()]


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning(
    task: Task,
    clock: Clock,
    folder: Path,
    off: bool = False,
    barebones: bool = False,
    log: bool = False,
    both: bool = False,
    **more: Any,
) -> None:
    """Train with Lightning; off and barebones follow its docs. `both`: a CSV logger in addition to TensorBoard's."""
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(clock)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = F.mse_loss(self.net(x), y)
            if log:
                self.log("loss", loss, prog_bar=not off)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    options: dict[str, Any] = dict(more)
    if barebones:
        options["barebones"] = True
    elif off:
        options |= OFF
    elif both:
        options["logger"] = [CSVLogger(str(folder)), TensorBoardLogger(str(folder))]
    options = {"accelerator": "cpu", "devices": 1, **options}
    trainer = pl.Trainer(max_epochs=1, default_root_dir=folder, accumulate_grad_batches=task.accumulate, **options)
    trainer.fit(Module(), task.data())


def lightning_validate(task: Task, clock: Clock, folder: Path, log: bool) -> None:
    import pytorch_lightning as pl
    from torchmetrics.classification import MulticlassAccuracy

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(clock, task.classes)
            self.accuracy = MulticlassAccuracy(task.classes, average="micro")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            logits = self.net(x)
            loss = F.cross_entropy(logits, y)
            self.accuracy.update(logits, y)
            if log:
                self.log("val_loss", loss, batch_size=len(x))
                self.log("val_acc", self.accuracy)

    trainer = pl.Trainer(
        **OFF,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
    )
    trainer.validate(Module(), task.data(), verbose=False)


def fabric(task: Task, clock: Clock, folder: Path, **options: Any) -> None:
    """Train with the loop of Fabric's docs."""
    from lightning_fabric import Fabric

    plug = Fabric(**{"accelerator": "cpu", "devices": 1, **options})
    plug.launch()
    net = Net(clock)
    model, optimizer = plug.setup(net, optimizer_of(net))
    data = plug.setup_dataloaders(task.data()) if task.loader else task.data()
    train_with(plug, task, model, optimizer, data)


# -- Accelerate --------------------------------------------------------------------------------------------------------


def accelerate(task: Task, clock: Clock, folder: Path) -> None:
    """Train with the loop of Accelerate's docs."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=task.accumulate)
    net = Net(clock)
    model, optimizer, data = accelerator.prepare(net, optimizer_of(net), task.data())
    model.train()
    for x, y in data:
        if task.accumulate == 1:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            continue
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.free_memory()


def accelerate_validate(task: Task, clock: Clock, folder: Path) -> None:
    from accelerate import Accelerator
    from torchmetrics.classification import MulticlassAccuracy

    accelerator = Accelerator(cpu=True)
    model, data = accelerator.prepare(Net(clock, task.classes), task.data())
    metric = MulticlassAccuracy(task.classes, average="micro")
    model.eval()
    total, count = torch.zeros(()), 0
    with torch.inference_mode():
        for x, y in data:
            logits = model(x)
            total += F.cross_entropy(logits, y) * len(x)
            count += len(x)
            logits, y = accelerator.gather_for_metrics((logits, y))
            metric.update(logits, y)
    assert 0 <= float(metric.compute()) <= 1
    accelerator.free_memory()
