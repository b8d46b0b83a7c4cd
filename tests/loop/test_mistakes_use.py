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

LOGGED: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "a vector": lambda self, loss, batch: self.log("x", batch[0]),
    "a text": lambda self, loss, batch: self.log("x", "3.5"),
    "a dict": lambda self, loss, batch: self.log("x", {"a": 1}),
    "None": lambda self, loss, batch: self.log("x", None),
    "value first": lambda self, loss, batch: self.log(loss, "x"),
    "the trainer's step": lambda self, loss, batch: self.log("step", loss),
    "the trainer's epoch": lambda self, loss, batch: self.log_dict(
        {"x": loss, "epoch": 1.0}, on_step=True, on_epoch=True
    ),
    "the trainer's step, by a callback": lambda self, loss, batch: self.trainer.log("step", loss),
    "never": lambda self, loss, batch: self.log("x", loss, on_step=False, on_epoch=False),
    "reduction unknown": lambda self, loss, batch: self.log("x", loss, reduce_fx="avg"),
    "batch size": lambda self, loss, batch: self.log("x", loss, batch_size=batch[0]),
    "metric class": lambda self, loss, batch: self.log("x", torchmetrics.MeanMetric),
    "metric of nobody": lambda self, loss, batch: self.log("x", torchmetrics.MeanMetric()),
}


@pytest.mark.parametrize("name", LOGGED)
def test_log(name: str) -> None:
    refused(lambda: fit(net_that(LOGGED[name])), steps=1)


def test_log_where_there_is_no_run() -> None:
    def init(self: Any) -> None:
        Net.__init__(self)
        self.log("x", 1)

    refused(lambda: net(__init__=init))
    refused(lambda: Net().log("x", 1))


def test_log_while_predicting() -> None:
    module = net(predict_step=lambda self, batch, batch_idx: self.log("x", 1))
    refused(lambda: quiet().predict(module, loader()))


# -- manual optimization -----------------------------------------------------------------------------------------------


def by_hand(does: Callable[[Any, torch.Tensor], Any]) -> Net:
    return net_that(lambda self, loss, batch: does(self, loss), automatic_optimization=False)


@pytest.mark.parametrize("setting", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_settings_that_a_module_which_steps_by_itself_ignores(setting: dict[str, Any]) -> None:
    call = lambda: fit(by_hand(lambda self, loss: None), trainer=quiet(**setting))  # noqa: E731
    refused(call)


BY_HAND: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "step without backward": lambda self, loss: self.optimizers().step(),
    "backward of None": lambda self, loss: self.manual_backward(None),
    "backward of a vector": lambda self, loss: self.manual_backward(torch.stack([loss, loss])),
    "backward of something detached": lambda self, loss: self.manual_backward(loss.detach()),
    "backward twice": lambda self, loss: (self.manual_backward(loss), self.manual_backward(loss)),
    "clipping misspelt": lambda self, loss: self.clip_gradients(self.optimizers(), 1.0, "nrom"),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_manual_optimization(name: str) -> None:
    refused(lambda: fit(by_hand(BY_HAND[name])), steps=1)


def test_backward_that_scales_nothing() -> None:
    module = by_hand(lambda self, loss: (loss.backward(), self.optimizers().step()))
    refused(lambda: fit(module, trainer=quiet(precision="16-mixed")), steps=1)


@pytest.mark.parametrize("name", ["manual_backward", "step"])
def test_by_hand_what_the_trainer_does(name: str) -> None:
    does = {
        "manual_backward": lambda self, loss, batch: self.manual_backward(loss),
        "step": lambda self, loss, batch: self.optimizers().step(),
    }
    refused(lambda: fit(net_that(does[name])), steps=1)


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


HYPERPARAMETERS: dict[str, Callable[[], Any]] = {
    "name misspelt": lambda: Given(keep="names"),
    "outside": lambda: Net().save_hyperparameters(),
}


@pytest.mark.parametrize("name", HYPERPARAMETERS)
def test_hyperparameters(name: str) -> None:
    refused(HYPERPARAMETERS[name])


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
@pytest.mark.parametrize("kind", [Wider, Longer])
def test_checkpoint_of_another_model(load: Any, kind: type[Net], trained: str) -> None:
    refused(lambda: load(kind(), trained), error=CheckpointError)


def test_checkpoint_with_another_optimizer(trained: str) -> None:
    adam = net(configure_optimizers=lambda self: Adam(self.parameters()))
    refused(lambda: resume(adam, trained), error=CheckpointError)
    two = net(configure_optimizers=lambda self: [SGD([p], lr=0.1) for p in self.parameters()])
    refused(lambda: resume(two, trained), error=CheckpointError)


@pytest.mark.parametrize("path", ["bset", "nowhere/epoch=3", Path("nowhere"), True], ids=str)
def test_checkpoint_that_does_not_exist(path: Any) -> None:
    refused(lambda: resume(Net(), path))


@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_best_of_none(stage: str) -> None:
    call = lambda: getattr(quiet(), stage)(Net(), loader(), ckpt_path="best")  # noqa: E731
    refused(call, error=CheckpointError)


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
    refused(lambda: resume(Net(), runs), error=CheckpointError)
    refused(lambda: Net.load_from_checkpoint(runs), error=CheckpointError)


def test_checkpoint_file_of_another_library() -> None:
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.0"}, "epoch=3.ckpt")
    refused(lambda: resume(Net(), "epoch=3.ckpt"), error=CheckpointError)
    refused(lambda: Net.load_from_checkpoint("epoch=3.ckpt"), error=CheckpointError)


def test_a_run_directory_stands_for_its_last_checkpoint(trained: str) -> None:
    run_dir = Path(trained).parents[1]
    assert resume(Net(), run_dir).ckpt_path == trained
    shutil.rmtree(trained)
    refused(lambda: resume(Net(), run_dir), error=CheckpointError)


def test_module_that_needs_what_was_not_saved(trained: str) -> None:
    refused(lambda: Other.load_from_checkpoint(trained), error=CheckpointError)
    refused(lambda: Net.load_from_checkpoint(trained, rate=1), error=CheckpointError)


def test_nothing_left_to_train_is_said(trained: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    fit(Net(), ckpt_path="last")
    assert "nothing is left to train" in caplog.text
    assert "max_epochs=1" in caplog.text


class Unsaveable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {len}}


@pytest.mark.parametrize("arguments", [{"callbacks": Unsaveable()}, {}], ids=["callback", "module"])
def test_state_that_is_not_data(arguments: dict[str, Any]) -> None:
    def on_save_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["f"] = on_save_checkpoint

    module = Net() if arguments else net(on_save_checkpoint=on_save_checkpoint)
    refused(lambda: fit(module, trainer=quiet(**arguments)), error=CheckpointError)


def test_a_member_of_an_enumeration_is_no_loader() -> None:
    refused(lambda: quiet().validate(net(), Level.TWO))


def test_a_text_in_place_of_a_bool_is_refused() -> None:
    verbose: Any = "no"
    refused(lambda: quiet().validate(Net(), loader(), verbose=verbose))
    refused(lambda: quiet().test(Net(), loader(), verbose=verbose))
    refused(lambda: quiet().predict(Net(), loader(), return_predictions=verbose))
