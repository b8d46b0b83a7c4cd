"""Scripts with LightningCLI: files, words and methods of subclasses, as in Lightning, and the same losses."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.project import Command, assert_recorded, done
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.cli.lightning_cli import LightningArgumentParser, LightningCLI

SCRIPT = """
import torch
from torch.utils.data import DataLoader
from trainer.pytorch import Callback, LightningDataModule, LightningModule
from trainer.pytorch.cli import LightningCLI, OptimizerCallable


class Net(LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net(batch).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Rows(LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size
        self.columns = 3 * batch_size

    def train_dataloader(self):
        return DataLoader(torch.randn(32, 4, generator=torch.Generator().manual_seed(3)), self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Given(LightningModule):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.SGD):
        super().__init__()
        self.optimizer, self.net = optimizer, torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Greeting(Callback):
    def __init__(self, name: str, times: int = 1):
        self.name, self.times = name, times


class Bare(LightningModule):
    def __init__(self, width: int = 1):
        super().__init__()
        self.net = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()


if __name__ == "__main__":
    cli = MADE
"""
CONFIG = """\
seed_everything: 7
trainer:
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: no  # false in YAML 1.1
  logger: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val_loss, patience: 9}
model:
  lr: 0.02
data:
  batch_size: 8
"""
QUICK = ("--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")
Script = Callable[..., dict[str, Any]]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Script:
    """Run a script that makes `cli` in this way, with these words after its name; return its names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.utils.data.DataLoader, "multiprocessing_context", None, raising=False)
    (tmp_path / "run.yaml").write_text(CONFIG)

    def run(made: str, *words: str) -> dict[str, Any]:
        (tmp_path / "main.py").write_text(SCRIPT.replace("MADE", made))
        monkeypatch.setattr(sys, "argv", ["main.py", *words])
        return runpy.run_path("main.py", run_name="__main__")

    return run


@pytest.mark.filterwarnings("ignore")
def test_fit_computes_what_lightning_does(script: Script) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    losses = script("LightningCLI(Net, Rows)", "fit", "--config", "run.yaml")["cli"].model.losses
    text = SCRIPT.replace(
        "trainer.pytorch.cli import LightningCLI, OptimizerCallable", "typing import Any as OptimizerCallable"
    )
    theirs: dict[str, Any] = {}
    exec(text.replace("trainer.pytorch", "pytorch_lightning"), theirs)
    pl.seed_everything(7, workers=True)
    net, rows = theirs["Net"](lr=0.02), theirs["Rows"](8)
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    pl.Trainer(max_epochs=2, accelerator="cpu", **options).fit(net, datamodule=rows)
    assert losses == net.losses
    assert len(losses) == 8


def test_evaluations_take_a_checkpoint_of_the_script(
    script: Script, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    width = "--model.width=3"
    script("LightningCLI(Net, Rows)", "fit", "--config", "run.yaml", width)
    for stage in ("validate", "test", "predict"):
        cli = script("LightningCLI(Net, Rows)", stage, "--config", "run.yaml", "--ckpt_path", "last")["cli"]
        assert cli.model.net[0].out_features == 3  # as in the checkpoint
        assert cli.trainer.global_step == 8 or stage == "predict"
    # The configuration in the run directory names the classes by the script's file.
    done(command("validate", "--config", "runs/version_0/config.yaml", "--ckpt-path", "last"))


def test_words_lie_over_files_and_files_over_defaults(script: Script, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("model: {width: 7}\ntrainer: {max_epochs: 3}\nseed_everything: true\n")
    words = ("--config", "run.yaml", "--config", "more.yaml", "--model.lr=0.5", "--trainer.max_steps=1")
    cli = script("LightningCLI(Net, Rows, run=False, trainer_defaults={'max_epochs': 9})", *words)["cli"]
    assert (cli.model.hparams.width, cli.model.hparams.lr, cli.datamodule.batch_size) == (7, 0.5, 8)
    assert (cli.trainer.max_epochs, cli.trainer.max_steps, cli.trainer.seed) == (3, 1, 0)
    assert cli.config.model == {"width": 7, "lr": 0.5}
    assert cli.config["trainer"]["max_epochs"] == 3
    assert cli.config.trainer.num_nodes == 1  # a default
    assert cli.config.seed_everything == 0
    assert script("LightningCLI(Net, Rows, run=False, seed_everything_default=5)")["cli"].trainer.seed == 5
    assert script("LightningCLI(Net, Rows, run=False)", "--seed_everything", "6")["cli"].trainer.seed == 6


def test_values_of_files_are_lightnings(script: Script, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("model: {width: 010}\nemail: no\ntrainer: {max_time: 12:30, logger: no}\n")
    made = SUBCLASS.replace("type(", "[seen := []] and type(", 1)
    cli = script(made, "fit", "--config", "old.yaml", *QUICK)["cli"]
    assert (cli.model.hparams.width, cli.config.fit.email) == (8, False)
    assert cli.config.fit.trainer.logger is False


def test_a_section_of_a_file_belongs_to_its_command(script: Script, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text("fit:\n  model: {width: 5}\nvalidate:\n  model: {width: 6}\n")
    cli = script("LightningCLI(Net, Rows)", "fit", "--config", "all.yaml", *QUICK)["cli"]
    assert cli.model.hparams.width == 5
    assert cli.config["fit"]["model"]["width"] == 5


def test_objects_of_the_script_are_added_to_those_of_the_configuration(script: Script) -> None:
    made = "LightningCLI(Net, Rows, run=False, trainer_defaults={'callbacks': Greeting('a'), 'max_epochs': 1}, " + (
        "trainer_class=lambda **options: __import__('trainer').Trainer(**options | {'max_epochs': 4}))"
    )
    trainer = script(made, "--config", "run.yaml")["cli"].trainer
    assert {"EarlyStopping", "Greeting"} <= {type(one).__name__ for one in trainer.callbacks}
    assert trainer.max_epochs == 4


SUBCLASS = """type("Mine", (LightningCLI,), {
        "add_arguments_to_parser": lambda self, parser: (
            parser.add_argument("--email", default="me", type=str),
            parser.add_argument("--flag", default=True, type=bool),
            parser.add_lightning_class_args(Greeting, "greeting"),
            parser.set_defaults({"greeting.name": "hello", "model.width": 6}),
            parser.link_arguments("data.columns", "model.width") if "linked" in __import__("sys").argv[0] else None,
            parser.link_arguments("trainer.max_steps", "greeting.times"),
        ),
        "before_fit": lambda self: seen.append("before"),
        "after_fit": lambda self: seen.append(self.trainer.global_step),
        "before_instantiate_classes": lambda self: seen.append(self.config.fit.email),
        "after_instantiate_classes": lambda self: seen.append(type(self.model).__name__),
    })(Net, Rows)"""


def test_a_subclass_adds_options_callbacks_defaults_links_and_steps(script: Script, tmp_path: Path) -> None:
    made = SUBCLASS.replace("type(", "[seen := []] and type(", 1)
    found = script(made, "fit", *QUICK, "--greeting.name=hi", "--flag", "false")
    cli, seen = found["cli"], found["seen"]
    assert seen == ["me", "Net", "before", 2]
    (greeting,) = [one for one in cli.trainer.callbacks if type(one).__name__ == "Greeting"]
    assert (greeting.name, greeting.times) == ("hi", 2)
    assert cli.model.hparams.width == 6
    assert (cli.config.fit.email, cli.config.fit.flag) == ("me", False)
    (tmp_path / "own.yaml").write_text("email: file\nflag: true\ngreeting: {name: file}\n")
    found = script(made, "fit", "--config", "own.yaml", *QUICK, "--email", "typed")
    assert (found["cli"].config.fit.email, found["cli"].config.fit.flag) == ("typed", True)
    assert found["cli"].config.fit.greeting["name"] == "file"


def test_an_attribute_of_the_data_is_linked(script: Script) -> None:
    made = SUBCLASS.replace("type(", "[seen := []] and type(", 1).replace('"linked" in', '"main" in')
    assert script(made, "fit", *QUICK, "--data.batch_size=2")["cli"].model.hparams.width == 6
    assert script(made, "fit", *QUICK)["cli"].model.hparams.width == 12


def test_the_configuration_may_choose_the_classes(script: Script, tmp_path: Path) -> None:
    made = "LightningCLI(LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True)"
    (tmp_path / "classes.yaml").write_text(
        "model: {class_path: __main__.Net, init_args: {width: 3}}\ndata: {class_path: __main__.Rows}\n"
    )
    for one in (made, "LightningCLI()"):
        cli = script(one, "fit", "--config", "classes.yaml", *QUICK, "--model.lr=0.5")["cli"]
        assert (cli.model.hparams.width, cli.model.hparams.lr) == (3, 0.5)


def test_an_optimizer_and_its_schedule_are_chosen(script: Script) -> None:
    words = ("--optimizer=Adam", "--optimizer.lr=0.5", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3")
    cli = script("LightningCLI(Bare, Rows)", "fit", *QUICK, *words)["cli"]
    assert type(cli.trainer.optimizers[0]) is torch.optim.Adam
    made = """type("Mine", (LightningCLI,), {"add_arguments_to_parser": lambda self, parser: (
        parser.add_optimizer_args(torch.optim.SGD), parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR))})
        (Bare, Rows)""".replace("\n", "")
    cli = script(made, "fit", *QUICK, "--optimizer.lr=0.1", "--lr_scheduler.step_size=1")["cli"]
    assert type(cli.trainer.optimizers[0]) is torch.optim.SGD


def test_a_module_makes_its_optimizer_by_what_the_command_line_gives(script: Script) -> None:
    words = ("--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=0.25")
    (optimizer,) = script("LightningCLI(Given, Rows)", "fit", *QUICK, *words)["cli"].trainer.optimizers
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.Adam, 0.25)


def test_print_config_gives_a_file_for_the_same_command(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", "run.yaml", "--model.width=3")
    with pytest.raises(SystemExit) as end:
        script("LightningCLI(Net, Rows)", "fit", *words, "--print_config")
    assert end.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    one, other = (
        script("LightningCLI(Net, Rows)", "fit", *given)["cli"].model.losses
        for given in (words, ("--config", "printed.yaml"))
    )
    assert one == other
    with pytest.raises(SystemExit) as end:
        script("LightningCLI(Net, Rows)", "fit", "--help")
    assert end.value.code == 0
    assert "--trainer.max_epochs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "words"),
    {
        "LightningCLI(Net, Rows)": "",
        "LightningCLI(Net, Rows )": "train --config run.yaml",
        "LightningCLI(Net,  Rows)": "fit --config none.yaml",
        "LightningCLI( Net, Rows)": "fit --model.widht 3",
        "LightningCLI(Net, Rows,)": "fit --trainer.max_epoch 3 --confi run.yaml",
        "LightningCLI(Net, Rows, run=False)": "fit",
        "LightningCLI(None, Rows)": "fit --data.batch_size 4",
    }.items(),
    ids=range(7),
)
def test_what_is_wrong_is_said_before_anything_is_made(
    made: str, words: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        script(made, *words.split())
    assert end.value.code == 2
    assert_recorded(capsys.readouterr().err)


@pytest.mark.parametrize(
    "options",
    [
        {"parser_kwargs": {"default_config_files": ["run.yaml"]}},
        {"parser_kwargs": {"fit": {"default_env": True}}},
        {"save_config_callback": Callback},
    ],
    ids=range(3),
)
def test_arguments_that_would_change_something_are_refused(options: dict[str, Any]) -> None:
    with raises_recorded(ConfigError):
        LightningCLI(args=["fit"], **options)


def test_defaults_of_the_trainer_may_be_classes_with_arguments(script: Script) -> None:
    logger = {"class_path": "trainer.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
    made = f"LightningCLI(Net, Rows, run=False, trainer_defaults=dict(logger={logger}), parser_kwargs=PARSER)"
    made = made.replace("PARSER", "dict(parser_mode='omegaconf')")
    assert script(made, "--config", "run.yaml")["cli"].trainer.logger is None  # as the file says
    trainer = script(made, "--trainer.logger.save_dir=other")["cli"].trainer
    assert (type(trainer.logger).__name__, Path(trainer.logger.save_dir).name) == ("CSVLogger", "other")


def test_a_link_that_computes_is_refused() -> None:
    with raises_recorded(ConfigError):
        LightningArgumentParser().link_arguments("data.columns", "model.width", compute_fn=len)
