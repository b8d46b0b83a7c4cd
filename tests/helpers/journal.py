"""Record everything that happens in a run, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR
from torch.utils.data import DataLoader

from trainer import Callback, DataModule, TrainModule
from trainer.callback import HOOKS
from trainer.runs.preflight_checks import MODULE_HOOKS


class Journal(list[str]):
    """A list of events in order: "owner event numbers"."""

    def hook(self, owner: str, name: str) -> Any:
        """Return a hook that records its call, with those arguments that are numbers and texts."""

        def write(_: Any, *args: Any) -> None:
            self.note(owner, name, *args)

        return write

    def note(self, owner: str, name: str, *args: Any) -> None:
        self.append(" ".join([owner, name, *(str(arg) for arg in args if isinstance(arg, (int, str)))]))

    def callback(self, owner: str, runs_last: bool) -> Callback:
        """Return a callback with every hook."""
        hooks: dict[str, Any] = {hook: self.hook(owner, hook) for hook in HOOKS}
        return type(owner.capitalize(), (Callback,), {**hooks, "runs_last": runs_last})()


def make_module(journal: Journal, **attributes: Any) -> Recorded:
    """Return the module below with every hook that a module may have."""
    names = [hook for hook in MODULE_HOOKS if "batch_transfer" not in hook]
    hooks = {hook: journal.hook("module", hook) for hook in [*names, "prepare_data", "configure_model"]}
    return type("Module", (Recorded,), {**hooks, **attributes})(journal)


class Recorded(TrainModule):
    """A module that also records what happens between the hooks."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.journal.note("module", "training_step", batch_idx)
        loss = self.layer(batch).mean()
        loss.register_hook(lambda gradient: self.journal.note("module", "loss.backward()"))
        return {"loss": loss, "is": "outputs"}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.journal.note("module", "validation_step", batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.journal.note("module", "test_step", batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.journal.note("module", "predict_step", batch_idx)
        return batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.journal.note("module", "on_before_batch_transfer", dataloader_idx)
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.journal.note("module", "transfer_batch_to_device", dataloader_idx)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.journal.note("module", "on_after_batch_transfer", dataloader_idx)
        return batch

    def configure_gradient_clipping(self, *args: Any) -> None:
        self.journal.note("module", "configure_gradient_clipping")
        super().configure_gradient_clipping(*args)

    def lr_scheduler_step(self, scheduler: Any, metric: float | None) -> None:
        self.journal.note("module", "lr_scheduler_step", scheduler.called)
        scheduler.step()

    def configure_optimizers(self) -> Any:
        self.journal.note("module", "configure_optimizers")
        optimizer = SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.journal.note("module", "optimizer.step()"))
        schedulers = []
        for interval in ("step", "epoch"):
            scheduler: Any = ConstantLR(optimizer)
            scheduler.called = f"interval={interval}"
            schedulers.append({"scheduler": scheduler, "interval": interval})
        return [optimizer], schedulers


class Data(DataModule):
    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def prepare_data(self) -> None:
        self.journal.note("data", "prepare_data")

    def setup(self, stage: str) -> None:
        self.journal.note("data", "setup", stage)

    def teardown(self, stage: str) -> None:
        self.journal.note("data", "teardown", stage)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(6, 1), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 1), batch_size=2)

    def test_dataloader(self) -> Any:
        return {"a": DataLoader(torch.ones(1, 1)), "b": DataLoader(torch.ones(2, 1))}

    def predict_dataloader(self) -> Any:
        return DataLoader(torch.ones(2, 1))


def happened(*lines: str) -> list[str]:
    """Return the journal for lines such as the pseudocode's, at any indentation.

    A line without an owner stands for an early callback, the module, and a callback with `runs_last`, in this order;
    "callbacks" for the two callbacks.
    """
    owners = {"all": ("early", "module", "late"), "callbacks": ("early", "late"), "module": ("module",)}
    owners["data"] = ("data",)
    expected = []
    for line in "\n".join(lines).splitlines():
        who, _, what = line.strip().rpartition(": ")
        if what:
            expected += [f"{owner} {what}" for owner in owners[who or "all"]]
    return expected
