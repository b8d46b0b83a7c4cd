"""Errors for mistakes with arguments, callbacks and loggers say what was given, what is allowed, and what to type."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.mistakes import Net, fit, loader, net, net_that, quiet, refused
from tests.helpers.processes import ROOT, fork_python, run_python
from tests.tiers import Inputs
from trainer import Callback, ConfigError, Trainer
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    SimpleProfiler,
    TensorBoardLogger,
    TorchProfiler,
)
from trainer.settings import Settings
from trainer.strategies import DDPStrategy

ARGUMENTS: dict[str, dict[str, Any]] = {
    "strategy misspelt": {"strategy": "dpd"},
    "strategy class": {"strategy": DDPStrategy},
    "strategy of old": {"strategy": "dp"},
    "strategy with its option in the name": {"strategy": "deepspeed_stage_1_offload"},
    "precision misspelt": {"precision": "bf61-mixed"},
    "accelerator misspelt": {"accelerator": "cudda"},
    "accelerator not there": {"accelerator": "mps"},
    "numbers of cpus": {"devices": [0]},
    "one process for two devices": {"strategy": "single_device", "devices": 2},
    "two machines without torchrun": {"num_nodes": 2},
    "argument misspelt": {"max_epoch": 3},
    "argument of Lightning": {"model_registry": "x"},
    "argument of accelerate": {"gradient_accumulation_steps": 2},
    "argument of nobody": {"colour": "red"},
    "epochs with a fraction": {"max_epochs": 1.5},
    "epochs as text": {"max_epochs": "3"},
    "negative steps": {"max_steps": -2},
    "more at least than at most": {"min_epochs": 3, "max_epochs": 2},
    "time as text": {"max_time": "2h"},
    "time in unknown units": {"max_time": {"hour": 2}},
    "negative time": {"max_time": timedelta(hours=-1)},
    "more than all batches": {"limit_train_batches": 1.5},
    "negative limit": {"limit_val_batches": -1},
    "limit as text": {"limit_val_batches": "all"},
    "validation never": {"val_check_interval": 0},
    "two limits": {"overfit_batches": 1, "limit_train_batches": 2},
    "fast_dev_run as text": {"fast_dev_run": "yes"},
    "accumulation by epoch": {"accumulate_grad_batches": {0: 2}},
    "clipping at less than nothing": {"gradient_clip_val": -1},
    "limit that is no number": {"limit_val_batches": float("nan")},
    "interval that is no number": {"val_check_interval": float("nan")},
    "clipping at no number": {"gradient_clip_val": float("nan")},
    "watchdog at no number": {"watchdog_seconds": float("nan")},
    "clipping misspelt": {"gradient_clip_algorithm": "nrom"},
    "logging less than never": {"log_every_n_steps": -1},
    "seed below 0": {"seed": -1},
    "flag as text": {"enable_progress_bar": "no"},
    "benchmark as text": {"benchmark": "yes"},
    "folder with a zero byte": {"default_root_dir": "a\0b"},
    "no folder": {"default_root_dir": 3},
    "no accelerator": {"accelerator": None},
    "profiler misspelt": {"profiler": "simpel"},
    "profiler class": {"profiler": SimpleProfiler},
    "logger by name": {"logger": "tensorboard"},
    "logger class": {"logger": TensorBoardLogger},
    "logger class in a list": {"logger": [CSVLogger]},
    "callback class": {"callbacks": [ModelCheckpoint]},
    "callback class in a tuple": {"callbacks": (EarlyStopping,)},
    "callback by name": {"callbacks": "EarlyStopping"},
    "no callback": {"callbacks": [None]},
    "checkpoints, and none": {"callbacks": ModelCheckpoint(), "enable_checkpointing": False},
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_of_the_trainer(name: str) -> None:
    refused(lambda: Trainer(**{"accelerator": "cpu", **ARGUMENTS[name]}))


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, -2, 2**70, 0.0, 0.5, 1.0, 1.5, -0.5, 1e400, -1e400, float("nan"), 1j),
    *("", "x", "auto", "cpu", "2", "1.5", "00:00:00:05", "norm", "warn", "bf16-mixed", "32-true", "ddp", b"x"),
    *([], [0], ["x"], [None], (), {}, {"hours": 1}, {"x": 1}, {1: 1}, set(), timedelta(0), timedelta(days=-1)),
    *(object(), int, print, Path("runs"), Path("/dev/null/x"), torch.tensor(1), torch.device("cpu"), Callback()),
)
"""Right for some arguments, wrong for most."""


def test_arguments_drawn_at_random_are_taken_or_refused_by_name(inputs: Inputs) -> None:
    names = [field.name for field in dataclasses.fields(Settings)]
    for rng in inputs:
        arguments = {name: rng.choice(VALUES) for name in rng.sample(names, rng.randint(1, 3))}
        try:
            Trainer(**{"accelerator": "cpu", **arguments})
        except ConfigError as error:
            refused: str | None = str(error)
        except Exception as error:
            raise AssertionError(f"{rng}: Trainer(**{arguments}) raised {error!r}") from error
        else:
            refused = None
        assert refused is None or any(name in refused for name in arguments), (rng, arguments, refused)


def test_positional_arguments() -> None:
    refused(lambda: Trainer(3))


def test_all_mistakes_at_once() -> None:
    wrong = {"max_epoch": 3, "strategy": "dpd", "precision": "x", "limit_val_batches": -1}
    text = refused(lambda: Trainer(**wrong))
    assert all(given in text for given in ("'max_epoch'", "'dpd'", "'x'", "limit_val_batches=-1"))


CONSTRUCTORS: dict[str, Callable[[], Any]] = {
    "mode misspelt": lambda: ModelCheckpoint(monitor="val_loss", mode="mni"),
    "mode of a stop against the name": lambda: EarlyStopping("val_f1"),
    "interval below 0": lambda: ModelCheckpoint(train_time_interval=-5),
    "number as a folder": lambda: TorchProfiler(dirpath=3),
    "control character": lambda: ModelCheckpoint(filename="a\0"),
    "hidden name": lambda: ModelCheckpoint(filename=".{step}"),
    "format of a name": lambda: ModelCheckpoint(filename="{val_loss:d}"),
    "early stopping's mode": lambda: EarlyStopping("val_loss", mode="auto"),
    "no patience": lambda: EarlyStopping("val_loss", patience=0),
    "hook misspelt": lambda: LambdaCallback(on_train_begin=print),
    "gradient hook misspelt": lambda: DDPStrategy(comm_hook="fp16_compres"),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_argument_of_a_callback_or_strategy(name: str) -> None:
    refused(CONSTRUCTORS[name])


HOOKS: dict[str, dict[str, Any]] = {
    "misspelt": {"on_train_epoch_ends": lambda self, t, m: None},
    "of old": {"on_epoch_end": lambda self, t, m: None},
    "without on_": {"train_epoch_end": lambda self, t, m: None},
    "without arguments": {"on_train_epoch_end": lambda self: None},
    "with one too many": {
        "on_train_batch_end": lambda self, trainer, module, outputs, batch, batch_idx, dataloader_idx: None
    },
}


@pytest.mark.parametrize("name", HOOKS)
def test_hook_of_a_callback(name: str) -> None:
    refused(lambda: quiet(callbacks=type("Mine", (Callback,), HOOKS[name])()))


def test_the_same_callback_twice() -> None:
    stopping = EarlyStopping("val_loss")
    text = refused(lambda: quiet(callbacks=[stopping, stopping]))
    assert "2 problems" not in text


@pytest.mark.parametrize(
    "callback",
    [
        EarlyStopping("val_los"),
        ModelCheckpoint(monitor="val_los", mode="min"),
        ModelCheckpoint(filename="{epoch}-{val_los:.2f}"),
    ],
    ids=["early stopping", "best checkpoint", "file name"],
)
def test_a_value_that_is_never_logged_is_known_after_the_sanity_check(callback: Callback) -> None:
    refused(lambda: fit(Net(), loader(), loader(), trainer=quiet(callbacks=callback)))


def test_a_value_logged_by_step_may_be_monitored() -> None:
    fit(Net(), trainer=quiet(callbacks=[EarlyStopping("train_loss"), ModelCheckpoint(monitor="train_loss")]))


def test_checkpoints_into_a_file() -> None:
    Path("file").write_text("")
    refused(
        lambda: fit(Net(), trainer=quiet(callbacks=ModelCheckpoint("file"))),
    )


def test_run_directories_in_a_file() -> None:
    Path("file").write_text("")
    refused(lambda: fit(Net(), trainer=quiet(default_root_dir="file")))


def test_the_loggers_leave_no_run_directory_after_a_refusal() -> None:
    trainer = quiet(logger=True, enable_progress_bar=True, enable_model_summary=True)
    refused(lambda: fit(net(configure_optimizers=lambda self: 3), trainer=trainer))


def takes_back_a_stop(trainer: Trainer) -> None:
    trainer.should_stop = True
    trainer.should_stop = False


@pytest.mark.parametrize(
    "does",
    [
        lambda self, loss, batch: takes_back_a_stop(self.trainer),
        lambda self, loss, batch: fit(Net(), trainer=self.trainer),
    ],
    ids=["a stop taken back", "fit inside fit"],
)
def test_use_of_the_trainer_inside_a_step(does: Any) -> None:
    refused(lambda: fit(net_that(does)), steps=1)


# -- several processes -------------------------------------------------------------------------------------------------


def test_two_processes_inside_pytest() -> None:
    refused(lambda: fit(Net(), trainer=quiet(devices=2)))


def test_two_processes_of_a_program_from_standard_input(tmp_path: Path) -> None:
    program = "from tests.helpers.mistakes import Net, fit, quiet\nfit(Net(), trainer=quiet(devices=2))\n"
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "standard input" in done.stderr
    assert "Run the code as a script" in done.stderr


UNUSED = """
from torch import nn
from tests.helpers.mistakes import Net, fit, quiet

class Mine(Net):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(2, 2)

fit(Mine(), trainer=quiet(devices=2))
"""


def test_parameters_without_gradient_on_two_processes(tmp_path: Path) -> None:
    result = fork_python(UNUSED, cwd=tmp_path).wait()
    assert result.returncode == 1
    assert "DDPStrategy(find_unused_parameters=True)" in result.stderr
    assert len(re.findall(r"rank \d of 2 failed", result.stderr)) == 1


# -- names of folders --------------------------------------------------------------------------------------------------


def test_folders_of_the_user_called_callbacks_and_strategies(tmp_path: Path) -> None:
    for name in ("callbacks", "strategies"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"mine = '{name}'\n")
    (tmp_path / "script.py").write_text(
        "import callbacks, strategies\n"
        "from tests.helpers.mistakes import Net, fit, quiet\n"
        "from trainer.callbacks import Timer\n"
        "fit(Net(), trainer=quiet(callbacks=Timer()))\n"
        "print(callbacks.mine, strategies.mine)\n"
    )
    assert "callbacks strategies" in run_python(tmp_path / "script.py", cwd=tmp_path).check().stdout


@pytest.mark.parametrize("name", ["callbacks", "strategies"])
def test_the_folders_of_this_repository_by_their_second_name(name: str, tmp_path: Path) -> None:
    result = run_python(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport {name}\n", cwd=tmp_path).check(1)
    assert f"imported as {name!r}" in result.stderr
    assert f"trainer.{name}" in result.stderr


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="max_epoch"):
        Trainer(max_epoch=3)
    assert issubclass(ConfigError, ValueError)
