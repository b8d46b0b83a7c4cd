"""Errors for mistakes in a module and its data come before the first step, and say what to type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.mistakes import Net, fit, loader, net, quiet, refused
from trainer import DataModule, TrainModule

# -- what is given to fit ----------------------------------------------------------------------------------------------


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader()


class Forgot(Net):
    def __init__(self) -> None:
        self.layer = 1


class Misspelt(TrainModule):
    def trainning_step(self, batch: Any, batch_idx: int) -> None: ...
    def configure_optimizer(self) -> None: ...


def assigned(name: str, value: Any) -> Net:
    module = Net()
    setattr(module, name, value)
    return module


MODULES: dict[str, Callable[[], Any]] = {
    "a plain module": lambda: fit(nn.Linear(4, 1)),
    "a class": lambda: fit(Net),
    "a wrapped module": lambda: fit(nn.DataParallel(Net())),
    "a compiled module": lambda: fit(torch.compile(Net(), backend="eager")),
    "loader and module exchanged": lambda: quiet().fit(loader(), Net()),
    "nothing defined": lambda: fit(TrainModule()),
    "names misspelt": lambda: fit(Misspelt()),
    "super().__init__ forgotten": lambda: fit(Forgot()),
    "hook misspelt": lambda: fit(net(on_train_epoch_ends=lambda self: None)),
    "hook of callbacks only": lambda: fit(net(on_checkpoint_saved=lambda self, path: None)),
    "hooks of old": lambda: fit(
        net(
            training_epoch_end=lambda self, outputs: None,
            on_epoch_end=lambda self: None,
        )
    ),
    "hook with outputs": lambda: fit(net(on_train_epoch_end=lambda self, outputs: None)),
    "hook with a callback's arguments": lambda: fit(
        net(on_train_batch_end=lambda self, trainer, module, outputs, batch, batch_idx: None)
    ),
    "setup without stage": lambda: fit(net(setup=lambda self: None)),
    "step with optimizer_idx": lambda: fit(net(training_step=lambda self, batch, batch_idx, optimizer_idx: None)),
    "validation with four arguments": lambda: fit(
        net(validation_step=lambda self, batch, batch_idx, dataloader_idx, more: None), loader(), loader()
    ),
    "number instead of a method": lambda: fit(assigned("num_items", 100)),
    "device assigned": lambda: assigned("device", "cuda"),
    "hparams assigned": lambda: assigned("hparams", {"lr": 1}),
    "validate without a step": lambda: quiet().validate(TrainModule(), loader()),
    "test without a step": lambda: quiet().test(Net(), loader()),
    "predict without anything": lambda: quiet().predict(TrainModule(), loader()),
    "callback class of the module": lambda: fit(net(configure_callbacks=lambda self: [Data])),
    "module callbacks forgotten": lambda: fit(net(configure_callbacks=lambda self: None)),
}


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    refused(MODULES[name])


# -- what training_step returns ----------------------------------------------------------------------------------------


def returning(value: Callable[[Any, torch.Tensor], Any]) -> Net:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        Net.steps += 1
        return value(self, self.loss(batch))

    return net(training_step=training_step)


RETURNED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a number": lambda self, loss: 1,
    "its item": lambda self, loss: loss.item(),
    "a vector": lambda self, loss: torch.stack([loss, loss]),
    "detached": lambda self, loss: loss.detach(),
    "a dict without it": lambda self, loss: {"los": loss},
    "a tuple": lambda self, loss: (loss, 1),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_training_step_returns(name: str) -> None:
    refused(lambda: fit(returning(RETURNED[name])), steps=1)


def test_loss_that_is_not_a_number() -> None:
    module = returning(lambda self, loss: loss * float("nan"))
    refused(lambda: fit(module, trainer=quiet(detect_anomaly=True)), steps=1)


# -- configure_optimizers ----------------------------------------------------------------------------------------------


def sgd(module: nn.Module) -> SGD:
    return SGD(module.parameters(), lr=0.1)


def with_scheduler(make: Callable[[SGD], Any]) -> Callable[[Any], Any]:
    def configure_optimizers(self: Any) -> Any:
        optimizer = sgd(self)
        return {"optimizer": optimizer, "lr_scheduler": make(optimizer)}

    return configure_optimizers


def frozen(self: nn.Module) -> SGD:
    self.requires_grad_(False)
    return sgd(self)


def pair(self: nn.Module) -> Any:
    optimizer = sgd(self)
    return optimizer, StepLR(optimizer, 1)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "a class": lambda self: SGD,
    "a name": lambda self: "adam",
    "an empty list": lambda self: [],
    "a key misspelt": lambda self: {"optimiser": sgd(self)},
    "a key of the scheduler": lambda self: {"optimizer": sgd(self), "scheduler": 1},
    "no parameters": lambda self: SGD([], lr=0.1),
    "frozen parameters": frozen,
    "parameter of nobody": lambda self: SGD([nn.Parameter(torch.ones(3))], lr=0.1),
    "parameter of two": lambda self: [sgd(self), sgd(self)],
    "a pair": pair,
    "plateau without monitor": with_scheduler(ReduceLROnPlateau),
    "scheduler key misspelt": with_scheduler(
        lambda optimizer: {"scheduler": StepLR(optimizer, 1), "intervall": "step"}
    ),
    "interval misspelt": with_scheduler(lambda optimizer: {"scheduler": StepLR(optimizer, 1), "interval": "batch"}),
    "never": with_scheduler(lambda optimizer: {"scheduler": StepLR(optimizer, 1), "frequency": 0}),
    "scheduler class": with_scheduler(lambda optimizer: StepLR),
    "scheduler of another optimizer": lambda self: {"optimizer": sgd(self), "lr_scheduler": StepLR(sgd(self), 1)},
    "LBFGS and another": lambda self: [torch.optim.LBFGS([self.layer.weight]), SGD([self.layer.bias], lr=0.1)],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_configure_optimizers(name: str) -> None:
    refused(lambda: fit(net(configure_optimizers=OPTIMIZERS[name])))


def test_scheduler_waits_for_a_value_that_is_never_logged() -> None:
    plateau = with_scheduler(lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_los"})
    refused(lambda: fit(net(configure_optimizers=plateau), loader(), loader()), steps=0)


def test_monitor_next_to_the_scheduler_is_understood() -> None:
    def configure_optimizers(self: Any) -> Any:
        return {**with_scheduler(ReduceLROnPlateau)(self), "monitor": "val_loss"}

    fit(net(configure_optimizers=configure_optimizers), loader(), loader())


# -- data --------------------------------------------------------------------------------------------------------------

EMPTY = TensorDataset(torch.zeros(0, 4), torch.zeros(0, 1))

DATA: dict[str, Callable[[], Any]] = {
    "none": lambda: quiet().fit(Net()),
    "a dataset": lambda: fit(Net(), EMPTY),
    "a tensor": lambda: fit(Net(), torch.zeros(8, 4)),
    "a function": lambda: fit(Net(), loader),
    "an empty list": lambda: fit(Net(), []),
    "an empty dataset": lambda: fit(Net(), loader(0)),
    "all dropped": lambda: fit(Net(), loader(3, 4, drop_last=True)),
    "an empty validation": lambda: fit(Net(), loader(), loader(0)),
    "no second validation": lambda: fit(Net(), loader(), [loader(), None]),
    "a generator for three epochs": lambda: fit(Net(), (batch for batch in loader()), trainer=quiet(max_epochs=3)),
    "validation after the epoch's end": lambda: fit(Net(), loader(), loader(), trainer=quiet(val_check_interval=100)),
    "fraction of something endless": lambda: fit(
        Net(), (batch for batch in loader()), trainer=quiet(limit_train_batches=0.5)
    ),
    "less than a batch": lambda: fit(Net(), trainer=quiet(limit_train_batches=0.01)),
    "a data module's class": lambda: quiet().fit(Net(), datamodule=Data),
    "a loader as a data module": lambda: quiet().fit(Net(), datamodule=loader()),
    "both": lambda: fit(Net(), datamodule=Data()),
    "a data module's method misspelt": lambda: quiet().fit(
        Net(), datamodule=type("Data", (DataModule,), {"train_loader": loader})()
    ),
    "a data module's setup without stage": lambda: quiet().fit(
        Net(), datamodule=type("Mine", (Data,), {"setup": lambda self: None})()
    ),
    "a transfer hook that returns nothing": lambda: fit(
        net(on_after_batch_transfer=lambda self, batch, dataloader_idx: None)
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name: str) -> None:
    refused(DATA[name])


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_half_weights_in_mixed_precision() -> None:
    refused(lambda: fit(Net().half(), trainer=quiet(precision="bf16-mixed")))


def test_data_of_another_dtype_than_the_weights() -> None:
    batches = [[part.double() for part in batch] for batch in loader()]
    refused(lambda: fit(Net(), batches), steps=1)


def test_a_last_batch_of_one_sample_under_a_batch_norm() -> None:
    """The even split of a short global batch gives such batches, too."""
    module = net(forward=lambda self, x: nn.functional.batch_norm(self.layer(x), None, None, training=True))
    data = DataLoader(TensorDataset(torch.ones(5, 4), torch.zeros(5, 1)), 2)
    refused(lambda: fit(module, data), steps=3)
