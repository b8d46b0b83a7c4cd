"""Loggers with a `save_dir` leave the files of earlier runs alone, and a resumed run finds its own again."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import run_python
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, TensorBoardLogger

FILES = {CSVLogger: "metrics.csv", JSONLLogger: "metrics.jsonl", TensorBoardLogger: "events.out.tfevents.*"}


def train(kind: Any, save_dir: Path, root: Path, epochs: int, ckpt_path: str | None = None) -> None:
    logger = kind(save_dir / kind.__name__)
    writer = ModelCheckpoint(dirpath=root, save_top_k=-1)
    trainer = quiet(
        max_epochs=epochs, log_every_n_steps=1, logger=logger, callbacks=[writer], enable_checkpointing=True
    )
    trainer.fit(Toy(), loader(2), ckpt_path=ckpt_path)


@pytest.mark.parametrize("kind", FILES)
def test_a_new_run_does_not_write_over_another(kind: type, tmp_path: Path) -> None:
    folder, name = tmp_path / kind.__name__, FILES[kind]
    train(kind, tmp_path, tmp_path / "a", 2)
    first = {path: path.read_bytes() for path in folder.glob(name)}
    assert first
    train(kind, tmp_path, tmp_path / "b", 1)
    assert {path: path.read_bytes() for path in folder.glob(name)} == first
    assert list((folder / "version_1").glob(name))
    train(kind, tmp_path, tmp_path / "b", 2, ckpt_path="last")
    assert not (folder / "version_2").exists()
    if kind is CSVLogger:
        lines = (folder / "version_1" / name).read_text().splitlines()
        assert [line.partition(",")[0] for line in lines] == ["step", "1", "2", "3", "4"]
    assert {path: path.read_bytes() for path in folder.glob(name)} == first


@pytest.mark.parametrize("kind", FILES)
def test_a_run_from_the_path_of_a_checkpoint_leaves_the_files_of_the_run_that_wrote_it(
    kind: type, tmp_path: Path
) -> None:
    folder, name = tmp_path / kind.__name__, FILES[kind]
    train(kind, tmp_path, tmp_path / "a", 1)
    checkpoint = str(next((tmp_path / "a").glob("epoch=*")))
    train(kind, tmp_path, tmp_path / "a", 3, ckpt_path="last")
    first = {path: path.read_bytes() for path in folder.glob(name)}
    for epochs, ckpt_path in (2, checkpoint), (4, "last"):
        train(kind, tmp_path, tmp_path / "b", epochs, ckpt_path)
    assert {path: path.read_bytes() for path in folder.glob(name)} == first
    assert list((folder / "version_1").glob(name))
    assert not (folder / "version_2").exists()


def test_a_folder_is_a_text(tmp_path: Path) -> None:
    for logger in (CSVLogger(tmp_path), TensorBoardLogger(tmp_path)):
        assert logger.log_dir + "/x" == str(tmp_path / "x")


@pytest.mark.parametrize("argument", ["name", "version"])
@pytest.mark.parametrize("text", ["a\0b", "x" * 300])
def test_a_folder_that_no_file_system_has_is_refused(argument: str, text: str) -> None:
    for kind in (CSVLogger, TensorBoardLogger):
        with raises_recorded(ConfigError):
            kind("runs", **{argument: text})


@pytest.mark.parametrize("kind", FILES)
def test_two_that_would_write_the_same_files_are_refused(kind: Any) -> None:
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, logger=[kind(), kind()]).fit(Toy(), loader(2))
    quiet(max_epochs=1, logger=[kind(), kind("other")]).fit(Toy(), loader(2))


SAME: dict[str, Any] = {
    "a number and its folder": lambda: [CSVLogger("a", "n", 0), CSVLogger("a", "n", "version_0")],
    "a path and a name": lambda: [TensorBoardLogger("a", "n", 0), TensorBoardLogger("a/n", version=0)],
    "the run directory": lambda: [CSVLogger(), CSVLogger("runs", version=0)],
    "a link": lambda: [JSONLLogger("real"), JSONLLogger("link")],
}


@pytest.mark.parametrize("case", SAME)
def test_one_folder_under_two_names_is_refused(case: str) -> None:
    Path("real").mkdir()
    Path("link").symlink_to("real")
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, logger=SAME[case](), default_root_dir="runs").fit(Toy(), loader(2))
    assert not list(Path("runs").glob("*"))


# -- the version that is read before the run ---------------------------------------------------------------------------


def named(kind: Any, folder: str = "logs") -> Any:
    return JSONLLogger(folder) if kind is JSONLLogger else kind(folder, name="exp")


def beside_logs(logger: Any, **options: Any) -> ModelCheckpoint:
    """Return the usual callback, whose checkpoints are in the folder of the run's logs."""
    return ModelCheckpoint(dirpath=f"{logger.log_dir}/checkpoints", **options)


def start(epochs: int, ckpt_path: Any = None, kind: Any = CSVLogger, module: Any = None, **options: Any) -> Any:
    """Do what a program does at each start."""
    logger = named(kind)
    before = logger.version, logger.log_dir
    trainer = quiet(
        max_epochs=epochs,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[beside_logs(logger, save_top_k=-1, **options)],
        enable_checkpointing=True,
        default_root_dir="runs",
    )
    trainer.fit(module or Toy(), loader(2), ckpt_path=ckpt_path)
    return trainer, before


@pytest.mark.parametrize("kind", FILES)
def test_the_version_before_a_run_is_that_of_the_run(kind: Any) -> None:
    for number in range(3):
        trainer, before = start(1, kind=kind)
        logger = trainer.loggers[0]
        assert before == (logger.version, logger.log_dir)
        assert logger.version == number
        assert Path(trainer.checkpoint_callback.best_model_path).parent == Path(logger.log_dir, "checkpoints")
        assert list(Path(logger.log_dir).glob(FILES[kind]))


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_next_version_is_lightnings(kind: Any, tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    for name in ("version_0", "version_4", "version_nonumber", "other"):
        (tmp_path / "exp" / name).mkdir(parents=True)
    (tmp_path / "exp" / "version_9").touch()
    logger = kind(tmp_path, name="exp")
    theirs = getattr(import_module("pytorch_lightning.loggers"), kind.__name__)(tmp_path, name="exp")
    assert (logger.version, logger.log_dir) == (theirs.version, theirs.log_dir) == (5, str(tmp_path / "exp/version_5"))
    assert (logger.root_dir, logger.save_dir) == (str(tmp_path / "exp"), str(tmp_path))
    quiet(max_epochs=1, logger=logger)
    assert not (tmp_path / "exp" / "version_5").exists()


@pytest.mark.parametrize("kind", FILES)
def test_a_logger_without_a_trainer_has_a_folder_for_each_run(kind: Any) -> None:
    folders = []
    for number in range(2):
        logger = named(kind)
        logger.log_metrics({"x": 1.0}, step=number)
        logger.save()
        folders.append(logger.log_dir)
        logger.close()
    assert len({*folders}) == 2
    assert all(len(list(Path(folder).glob(FILES[kind]))) == 1 for folder in folders)


def test_a_given_version_stays(tmp_path: Path) -> None:
    for _ in range(2):
        logger = CSVLogger(tmp_path, "exp", version=3)
        assert (logger.version, logger.log_dir) == (3, str(tmp_path / "exp/version_3"))
        quiet(max_epochs=1, log_every_n_steps=1, logger=logger).fit(Toy(), loader(2))
        assert (logger.version, logger.log_dir) == (3, str(tmp_path / "exp/version_3"))


def test_loggers_of_one_folder_have_one_version() -> None:
    for number in range(2):
        loggers = [CSVLogger("logs", "exp"), TensorBoardLogger("logs", "exp")]
        assert number or loggers[0].version == 0  # the other one is not asked before the run
        quiet(max_epochs=1, log_every_n_steps=1, logger=loggers).fit(Toy(), loader(2))
        assert [one.version for one in loggers] == [number, number]


def test_what_is_written_into_the_announced_folder_before_the_run_keeps_it() -> None:
    start(1)
    logger = CSVLogger("logs", name="exp")
    Path(logger.log_dir).mkdir()
    Path(logger.log_dir, "config.yaml").touch()
    logger.log_hyperparams({"lr": 0.1})
    quiet(max_epochs=1, log_every_n_steps=1, logger=logger).fit(Toy(), loader(2))
    assert logger.version == 1
    assert sorted(one.name for one in Path("logs/exp/version_1").iterdir()) == [
        "config.yaml",
        "hparams.json",
        "metrics.csv",
    ]


def test_an_announced_folder_that_another_run_has_taken_is_left_to_it() -> None:
    logger = CSVLogger("logs", name="exp")
    assert logger.version == 0
    start(1)
    quiet(max_epochs=1, log_every_n_steps=1, logger=logger).fit(Toy(), loader(2))
    assert logger.version == 1


def test_a_second_fit_has_the_next_version() -> None:
    trainer, _ = start(1)
    trainer.fit(Toy(), loader(2))
    assert trainer.loggers[0].version == 1


@pytest.mark.parametrize("kind", FILES)
def test_a_resumed_run_continues_beside_its_logs(kind: Any) -> None:
    """Although the program announces the next version at each start."""
    first, _ = start(2, kind=kind, monitor="train_loss", mode="min", filename="model")
    log_dir = first.loggers[0].log_dir
    other, _ = start(1, kind=kind)
    assert other.loggers[0].log_dir != log_dir
    Path(log_dir, "checkpoints").rename(Path(log_dir, "kept"))  # so that the newest run is not the one to continue
    again, before = start(2, "last", kind=kind, monitor="train_loss", mode="min")
    assert (again.global_step, again.loggers[0].version, before[0]) == (4, 1, 2)
    assert again.run_dir == other.run_dir
    assert again.checkpoint_callback.dirpath == f"{Path(other.loggers[0].log_dir, 'checkpoints')}"
    assert {Path(one).parent for one in again.checkpoint_callback.best_k_models} == {
        Path(other.loggers[0].log_dir, "checkpoints")
    }
    names = {one.name for one in Path("logs").rglob("version_*")} - {"version_0", "version_1"}
    assert not names
    tested, _ = start(2, "last", kind=kind)  # and once more, with nothing left to train
    assert (tested.global_step, tested.run_dir) == (4, other.run_dir)


def test_the_best_checkpoint_of_an_earlier_start_stays_the_best() -> None:
    first, _ = start(2, monitor="step", mode="min")
    best = first.checkpoint_callback.best_model_path
    again, _ = start(4, "last", monitor="step", mode="min")
    assert again.checkpoint_callback.best_model_path == best
    assert len(again.checkpoint_callback.best_k_models) == 4
    logger = CSVLogger("logs", name="exp")
    saves = beside_logs(logger, monitor="step", mode="min")
    tester = quiet(logger=logger, callbacks=[saves], enable_checkpointing=True, default_root_dir="runs")
    tester.validate(Toy(), loader(2), ckpt_path="best")
    assert Path(tester.ckpt_path) == Path(best)


def test_two_checkpoint_callbacks_continue_in_one_version() -> None:
    def program(epochs: int, ckpt_path: str | None) -> Any:
        logger = CSVLogger("logs", name="exp")
        folder = f"{logger.log_dir}/checkpoints"
        callbacks = [
            ModelCheckpoint(f"{folder}/all", save_top_k=-1, filename="{step}"),
            ModelCheckpoint(f"{folder}/best", monitor="step", mode="max", filename="top"),
        ]
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": "runs", "log_every_n_steps": 1}
        trainer = quiet(max_epochs=epochs, logger=logger, callbacks=callbacks, **options)
        trainer.fit(Toy(), loader(2), ckpt_path=ckpt_path)
        return trainer

    program(1, None)
    again = program(2, "last")
    folder = Path("logs/exp/version_0/checkpoints").absolute()
    assert [Path(one.dirpath).absolute() for one in again.checkpoint_callbacks] == [folder / "all", folder / "best"]
    assert sorted(one.name for one in (folder / "all").glob("step*")) == ["step=2", "step=4"]
    assert not Path("logs/exp/version_1").exists()


PROGRAM = """
import json, os, signal, sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from trainer import Trainer, TrainModule
from trainer.callbacks import CSVLogger, ModelCheckpoint


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        crashed = Path(f"crashed{self.trainer.rank}")
        if self.global_step == 5 and not crashed.exists():
            crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("loss", loss := self.layer(batch).square().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


logger = CSVLogger("logs", name="exp")
Path(logger.log_dir).mkdir(parents=True, exist_ok=True)  # as who writes the configuration there
saves = ModelCheckpoint(f"{logger.log_dir}/checkpoints", every_n_train_steps=2, save_top_k=-1)
trainer = Trainer(
    max_steps=8, devices=2, accelerator="cpu", strategy="ddp", max_restarts=2, default_root_dir="runs", logger=logger,
    callbacks=[saves], log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(torch.ones(32, 1), batch_size=4), ckpt_path=sys.argv[1] if sys.argv[1:] else None)
found = [logger.version, str(logger.log_dir), saves.dirpath, saves.best_model_path, trainer.global_step]
Path(f"found{trainer.rank}.json").write_text(json.dumps(found))
"""


def test_processes_and_restarts_have_one_version(tmp_path: Path) -> None:
    """The launcher, its processes and those that it starts after a failure run the program, each from its beginning."""
    folder = tmp_path / "logs/exp/version_0"
    for arguments in ([], ["last"]):
        run_python(PROGRAM, *arguments, cwd=tmp_path)
        found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in (0, 1)]
        assert found[0] == found[1]
        last = str(folder / "checkpoints/epoch=1-step=8")
        assert found[0] == [0, str(folder), str(folder / "checkpoints"), last, 8]
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step", *map(str, range(1, 9))]
    steps = sorted(one.name.partition("step=")[2] for one in (folder / "checkpoints").glob("epoch*"))
    assert steps == ["2", "4", "6", "8"]
    assert (tmp_path / "crashed0").exists()
