"""What hooks of a validation change is put back after the sanity check, and when a signal ends the validation."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.toy import loader, quiet
from trainer import Callback, DataModule, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint


class Counts(Callback):
    """Counts the batches of validations, in its state."""

    def __init__(self) -> None:
        self.number, self.values = 0, list[int]()

    def on_validation_batch_end(self, *_: Any) -> None:
        self.number += 1
        self.values.append(self.number)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Saves(Counts):
    """The same, in an entry of its own."""

    state_dict, load_state_dict = Callback.state_dict, Callback.load_state_dict

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["saves"] = {"number": self.number, "values": self.values}

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        vars(self).update(checkpoint["saves"])


class Data(DataModule):
    """Has a number in its state that validations change, and by which it scales its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def train_dataloader(self) -> Any:
        return loader(4)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(12, 4), torch.ones(12, 1)), 4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * self.scale, batch[1]]

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class Net(TrainModule):
    """Changes what a checkpoint knows in each validation batch, and may send itself a signal."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.layer, self.at = nn.Linear(4, 1), at
        self.own = [Counts(), Saves()]
        self.in_steps: list[Any] = []

    def configure_callbacks(self) -> Any:
        return self.own

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        counted = [(one.number, len(one.values)) for one in self.own]
        used = self.optimizers().state.get("used", 0)
        self.in_steps.append((self.global_step, counted, used, self.trainer.datamodule.scale))
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.lr_schedulers().step()
        state = self.optimizers().state
        state["used"] = state.get("used", 0) + 1
        for group in self.optimizers().param_groups:
            group["weight_decay"] += 0.01
        self.trainer.datamodule.scale *= 0.9
        if self.at == self.global_step and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        halves = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
        return [optimizer], [{"scheduler": halves, "frequency": 1000}]


def trained(folder: Path, sanity: int = 0, at: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net(at)
    options: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": sanity, "default_root_dir": folder}
    trainer = quiet(**options, enable_checkpointing=True, callbacks=[ModelCheckpoint()])
    trainer.fit(net, datamodule=Data(), ckpt_path="last")
    return {"steps": net.in_steps, "weights": net.state_dict(), "groups": trainer.optimizers[0].state_dict()}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before:UserWarning")  # as the user's hook does
def test_the_sanity_check_leaves_everything_as_it_was(tmp_path: Path) -> None:
    assert_same_bits(trained(tmp_path / "with", sanity=2), trained(tmp_path / "without"))


def test_a_validation_that_a_signal_ends_leaves_everything_as_it_was(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole")
    with pytest.raises(SystemExit):
        trained(tmp_path / "stopped", at=8)
    rest = trained(tmp_path / "stopped")
    assert_same_bits(rest, {**whole, "steps": whole["steps"][8:]})
