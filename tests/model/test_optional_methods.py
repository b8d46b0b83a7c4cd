"""A method that is None is not defined: a run goes as with the method left out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, DataModule, Trainer, TrainModule
from trainer.callback import HOOKS
from trainer.callbacks import LambdaCallback
from trainer.model.optional_methods import METHODS
from trainer.runs.preflight_checks import DATAMODULE_METHODS, MODULE_HOOKS

NEEDED = ("training_step", "configure_optimizers")
# Written down here: names taken from the package would follow its mistakes.
STEPS_AND_SETTINGS = (
    "validation_step",
    "test_step",
    "predict_step",
    "configure_model",
    "configure_callbacks",
    "configure_gradient_clipping",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "num_items",
)
OF_DATA = (
    "prepare_data",
    "setup",
    "teardown",
    "transfer_batch_to_device",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
STATE = ("state_dict", "load_state_dict")
HOOKS_OF_A_MODULE = [name for name in vars(TrainModule) if name.startswith("on_")]
OPTIONAL = [*STEPS_AND_SETTINGS, *OF_DATA, "train_dataloader", *HOOKS_OF_A_MODULE]
HOOKS_OF_DATA = ("on_before_batch_transfer", "on_after_batch_transfer", "on_exception")


def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
    raise AssertionError("this is not called")


def run_all(module: TrainModule, datamodule: DataModule | None = None) -> list[Any]:
    """Run every stage that the module can do; return the weights and all logged values."""
    trainer = quiet(max_epochs=1, gradient_clip_val=0.1)
    if datamodule is not None:
        trainer.fit(module, datamodule=datamodule)
    else:
        trainer.fit(module, loader(2), loader(1))
    found: list[Any] = [trainer.callback_metrics, module.state_dict()]
    for stage in ("validate", "test"):
        if module.overrides({"validate": "validation_step", "test": "test_step"}[stage]):
            found.append(getattr(trainer, stage)(module, loader(1)))
    return [*found, trainer.predict(module, loader(1), return_predictions=True)]


class Forward(Toy):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()

    def forward(self, batch: Any) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def without(name: str) -> type[Forward]:
    """Return the module's class as if it had never defined the method."""
    return type("Forward", (Forward,), {name: getattr(TrainModule, name)})


WAYS = ("object", "derived class", "mixin", "copy")
CASES = [("class", name) for name in OPTIONAL] + [
    (way, name) for way in WAYS for name in ("val_dataloader", "num_items")
]


@pytest.mark.parametrize(("defined_in", "name"), CASES)
def test_a_method_of_a_module_that_is_none_is_not_defined(defined_in: str, name: str) -> None:
    expected = run_all(without(name)())
    if defined_in == "class":
        module = type("Module", (Forward,), {name: None})()
    elif defined_in == "derived class":
        module = type("Derived", (type("Module", (Forward,), {name: wrong}),), {name: None})()
    elif defined_in == "mixin":
        module = type("Module", (type("Plain", (), {name: None}), type("Defines", (Forward,), {name: wrong})), {})()
    else:
        module = type("Module", (Forward,), {name: wrong})()
        setattr(module, name, None)
        module = copy.deepcopy(module) if defined_in == "copy" else module
    assert not module.overrides(name)
    torch.testing.assert_close(run_all(module), expected, rtol=0, atol=0)


def test_every_method_that_is_called_is_tried() -> None:
    assert sorted([*OPTIONAL, *NEEDED]) == sorted({*METHODS, *MODULE_HOOKS})
    assert sorted([*OF_DATA, "train_dataloader", *STATE, *HOOKS_OF_DATA]) == sorted(DATAMODULE_METHODS)


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_fit_needs_cannot_be_none(name: str) -> None:
    module = Toy()
    setattr(module, name, None)
    for one in (module, type("Module", (Toy,), {name: None})()):
        with raises_recorded(ConfigError):
            quiet(max_epochs=1).fit(one, loader(1))


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader(2)

    def val_dataloader(self) -> Any:
        return loader(1)


@pytest.mark.parametrize(
    ("defined_in", "name"),
    [*(("class", name) for name in (*OF_DATA, *STATE, *HOOKS_OF_DATA)), ("object", "setup"), ("object", "state_dict")],
)
def test_a_method_of_a_data_module_that_is_none_is_not_defined(defined_in: str, name: str) -> None:
    expected = run_all(Forward(), type("Data", (Data,), {name: getattr(DataModule, name)})())
    data = type("Data", (Data,), {name: None if defined_in == "class" else wrong})()
    if defined_in == "object":
        setattr(data, name, None)
    assert not data.overrides(name)
    torch.testing.assert_close(run_all(Forward(), data), expected, rtol=0, atol=0)


def test_a_module_without_its_own_loader_says_so() -> None:
    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(type("Module", (Toy,), {"train_dataloader": None})())


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_a_callback_that_is_none_is_not_called(hook: str) -> None:
    given = type("Given", (Callback,), {hook: None})()
    of_object = LambdaCallback(**{hook: wrong})
    setattr(of_object, hook, None)
    quiet(max_epochs=1, callbacks=[given, of_object]).fit(Toy(), loader(1), loader(1))


class Pickled(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.validation_step = None  # type: ignore[assignment]


def test_none_survives_pickling() -> None:
    module = pickle.loads(pickle.dumps(Pickled()))
    assert not module.overrides("validation_step")
    module.validation_step = lambda batch, batch_idx: module.log("own", 1.0)
    assert module.overrides("validation_step")
    trainer: Trainer = quiet()
    assert trainer.validate(module, loader(1)) == [{"own": 1.0}]


def test_an_attribute_that_is_no_method_may_be_none() -> None:
    module = Toy()
    module.cache = None
    assert module.cache is None


@pytest.mark.parametrize("kind", [TrainModule, DataModule])
def test_a_loader_that_is_not_returned_is_said(kind: type) -> None:
    class Forgetful(Toy if kind is TrainModule else DataModule):  # type: ignore[misc]
        def train_dataloader(self) -> None:
            loader(1)

    both = (Forgetful(), None) if kind is TrainModule else (Toy(), Forgetful())
    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(*both)
