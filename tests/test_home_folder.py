"""`~` is the home folder at every place that takes a folder or file from a user, and no folder `~` is ever made."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.examples import restored_imports
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.arguments import local_path
from trainer.callbacks import (
    CSVLogger,
    JSONLLogger,
    LambdaCallback,
    ModelCheckpoint,
    PredictionWriter,
    SimpleProfiler,
    TensorBoardLogger,
    TorchProfiler,
)
from trainer.callbacks.prediction_writer import read_predictions
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import read_metadata
from trainer.checkpoint.storage import as_storage_path
from trainer.cli.main import main
from trainer.strategies.deepspeed.config import read_config
from trainer.testing import compare_runs

MODULE = """
import torch
from trainer import TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.zeros(4, 2).split(2)

    val_dataloader = train_dataloader
"""
CONFIG = """
module: ~/net_at_home.py:Net
trainer:
  accelerator: cpu
  max_epochs: 1
  default_root_dir: ~/runs
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {dirpath: ~/of-config}
  logger:
    - class_path: CSVLogger
      init_args: {save_dir: ~/logs}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a home folder, apart from the current one; what a command imports from there is forgotten."""
    for name in ("home", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    with restored_imports():
        yield tmp_path / "home"


def saved(home: Path, name: str = "saved") -> str:
    """Write a checkpoint below the home folder; return its path with `~`."""
    trainer = quiet(max_epochs=1, default_root_dir=home / "first")
    trainer.fit(Toy(), loader(1), loader(1))
    trainer.save_checkpoint(home / name)
    return f"~/{name}"


def fit(**settings: Any) -> None:
    quiet(max_epochs=1, **settings).fit(Toy(), loader(3), loader(1))


def command(*arguments: str) -> None:
    assert main([*arguments]) == 0


def with_files(home: Path) -> None:
    (home / "net_at_home.py").write_text(MODULE)
    (home / "run.yaml").write_text(CONFIG)


WRITERS: dict[str, tuple[Callable[[], object], str]] = {
    "default_root_dir": (lambda: fit(default_root_dir="~/x"), "x/version_0"),
    "default_root_dir as a Path": (lambda: fit(default_root_dir=Path("~/x")), "x/version_0"),
    "ModelCheckpoint": (lambda: fit(callbacks=ModelCheckpoint("~/x"), enable_checkpointing=True), "x/last.json"),
    "CSVLogger": (lambda: fit(logger=CSVLogger("~/x")), "x/metrics.csv"),
    "JSONLLogger": (lambda: fit(logger=JSONLLogger("~/x")), "x/metrics.jsonl"),
    "TensorBoardLogger": (lambda: fit(logger=TensorBoardLogger("~/x")), "x"),
    "TorchProfiler": (lambda: fit(callbacks=TorchProfiler(dirpath="~/x", wait=0, warmup=1)), "x"),
    "PredictionWriter": (lambda: quiet(callbacks=PredictionWriter("~/x")).predict(Toy(), loader(1)), "x"),
    "init": (lambda: command("init", "--template", "gan", "~/x"), "x/config.yaml"),
    "config": (lambda: command("config", "--preset", "cpu", "--output", "~/x.yaml"), "x.yaml"),
}


@pytest.mark.parametrize("path_of", WRITERS)
def test_what_is_written_to_it_is_in_the_home_folder(path_of: str, home: Path) -> None:
    write, expected = WRITERS[path_of]
    write()
    assert (home / expected).exists()
    if expected == "x":
        assert any((home / "x").iterdir())
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith("~")]


def test_a_checkpoint_is_written_and_named_there(home: Path) -> None:
    seen: list[str] = []
    checkpoint = ModelCheckpoint("~/x")
    reported = LambdaCallback(on_checkpoint_saved=lambda trainer, module, path: seen.append(path))
    trainer = quiet(max_epochs=1, callbacks=[checkpoint, reported], enable_checkpointing=True)
    trainer.fit(Toy(), loader(1), loader(1))
    trainer.save_checkpoint("~/by hand")
    assert (home / "by hand").is_dir()
    assert Path(checkpoint.last_model_path).parent == Path(checkpoint.dirpath or "") == home / "x"
    assert seen == [checkpoint.last_model_path, str(home / "by hand")]


READERS: dict[str, Callable[[str], object]] = {
    "fit": lambda path: quiet(max_epochs=2).fit(Toy(), loader(1), loader(1), ckpt_path=path),
    "validate": lambda path: quiet().validate(Toy(), loader(1), ckpt_path=path),
    "test": lambda path: quiet().test(Toy(), loader(1), ckpt_path=Path(path)),
    "predict": lambda path: quiet().predict(Toy(), loader(1), ckpt_path=path),
    "load_from_checkpoint": lambda path: Toy.load_from_checkpoint(path),
    "read_checkpoint": lambda path: read_checkpoint(path),
    "CheckpointDirectory": lambda path: CheckpointDirectory("~").resolve(path),
    "compare_runs": lambda path: compare_runs(path, path),
    "checkpoint ls": lambda path: command("checkpoint", "ls", path),
    "checkpoint show": lambda path: command("checkpoint", "show", path),
    "checkpoint verify": lambda path: command("checkpoint", "verify", path),
    "checkpoint export": lambda path: command("checkpoint", "export", path, "~/weights.safetensors"),
}


@pytest.mark.parametrize("path_of", READERS)
def test_what_is_read_from_it_is_in_the_home_folder(path_of: str, home: Path) -> None:
    READERS[path_of](saved(home))
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith("~")]
    if path_of == "checkpoint export":
        assert (home / "weights.safetensors").is_file()


class Leave(Callback):
    """Change the working directory when a stage begins, as some libraries do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        os.chdir(self.folder)


@pytest.mark.parametrize("where", ["in a hook", "after the constructors"])
def test_relative_paths_stay_where_they_were_given(where: str, home: Path) -> None:
    """The constructors run in `working`, the rest in an empty folder."""
    empty, working = Path.cwd(), home / "working"
    working.mkdir()

    def trainer(steps: int) -> Trainer:
        os.chdir(working)
        callbacks = [
            *([Leave(empty)] if where == "in a hook" else []),
            ModelCheckpoint("ck", every_n_train_steps=1),
            ModelCheckpoint(every_n_train_steps=1),
            TorchProfiler(dirpath="traces", wait=0, warmup=1),
            PredictionWriter("predicted"),
        ]
        logger = [CSVLogger(), CSVLogger("csv"), JSONLLogger("jsonl"), TensorBoardLogger("events")]
        made = quiet(
            max_steps=steps,
            callbacks=callbacks,
            logger=logger,
            profiler=SimpleProfiler(dirpath="times"),
            default_root_dir="runs",
            enable_checkpointing=True,
        )
        if where == "after the constructors":
            os.chdir(empty)
        return made

    first = trainer(2)
    first.fit(Toy(), loader(4), loader(1))
    first.validate(Toy(), loader(1), ckpt_path="last")
    first.predict(Toy(), loader(1))
    second = trainer(3)
    second.fit(Toy(), loader(4), loader(1), ckpt_path="last")
    assert second.run_dir == first.run_dir == working / "runs" / "version_0"
    assert {path.name for path in (working / "ck").iterdir()} == {"last.json", "epoch=0-step=3"}
    assert (working / "runs" / "version_0" / "checkpoints" / "epoch=0-step=3").is_dir()
    written = {"ck", "csv", "events", "jsonl", "predicted", "runs", "times", "traces"}
    assert {path.name for path in working.iterdir()} == written
    assert list(empty.iterdir()) == []
    # What a checkpoint keeps of it is relative, so that a project can be moved.
    assert read_metadata(working / "ck" / "epoch=0-step=3")["run_dir"] == "runs/version_0"
    moved = working.rename(home / "moved")
    working.mkdir()
    os.chdir(moved)
    again = quiet(max_steps=4, callbacks=ModelCheckpoint("ck"), default_root_dir="runs", enable_checkpointing=True)
    again.fit(Toy(), loader(4), loader(1), ckpt_path="last")
    assert again.run_dir == moved / "runs" / "version_0"


def test_predictions_are_read_from_it(home: Path) -> None:
    quiet(callbacks=PredictionWriter("~/x")).predict(Toy(), loader(1))
    assert len(list(read_predictions("~/x"))) == 4


def test_commands_and_configuration_files(home: Path) -> None:
    with_files(home)
    command("fit", "--config", "~/run.yaml")
    assert (home / "runs" / "version_0" / "config.yaml").is_file()
    assert (home / "logs" / "metrics.csv").is_file()
    [checkpoint] = [path for path in (home / "of-config").iterdir() if path.is_dir() and not path.name.startswith(".")]
    command("validate", "--config", "~/run.yaml", f"--ckpt-path=~/of-config/{checkpoint.name}")
    command("fit", "--config=~/run.yaml", "--ckpt-path=~/of-config/last", "--trainer.default_root_dir=~/other")
    command(
        "validate", "--module", "~/net_at_home.py:Net", "--trainer.accelerator", "cpu", "--ckpt-path=~/of-config/last"
    )
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith("~")]


def test_a_configuration_of_deepspeed(home: Path) -> None:
    (home / "ds.json").write_text(json.dumps({"train_batch_size": 4}))
    assert read_config("~/ds.json") == {"train_batch_size": 4}
    with raises_recorded(ConfigError):
        read_config("~nobody-here/ds.json")


def test_another_users_home_and_names_that_only_begin_so(home: Path) -> None:
    user = getpass.getuser()
    assert local_path(f"~{user}/x") == Path(os.path.expanduser(f"~{user}")) / "x"
    assert local_path("~") == home
    assert local_path("runs/~/x") == Path("runs/~/x")
    assert local_path("./~x") == local_path(local_path("./~x")) == Path.cwd() / "~x"
    assert str(as_storage_path("memory://bucket/~/x")) == "memory://bucket/~/x"


@pytest.mark.parametrize(
    "use",
    [
        lambda: quiet(default_root_dir="~nobody-here/x"),
        lambda: ModelCheckpoint("~nobody-here/x"),
        lambda: CSVLogger("~nobody-here/x"),
        lambda: quiet().validate(Toy(), loader(1), ckpt_path="~nobody-here/x"),
        lambda: Toy.load_from_checkpoint("~nobody-here/x"),
    ],
)
def test_an_unknown_user_is_an_error(use: Callable[[], object], home: Path) -> None:
    with raises_recorded(ConfigError):
        use()
    assert list(Path.cwd().iterdir()) == []


def test_lightning_writes_there_too(home: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    trainer = lightning.Trainer(default_root_dir="~/x", logger=False, accelerator="cpu")
    assert trainer.default_root_dir == str(quiet(default_root_dir="~/x").settings.root) == str(home / "x")
    theirs = lightning.callbacks.ModelCheckpoint(dirpath="~/ck").dirpath
    assert theirs == ModelCheckpoint("~/ck").dirpath == str(home / "ck")
