"""A user's file that the configurations of the tests name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.messages import raises_recorded
from trainer.config.loading import Recipe, load
from trainer.config.read import read
from trainer.config.tree import Diagnostics, Node

Command = Callable[..., tuple[int, str, str]]
"""Runs `trainer ...` with these arguments: gives the exit code, stdout and stderr."""


class RecordedText(Exception):  # noqa: N818
    """A text that the snapshot has."""


def assert_recorded(text: str) -> None:
    """Compare a text with the one that tests/messages.json has for the test."""
    with raises_recorded(RecordedText):
        raise RecordedText(text)


def done(ran: tuple[int, str, str]) -> tuple[str, str]:
    """Return what a command has said on stdout and on stderr; it has to have succeeded."""
    code, out, err = ran
    assert code == 0, err
    return out, err


def refused(command: Command, *arguments: str) -> str:
    """Return what a command says on stderr as it fails, in the words that are recorded, without a traceback."""
    code, out, err = command(*arguments)
    assert code != 0, out
    assert "Traceback" not in out + err
    assert_recorded(f"exit code {code}: {out}{err}")
    return err


def loaded(*files: str, overrides: Sequence[tuple[str, Node]] = ()) -> Recipe:
    """Return the configuration in these files, checked."""
    findings = Diagnostics()
    return load(read(files, overrides, findings), findings)


USERS_FILE = """\
import abc
import dataclasses
import enum
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import Callback, DataModule, TrainModule


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Layers:
    width: int
    depth: int = 2


class Encoder:
    def __init__(self, size: int = 3):
        self.size = size


class Net(TrainModule):
    def __init__(
        self,
        lr: float = 0.1,
        width: int = 2,
        name: str = "net",
        sizes: tuple[int, ...] = (1,),
        flag: bool = False,
        maybe: int | None = None,
        mode: Literal["a", "b"] = "a",
        color: Color = Color.RED,
        file: Path = Path("x"),
        steps: dict[int, int] | None = None,
        layers: Layers | None = None,
        encoder: Encoder | None = None,
        encoders: list[Encoder] | None = None,
        kind: type[Encoder] = Encoder,
        anything=None,
    ):
        super().__init__()
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.lr = lr
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch[0]).pow(2).mean())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Data(DataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        data = torch.arange(32.0).reshape(16, 2) / 32
        return DataLoader(TensorDataset(data), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Needy(TrainModule):
    def __init__(self, lr: float, width: int):
        super().__init__()


class Open(Net):
    def __init__(self, **kwargs: Any):
        super().__init__()
        self.more = kwargs


class Abstract(TrainModule, abc.ABC):
    @abc.abstractmethod
    def layer_sizes(self): ...


class Failing(TrainModule):
    def __init__(self, width: int = 1):
        super().__init__()
        raise ValueError(f"width {width} is too small")


class Watcher(Callback):
    def __init__(self, patience: int = 1):
        self.patience = patience


def make_net():
    return Net()
"""
