"""A small module that counts its steps, and the check that every refusal has to pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.messages import raises_recorded
from trainer import ConfigError, Trainer, TrainModule


class Net(TrainModule):
    """A module with four inputs and one output."""

    steps: ClassVar[int] = 0
    """Training steps begun, of all modules of this class and below."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        Net.steps += 1
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def net(**methods: Any) -> Net:
    """Return a `Net` with some methods replaced."""
    return type("Mine", (Net,), methods)()


def net_that(does: Callable[[Any, torch.Tensor, Any], Any], **methods: Any) -> Net:
    """Return a `Net` whose `training_step` calls a function of `(self, loss, batch)` before it returns the loss."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        Net.steps += 1
        loss = self.loss(batch)
        does(self, loss, batch)
        return loss

    return net(training_step=training_step, **methods)


def loader(samples: int = 8, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))
    return DataLoader(data, batch_size=batch_size, **options)


def quiet(**settings: Any) -> Trainer:
    """Return a trainer for one epoch that shows and logs nothing."""
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"max_epochs": 1, "accelerator": "cpu", **silent, **settings})


def fit(module: Any, *loaders: Any, trainer: Trainer | None = None, **arguments: Any) -> None:
    (trainer or quiet()).fit(module, *(loaders or (loader(),)), **arguments)


def refused(
    call: Callable[[], Any], *parts: str, steps: int = 0, error: type[Exception] = ConfigError, not_in: str = ""
) -> str:
    """Check that `call` is refused in the words of the snapshot, with all `parts`, after `steps` training steps.

    A refusal in the first step or before it leaves no run directory; any refusal leaves no checkpoint or log.
    """
    Net.steps = 0
    before = set(Path("runs").rglob("*"))
    with raises_recorded(error) as caught:
        call()
    text = str(caught.value)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
    assert not not_in or not_in not in text
    assert Net.steps == steps, f"{Net.steps} training steps were made"
    left = set(Path("runs").rglob("*")) - before
    assert not [path for path in left if steps <= 1 or path.is_file()]
    return text
