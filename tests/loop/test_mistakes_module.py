"""Errors for mistakes in a module and its data come before the first step, and say what to type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

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


MODULES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a plain module": (lambda: fit(nn.Linear(4, 1)), ["takes a trainer.TrainModule", "got a Linear"]),
    "a class": (lambda: fit(Net), ["got the class Net", "Net(...)"]),
    "a wrapped module": (lambda: fit(nn.DataParallel(Net())), ["takes a trainer.TrainModule", "got a DataParallel"]),
    "a compiled module": (
        lambda: fit(torch.compile(Net(), backend="eager")),
        ["got what torch.compile(module) returned", "module.compile()", "compile=True"],
    ),
    "loader and module exchanged": (lambda: quiet().fit(loader(), Net()), ["first argument", "got a DataLoader"]),
    "nothing defined": (
        lambda: fit(TrainModule()),
        ["2 problems", "training_step(self, batch, batch_idx)", "configure_optimizers(self)", "torch.optim.AdamW"],
    ),
    "names misspelt": (
        lambda: fit(Misspelt()),
        ["Did you mean 'training_step'?", "Did you mean 'configure_optimizers'?"],
    ),
    "super().__init__ forgotten": (lambda: fit(Forgot()), ["Forgot.__init__", "super().__init__()"]),
    "hook misspelt": (
        lambda: fit(net(on_train_epoch_ends=lambda self: None)),
        ["Mine.on_train_epoch_ends", "Did you mean 'on_train_epoch_end'?"],
    ),
    "hook of callbacks only": (
        lambda: fit(net(on_checkpoint_saved=lambda self, path: None)),
        ["Mine.on_checkpoint_saved", "Use a callback, which has this hook."],
    ),
    "hooks of old": (
        lambda: fit(
            net(
                training_epoch_end=lambda self, outputs: None,
                on_epoch_end=lambda self: None,
            )
        ),
        ["2 problems", "Use on_train_epoch_end", "append what is needed to a list of the module"],
    ),
    "hook with outputs": (
        lambda: fit(net(on_train_epoch_end=lambda self, outputs: None)),
        ["takes (outputs)", "define on_train_epoch_end(self)"],
    ),
    "hook with a callback's arguments": (
        lambda: fit(net(on_train_batch_end=lambda self, trainer, module, outputs, batch, batch_idx: None)),
        ["define on_train_batch_end(self, outputs, batch, batch_idx)"],
    ),
    "setup without stage": (lambda: fit(net(setup=lambda self: None)), ["define setup(self, stage)"]),
    "step with optimizer_idx": (
        lambda: fit(net(training_step=lambda self, batch, batch_idx, optimizer_idx: None)),
        ["training_step takes optimizer_idx", "automatic_optimization = False"],
    ),
    "validation with four arguments": (
        lambda: fit(net(validation_step=lambda self, batch, batch_idx, dataloader_idx, more: None), loader(), loader()),
        ["define validation_step(self, batch, batch_idx, dataloader_idx=0)"],
    ),
    "number instead of a method": (lambda: fit(assigned("num_items", 100)), ["num_items", "type int", "another name"]),
    "method hidden by an attribute": (lambda: fit(assigned("optimizers", [])), ["optimizers", "self.my_optimizers"]),
    "device assigned": (lambda: assigned("device", "cuda"), ["self.device", "self.my_device"]),
    "hparams assigned": (lambda: assigned("hparams", {"lr": 1}), ["self.hparams", "self.save_hyperparameters"]),
    "validate without a step": (
        lambda: quiet().validate(TrainModule(), loader()),
        ["no validation_step", "define validation_step(self, batch, batch_idx)"],
    ),
    "test without a step": (
        lambda: quiet().test(Net(), loader()),
        ["no test_step", "test_step(self, batch, batch_idx)"],
    ),
    "predict without anything": (lambda: quiet().predict(TrainModule(), loader()), ["predict_step", "forward"]),
    "callback class of the module": (
        lambda: fit(net(configure_callbacks=lambda self: [Data])),
        ["configure_callbacks", "Data(...)"],
    ),
    "module callbacks forgotten": (
        lambda: fit(net(configure_callbacks=lambda self: None)),
        ["configure_callbacks gave None", "return a list"],
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    call, parts = MODULES[name]
    refused(call, *parts)


# -- what training_step returns ----------------------------------------------------------------------------------------


def returning(value: Callable[[Any, torch.Tensor], Any]) -> Net:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        Net.steps += 1
        return value(self, self.loss(batch))

    return net(training_step=training_step)


RETURNED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], list[str]]] = {
    "a number": (lambda self, loss: 1, ["type int", "a tensor with one element"]),
    "its item": (lambda self, loss: loss.item(), ["type float", "a tensor with one element", "Leave out .item()"]),
    "a vector": (lambda self, loss: torch.stack([loss, loss]), ["shape (2,)", "loss.mean()"]),
    "detached": (lambda self, loss: loss.detach(), ["without a gradient", ".detach()"]),
    "a dict without it": (lambda self, loss: {"los": loss}, ['without "loss"', "los", 'Return {"loss": loss']),
    "a tuple": (lambda self, loss: (loss, 1), ["type tuple", "a tensor with one element"]),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_training_step_returns(name: str) -> None:
    value, parts = RETURNED[name]
    refused(lambda: fit(returning(value)), *parts, steps=1)


def test_loss_that_is_not_a_number() -> None:
    parts = ("training_step returned the loss nan", "not finite", "learning rate")
    module = returning(lambda self, loss: loss * float("nan"))
    refused(lambda: fit(module, trainer=quiet(detect_anomaly=True)), *parts, steps=1)


def test_backward_inside_training_step() -> None:
    module = returning(lambda self, loss: (loss.backward(), loss)[1])
    refused(lambda: fit(module), "The trainer calls backward for you", "returns the loss", steps=1)


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


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "None": (lambda self: None, ["gave a NoneType", "return torch.optim.AdamW"]),
    "a class": (lambda self: SGD, ["gave a type", "torch.optim.AdamW(...)"]),
    "a name": (lambda self: "adam", ["gave a str", "torch.optim.AdamW"]),
    "an empty list": (lambda self: [], ["returned no optimizer", "torch.optim.AdamW"]),
    "a key misspelt": (lambda self: {"optimiser": sgd(self)}, ["'optimiser'", "Did you mean 'optimizer'?", "Allowed"]),
    "a key of the scheduler": (
        lambda self: {"optimizer": sgd(self), "scheduler": 1},
        ["'scheduler'", "Did you mean 'lr_scheduler'?"],
    ),
    "no parameters": (lambda self: SGD([], lr=0.1), ["nothing to train", "frozen at the start", "nn.ModuleList"]),
    "frozen parameters": (frozen, ["SGD", "no parameter that requires a gradient", "frozen"]),
    "parameter of nobody": (
        lambda self: SGD([nn.Parameter(torch.ones(3))], lr=0.1),
        ["shape (3,)", "not in Mine", "self.<name> = ..."],
    ),
    "parameter of two": (lambda self: [sgd(self), sgd(self)], ["in two optimizers", "Give each its own"]),
    "a pair": (pair, ["gave a StepLR", '{"optimizer": optimizer, "lr_scheduler": scheduler}']),
    "plateau without monitor": (with_scheduler(ReduceLROnPlateau), ["ReduceLROnPlateau", '"monitor": "val_loss"']),
    "scheduler key misspelt": (
        with_scheduler(lambda optimizer: {"scheduler": StepLR(optimizer, 1), "intervall": "step"}),
        ["'intervall'", "Did you mean 'interval'?", "frequency"],
    ),
    "interval misspelt": (
        with_scheduler(lambda optimizer: {"scheduler": StepLR(optimizer, 1), "interval": "batch"}),
        ["interval='batch'", "'epoch' and 'step'"],
    ),
    "never": (
        with_scheduler(lambda optimizer: {"scheduler": StepLR(optimizer, 1), "frequency": 0}),
        ["frequency=0", "integer from 1"],
    ),
    "scheduler class": (with_scheduler(lambda optimizer: StepLR), ["gave a type", "StepLR(optimizer, 10)"]),
    "scheduler of another optimizer": (
        lambda self: {"optimizer": sgd(self), "lr_scheduler": StepLR(sgd(self), 1)},
        ["made for another SGD", "the same object to both"],
    ),
    "LBFGS and another": (
        lambda self: [torch.optim.LBFGS([self.layer.weight]), SGD([self.layer.bias], lr=0.1)],
        ["LBFGS", "the only optimizer"],
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_configure_optimizers(name: str) -> None:
    configure_optimizers, parts = OPTIMIZERS[name]
    refused(lambda: fit(net(configure_optimizers=configure_optimizers)), *parts)


def test_scheduler_waits_for_a_value_that_is_never_logged() -> None:
    plateau = with_scheduler(lambda optimizer: {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_los"})
    parts = ("ReduceLROnPlateau monitors 'val_los'", "Did you mean 'val_loss'?", '"strict": False')
    refused(lambda: fit(net(configure_optimizers=plateau), loader(), loader()), *parts, steps=0)


def test_monitor_next_to_the_scheduler_is_understood() -> None:
    def configure_optimizers(self: Any) -> Any:
        return {**with_scheduler(ReduceLROnPlateau)(self), "monitor": "val_loss"}

    fit(net(configure_optimizers=configure_optimizers), loader(), loader())


# -- data --------------------------------------------------------------------------------------------------------------

EMPTY = TensorDataset(torch.zeros(0, 4), torch.zeros(0, 1))

DATA: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "none": (lambda: quiet().fit(Net()), ["pass train_dataloaders=", "define train_dataloader in Net", "datamodule="]),
    "a dataset": (lambda: fit(Net(), EMPTY), ["the dataset TensorDataset", "DataLoader(dataset, batch_size=32)"]),
    "a tensor": (lambda: fit(Net(), torch.zeros(8, 4)), ["a Tensor", "DataLoader(TensorDataset("]),
    "a loader of a number": (lambda: fit(Net(), DataLoader(7)), ["a int, which has no samples", "a list, a tensor"]),
    "a loader of a class": (lambda: fit(Net(), DataLoader(Dataset)), ["the class Dataset, which has no samples"]),
    "a function": (lambda: fit(Net(), loader), ["function", "cannot be iterated", "DataLoader"]),
    "an empty list": (lambda: fit(Net(), []), ["no batch", "length 0"]),
    "an empty dataset": (lambda: fit(Net(), loader(0)), ["no batch", "TensorDataset has length 0"]),
    "all dropped": (lambda: fit(Net(), loader(3, 4, drop_last=True)), ["drop_last=True drops all 3", "batch_size"]),
    "an empty validation": (lambda: fit(Net(), loader(), loader(0)), ["evaluation loader has no batch", "length 0"]),
    "no second validation": (
        lambda: fit(Net(), loader(), [loader(), None]),
        ["'dataloader_idx_1' is None", "DataLoader"],
    ),
    "a generator for three epochs": (
        lambda: fit(Net(), (batch for batch in loader()), trainer=quiet(max_epochs=3)),
        ["only once", "more than one epoch", "max_epochs=1"],
    ),
    "validation after the epoch's end": (
        lambda: fit(Net(), loader(), loader(), trainer=quiet(val_check_interval=100)),
        ["val_check_interval=100", "4 training batches", "smaller number"],
    ),
    "fraction of something endless": (
        lambda: fit(Net(), (batch for batch in loader()), trainer=quiet(limit_train_batches=0.5)),
        ["0.5 is a fraction", "has no length", "int"],
    ),
    "less than a batch": (
        lambda: fit(Net(), trainer=quiet(limit_train_batches=0.01)),
        ["0.01 of the 4 batches", "at least 0.25"],
    ),
    "a data module's class": (lambda: quiet().fit(Net(), datamodule=Data), ["the class Data", "Data(...)"]),
    "a loader as a data module": (
        lambda: quiet().fit(Net(), datamodule=loader()),
        ["takes a trainer.DataModule", "got a DataLoader"],
    ),
    "both": (lambda: fit(Net(), datamodule=Data()), ["loaders and a datamodule", "only one"]),
    "a data module's method misspelt": (
        lambda: quiet().fit(Net(), datamodule=type("Data", (DataModule,), {"train_loader": loader})()),
        ["Data.train_loader", "Did you mean 'train_dataloader'?"],
    ),
    "a data module's setup without stage": (
        lambda: quiet().fit(Net(), datamodule=type("Mine", (Data,), {"setup": lambda self: None})()),
        ["define setup(self, stage)"],
    ),
    "a transfer hook that returns nothing": (
        lambda: fit(net(on_after_batch_transfer=lambda self, batch, dataloader_idx: None)),
        ["on_after_batch_transfer returned None", "'return batch'"],
    ),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name: str) -> None:
    call, parts = DATA[name]
    refused(call, *parts)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_half_weights_in_mixed_precision() -> None:
    parts = ("'bf16-mixed'", "float32", "'layer.weight'", "precision='bf16-true'")
    refused(lambda: fit(Net().half(), trainer=quiet(precision="bf16-mixed")), *parts)


def test_data_of_another_dtype_than_the_weights() -> None:
    batches = [[part.double() for part in batch] for batch in loader()]
    refused(lambda: fit(Net(), batches), "batch.float()", "Trainer(precision=...)", "Double", steps=1)


def test_a_last_batch_of_one_sample_under_a_batch_norm() -> None:
    """The even split of a short global batch gives such batches, too."""
    module = net(forward=lambda self, x: nn.functional.batch_norm(self.layer(x), None, None, training=True))
    data = DataLoader(TensorDataset(torch.ones(5, 4), torch.zeros(5, 1)), 2)
    refused(lambda: fit(module, data), "A batch has one sample, with which BatchNorm", "drop_last=True", steps=3)
