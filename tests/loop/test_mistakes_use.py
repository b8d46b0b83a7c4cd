"""Errors for mistakes with logging, manual optimization, hyperparameters and checkpoints say what to type."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.optim import SGD, Adam

from tests.helpers.drawn_values import Level
from tests.helpers.mistakes import Net, fit, loader, net, net_that, quiet, refused
from trainer import Callback, CheckpointError, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint

# -- self.log ----------------------------------------------------------------------------------------------------------

LOGGED: dict[str, tuple[Callable[[Any, torch.Tensor, Any], Any], list[str]]] = {
    "a vector": (lambda self, loss, batch: self.log("x", batch[0]), ["self.log('x')", "one number", "(2, 4)"]),
    "a text": (lambda self, loss, batch: self.log("x", "3.5"), ["got a str", "give a number"]),
    "a dict": (lambda self, loss, batch: self.log("x", {"a": 1}), ["got a dict", "self.log_dict"]),
    "None": (lambda self, loss, batch: self.log("x", None), ["got a NoneType", "give a number"]),
    "value first": (lambda self, loss, batch: self.log(loss, "x"), ["got a str: give a number"]),
    "the trainer's step": (
        lambda self, loss, batch: self.log("step", loss),
        ["self.log('step')", "column of epochs", "such as 'my_step'"],
    ),
    "the trainer's epoch": (
        lambda self, loss, batch: self.log_dict({"x": loss, "epoch": 1.0}, on_step=True, on_epoch=True),
        ["self.log('epoch')", "such as 'my_epoch'"],
    ),
    "the trainer's step, by a callback": (
        lambda self, loss, batch: self.trainer.log("step", loss),
        ["self.log('step')", "the trainer's count of steps"],
    ),
    "never": (
        lambda self, loss, batch: self.log("x", loss, on_step=False, on_epoch=False),
        ["on_step=False, on_epoch=False", "to True"],
    ),
    "reduction unknown": (
        lambda self, loss, batch: self.log("x", loss, reduce_fx="avg"),
        ["reduce_fx='avg'", "mean, sum, min, max"],
    ),
    "option misspelt": (
        lambda self, loss, batch: self.log_dict({"x": loss}, progbar=True),
        ["'progbar'", "Did you mean 'prog_bar'?"],
    ),
    "batch size": (lambda self, loss, batch: self.log("x", loss, batch_size=batch[0]), ["(2, 4)", "len(batch)"]),
    "metric class": (lambda self, loss, batch: self.log("x", torchmetrics.MeanMetric), ["give a number, a tensor"]),
    "metric of nobody": (
        lambda self, loss, batch: self.log("x", torchmetrics.MeanMetric()),
        ["not an attribute of the module", "self.<name> = ..."],
    ),
}


@pytest.mark.parametrize("name", LOGGED)
def test_log(name: str) -> None:
    does, parts = LOGGED[name]
    refused(lambda: fit(net_that(does)), *parts, steps=1)


def test_log_where_there_is_no_run() -> None:
    def init(self: Any) -> None:
        Net.__init__(self)
        self.log("x", 1)

    refused(lambda: net(__init__=init), "not attached to a Trainer", "inside trainer.fit")
    refused(lambda: Net().log("x", 1), "not attached to a Trainer", "inside trainer.fit")


def test_log_while_predicting() -> None:
    module = net(predict_step=lambda self, batch, batch_idx: self.log("x", 1))
    refused(lambda: quiet().predict(module, loader()), "predict() logs nothing", "Return values")


# -- manual optimization -----------------------------------------------------------------------------------------------


def by_hand(does: Callable[[Any, torch.Tensor], Any]) -> Net:
    return net_that(lambda self, loss, batch: does(self, loss), automatic_optimization=False)


@pytest.mark.parametrize("setting", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_settings_that_a_module_which_steps_by_itself_ignores(setting: dict[str, Any]) -> None:
    call = lambda: fit(by_hand(lambda self, loss: None), trainer=quiet(**setting))  # noqa: E731
    refused(call, next(iter(setting)), "automatic_optimization = False", "training_step")


BY_HAND: dict[str, tuple[Callable[[Any, torch.Tensor], Any], list[str]]] = {
    "step without backward": (
        lambda self, loss: self.optimizers().step(),
        ["SGD.step() found no gradient", "self.manual_backward(loss)"],
    ),
    "backward of None": (lambda self, loss: self.manual_backward(None), ["manual_backward got None", "a tensor"]),
    "backward of a vector": (
        lambda self, loss: self.manual_backward(torch.stack([loss, loss])),
        ["manual_backward got a loss of shape (2,)", "loss.mean()"],
    ),
    "backward of something detached": (
        lambda self, loss: self.manual_backward(loss.detach()),
        ["manual_backward got a loss without a gradient"],
    ),
    "backward twice": (
        lambda self, loss: (self.manual_backward(loss), self.manual_backward(loss)),
        ["once for each graph", "add losses"],
    ),
    "clipping misspelt": (
        lambda self, loss: self.clip_gradients(self.optimizers(), 1.0, "nrom"),
        ["'nrom'", "Did you mean 'norm'?"],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_manual_optimization(name: str) -> None:
    does, parts = BY_HAND[name]
    refused(lambda: fit(by_hand(does)), *parts, steps=1)


def test_backward_that_scales_nothing() -> None:
    module = by_hand(lambda self, loss: (loss.backward(), self.optimizers().step()))
    refused(lambda: fit(module, trainer=quiet(precision="16-mixed")), "self.manual_backward(loss) instead", steps=1)


@pytest.mark.parametrize(
    ("does", "part"),
    [
        (lambda self, loss, batch: self.manual_backward(loss), "manual_backward is for automatic_optimization = False"),
        (lambda self, loss, batch: self.optimizers().step(), "the trainer steps too"),
    ],
    ids=["manual_backward", "step"],
)
def test_by_hand_what_the_trainer_does(does: Any, part: str) -> None:
    refused(lambda: fit(net_that(does)), part, "automatic_optimization = False", steps=1)


def test_an_epoch_without_a_step_is_said(caplog: pytest.LogCaptureFixture) -> None:
    fit(by_hand(lambda self, loss: self.manual_backward(loss)))
    assert "stepped no optimizer in an epoch: call self.optimizers().step()" in caplog.text


def test_steps_before_a_resume_count_as_steps_of_the_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def step(self: Any, loss: torch.Tensor) -> None:
        self.manual_backward(loss)
        self.optimizers().step()

    class Fails(Callback):
        def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
            raise RuntimeError("at the end of the epoch")

    saved: dict[str, Any] = {"default_root_dir": tmp_path, "enable_checkpointing": True, "max_epochs": 1}
    data = loader(4)
    with pytest.raises(RuntimeError, match="at the end"):
        quiet(callbacks=[Fails(), ModelCheckpoint(every_n_train_steps=1)], **saved).fit(by_hand(step), data)
    caplog.clear()
    trainer = quiet(**saved)
    trainer.fit(by_hand(step), data, ckpt_path="last")
    assert trainer.global_step == len(data)
    assert "stepped no optimizer" not in caplog.text


# -- hyperparameters ---------------------------------------------------------------------------------------------------


class Given(TrainModule):
    """A module that saves its hyperparameters as `keep` says."""

    def __init__(self, value: Any = 1, keep: Any = None) -> None:
        super().__init__()
        keep = keep or (lambda module: module.save_hyperparameters())
        if keep == "names":
            self.save_hyperparameters("valeu")
        elif keep == "ignore":
            self.save_hyperparameters(ignore=["valeu"])
        elif keep == "dict":
            self.save_hyperparameters({"value": value})
        else:
            self.save_hyperparameters("value")


class Several(TrainModule):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.save_hyperparameters()


HYPERPARAMETERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "a module": (lambda: Given(nn.Linear(1, 1)), ["value is a Linear", "ignore=['value']"]),
    "a function": (lambda: Given(lambda x: x), ["value is a function", "ignore=['value']"]),
    "deep inside": (lambda: Given({"a": [1, {"b": b"2"}]}), ["value['a'][1]['b'] is a bytes", "ignore=['value']"]),
    "name misspelt": (lambda: Given(keep="names"), ["'valeu'", "Did you mean 'value'?"]),
    "outside": (lambda: Net().save_hyperparameters(), ["inside __init__"]),
    "added later": (lambda: fit(with_function()), ["hyperparameter folder", "function"]),
}


def with_function() -> Net:
    module = Net()
    module.hparams.folder = lambda: "x"
    return module


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters(name: str) -> None:
    call, parts = HYPERPARAMETERS[name]
    refused(call, *parts)


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)


class Longer(Net):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


class Other(TrainModule):
    def __init__(self, width: int) -> None:
        super().__init__()


@pytest.fixture
def trained() -> str:
    """Train a `Net` and return its checkpoint."""
    trainer = quiet()
    fit(Net(), trainer=trainer)
    return trainer.checkpoint_callbacks[0].last_model_path


def resume(module: Any, ckpt_path: Any) -> Trainer:
    trainer = quiet(max_epochs=2)
    fit(module, trainer=trainer, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("load", [resume, lambda module, path: type(module).load_from_checkpoint(path)])
@pytest.mark.parametrize(
    ("kind", "parts"),
    [(Wider, ["size mismatch", "[1, 4]", "[1, 5]"]), (Longer, ["Missing key", "more.weight"])],
)
def test_checkpoint_of_another_model(load: Any, kind: type[Net], parts: list[str], trained: str) -> None:
    call = lambda: load(kind(), trained)  # noqa: E731
    refused(call, f"does not fit {kind.__name__}", "another model", *parts, error=CheckpointError)


def test_checkpoint_with_another_optimizer(trained: str) -> None:
    adam = net(configure_optimizers=lambda self: Adam(self.parameters()))
    parts = ("SGD", "Adam", "load_from_checkpoint")
    refused(lambda: resume(adam, trained), *parts, error=CheckpointError)
    two = net(configure_optimizers=lambda self: [SGD([p], lr=0.1) for p in self.parameters()])
    refused(lambda: resume(two, trained), "has 1 optimizers", "gave 2", "load_from_checkpoint", error=CheckpointError)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("bset", ["ckpt_path='bset'", "Did you mean 'best'?"]),
        ("nowhere/epoch=3", ["'nowhere/epoch=3' does not exist", "'last', 'best' or a checkpoint folder"]),
        (Path("nowhere"), ["'nowhere' does not exist"]),
        (True, ["ckpt_path=True", "'last', 'best'"]),
    ],
)
def test_checkpoint_that_does_not_exist(path: Any, parts: list[str]) -> None:
    refused(lambda: resume(Net(), path), *parts)


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_best_of_none(stage: str) -> None:
    call = lambda: getattr(quiet(), stage)(Net(), loader(), ckpt_path="best")  # noqa: E731
    refused(call, "ckpt_path='best'", f"Looked in: {Path.cwd() / 'runs'}", "default_root_dir", error=CheckpointError)


def test_the_best_without_a_monitor_is_the_last_in_this_process_and_in_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As `best_model_path` of Lightning's ModelCheckpoint is."""
    caplog.set_level(logging.INFO)
    first = quiet(enable_checkpointing=True, default_root_dir="best")
    first.fit(Net(), loader())
    for trainer in (first, quiet(default_root_dir="best")):
        trainer.fit(Net(), loader(), ckpt_path="best")
        assert trainer.ckpt_path == str(next(Path("best/version_0/checkpoints").resolve().glob("epoch*")))
    assert "ckpt_path='best': no ModelCheckpoint(monitor=...) has chosen one, so the last is taken" in caplog.messages


def test_a_folder_of_runs_is_no_checkpoint(trained: str) -> None:
    runs = Path(trained).parents[2]
    parts = (f"{runs} is not a checkpoint", "the run directory, such as version_0")
    refused(lambda: resume(Net(), runs), *parts, error=CheckpointError)
    refused(lambda: Net.load_from_checkpoint(runs), *parts, error=CheckpointError)


def test_checkpoint_file_of_another_library() -> None:
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.0"}, "epoch=3.ckpt")
    parts = ("epoch=3.ckpt is a file", "checkpoint folders", "torch.load(path, weights_only=True)['state_dict']")
    refused(lambda: resume(Net(), "epoch=3.ckpt"), *parts, error=CheckpointError)
    refused(lambda: Net.load_from_checkpoint("epoch=3.ckpt"), *parts, error=CheckpointError)


def test_a_run_directory_stands_for_its_last_checkpoint(trained: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_dir = Path(trained).parents[1]
    assert resume(Net(), run_dir).ckpt_path == trained
    assert f"{run_dir} is a run directory: its last checkpoint is epoch=0-step=4" in caplog.text
    shutil.rmtree(trained)
    parts = ("there is no intact checkpoint", str(run_dir / "checkpoints"))
    refused(lambda: resume(Net(), run_dir), *parts, error=CheckpointError)


def test_module_that_needs_what_was_not_saved(trained: str) -> None:
    parts = (
        "Other cannot be built",
        "(lr)",
        "'width'",
        "load_from_checkpoint(path, name=value)",
        "save_hyperparameters",
    )
    refused(lambda: Other.load_from_checkpoint(trained), *parts, error=CheckpointError)
    refused(lambda: Net.load_from_checkpoint(trained, rate=1), "'rate'", "(lr)", error=CheckpointError)


def test_nothing_left_to_train_is_said(trained: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    fit(Net(), ckpt_path="last")
    assert "nothing is left to train" in caplog.text
    assert "max_epochs=1" in caplog.text


class Unsaveable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"callbacks": Unsaveable()}, ["callbacks['Unsaveable']['seen']", "a set", "sorted(value)"]),
        ({}, ["added['f']: it is a function", "data only"]),
    ],
    ids=["callback", "module"],
)
def test_state_that_is_not_data(arguments: dict[str, Any], parts: list[str]) -> None:
    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["f"] = on_save_checkpoint

    module = Net() if arguments else net(on_save_checkpoint=on_save_checkpoint)
    refused(lambda: fit(module, trainer=quiet(**arguments)), *parts, error=CheckpointError)


@pytest.mark.parametrize(
    ("method", "option"), [("validate", "verbose"), ("test", "verbose"), ("predict", "return_predictions")]
)
@pytest.mark.parametrize("value", ["yes", 3], ids=["text", "number"])
def test_options_that_are_neither_true_nor_false(method: str, option: str, value: Any) -> None:
    refused(lambda: getattr(quiet(), method)(net(), loader(), **{option: value}), f"{option}=", "give True or False")


def test_a_member_of_an_enumeration_is_no_loader() -> None:
    refused(lambda: quiet().validate(net(), Level.TWO), "cannot be iterated")
