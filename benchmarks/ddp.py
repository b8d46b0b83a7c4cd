"""DDP on two processes over gloo, against torch's DistributedDataParallel in a hand-written loop, and the peers."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks._task import OFF, Net, Task, optimizer_of
from benchmarks._together import Sized, compare, loop_over, ours, step_with
from benchmarks._turns import Clock, Contender


def loop(task: Task, net_of: Sized, clock: Clock, folder: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net_of(clock), gradient_as_bucket_view=True)  # as in our strategy
    loop_over(task, step_with(model, optimizer_of(model)))


def contenders(task: Task, net_of: Sized) -> list[Contender]:
    found = ours(task, net_of, lambda: "ddp")
    if find_spec("pytorch_lightning") is not None:
        found.append(Contender("Lightning, everything off", partial(lightning, task, net_of)))
    if find_spec("lightning_fabric") is not None:
        found.append(Contender("Fabric", partial(fabric, task, net_of)))
    if find_spec("accelerate") is not None:
        found.append(Contender("Accelerate", partial(accelerate, task, net_of)))
    return found


def lightning(task: Task, net_of: Sized, clock: Clock, folder: Path) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net: Net = net_of(clock)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            return F.mse_loss(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        **OFF,
        default_root_dir=folder,
    )
    trainer.fit(Module(), task.data())


def fabric(task: Task, net_of: Sized, clock: Clock, folder: Path) -> None:
    from lightning_fabric import Fabric

    plug = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    plug.launch()
    net = net_of(clock)
    model, optimizer = plug.setup(net, optimizer_of(net))
    for x, y in plug.setup_dataloaders(task.data()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        plug.backward(loss)
        optimizer.step()


def accelerate(task: Task, net_of: Sized, clock: Clock, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = net_of(clock)
    model, optimizer, data = accelerator.prepare(net, optimizer_of(net), task.data())
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.free_memory()


def main(arguments: list[str]) -> int:
    return compare("ddp", __doc__, arguments, loop, contenders)
