"""Loggers with a `save_dir` leave the files of earlier runs alone, and a resumed run finds its own again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
