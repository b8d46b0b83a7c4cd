"""In a process that runs as Lightning a single file holds objects of hooks and hyperparameters; folders hold data."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.checkpoint.lightning_file as files
from tests.helpers.toy import Toy, loader, quiet
from trainer import CheckpointError
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.names.states import AS_LIGHTNING


class Scale:
    """An object of a package, which is no data."""

    def __init__(self, by: float) -> None:
        self.by = by


class Holds(Toy):
    """Keeps objects as packages do: in hyperparameters, in an entry of its own, and in Lightning's entry."""

    def __init__(self, scale: Any = None, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: dict[str, Any] = {}
        self.steps = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["scale"], checkpoint["steps"] = Scale(self.steps), self.steps
        checkpoint["hyper_parameters"].update(special=Scale(7))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = {name: checkpoint[name] for name in ("scale", "steps")}


@pytest.fixture(autouse=True)
def as_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AS_LIGHTNING, "1")


def fitted(folder: Path, **options: Any) -> tuple[Any, Holds, Path]:
    module = Holds(Scale(3))
    best = ModelCheckpoint(folder / "kept", **options)
    trainer = quiet(max_epochs=2, callbacks=[best], enable_checkpointing=True, default_root_dir=folder)
    trainer.fit(module, loader(2))
    return trainer, module, Path(best.best_model_path)


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the function after which this process has written nothing, as a new one."""
    return lambda: monkeypatch.setattr(files, "_written", set())


@pytest.mark.parametrize("async_save", [False, True])
def test_the_file_has_objects_and_the_folder_has_not(
    async_save: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, file = fitted(tmp_path, async_save=async_save)
    read = torch.load(file, weights_only=False)
    assert (read["scale"].by, read["steps"]) == (4, 4)
    assert {name: one.by for name, one in read["hyper_parameters"].items() if name != "lr"} == {
        "scale": 3,
        "special": 7,
    }
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    folder = read_checkpoint(file.with_suffix(""))
    assert folder["added"] == {"steps": 4}
    assert folder["hyperparameters"]["module"] == {"lr": 0.1}
    assert caplog.text.count("on_save_checkpoint adds") <= 1


def test_this_process_reads_what_it_has_written(tmp_path: Path) -> None:
    trainer, module, file = fitted(tmp_path)
    loaded = Holds.load_from_checkpoint(file)
    assert (loaded.seen["scale"].by, loaded.hparams["scale"].by) == (4, 3)
    for path in ("best", str(file)):
        trainer.test(module, loader(1), ckpt_path=path)
        assert module.seen["scale"].by == 4
    resumed = Holds(Scale(3))
    quiet(max_epochs=3, default_root_dir=tmp_path / "again").fit(resumed, loader(2), ckpt_path=file)
    assert resumed.seen["scale"].by == 4
    alone = tmp_path / "alone.ckpt"
    trainer.save_checkpoint(alone)
    assert Holds.load_from_checkpoint(alone).seen["scale"].by == 4


def test_another_process_reads_objects_only_if_it_is_told_to(tmp_path: Path, forgets: Any) -> None:
    _, _, file = fitted(tmp_path)
    forgets()
    with pytest.raises(KeyError, match="scale; an object in a file is read with weights_only=False only"):
        Holds.load_from_checkpoint(file, scale=None)
    assert Holds.load_from_checkpoint(file, weights_only=False).seen["scale"].by == 4
    module = Holds(Scale(3))
    quiet(max_epochs=3, default_root_dir=tmp_path).fit(module, loader(2), ckpt_path=file, weights_only=False)
    assert module.seen["scale"].by == 4
    alone = tmp_path / "alone.ckpt"
    shutil.copy(file, alone)
    with pytest.raises(CheckpointError, match="would run code"):
        Holds.load_from_checkpoint(alone)
    assert Holds.load_from_checkpoint(alone, weights_only=False).seen["scale"].by == 4


def test_classes_that_the_program_allows_are_read(tmp_path: Path, forgets: Any) -> None:
    _, _, file = fitted(tmp_path)
    forgets()
    with torch.serialization.safe_globals([Scale]):
        assert Holds.load_from_checkpoint(file).seen["scale"].by == 4
        alone = Path(shutil.copy(file, tmp_path / "alone.ckpt"))
        assert Holds.load_from_checkpoint(alone).seen["scale"].by == 4


class Runs:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (Path.touch, (self.trace,))


def test_a_file_that_was_replaced_runs_nothing(tmp_path: Path) -> None:
    trainer, module, file = fitted(tmp_path)
    trace = tmp_path / "trace"
    torch.save({**torch.load(file, weights_only=False), "scale": Runs(trace)}, file)
    with pytest.raises(CheckpointError, match="would run code"):
        Holds.load_from_checkpoint(file)
    with pytest.raises(CheckpointError, match="would run code"):
        trainer.test(module, loader(1), ckpt_path=str(file))
    with pytest.raises(KeyError, match="scale"):  # from the folder
        trainer.test(module, loader(1), ckpt_path="best")
    assert not trace.exists()


def test_a_file_lacks_objects_that_cannot_be_pickled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Local(Holds):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["of_lambda"] = lambda: None

    saved = ModelCheckpoint(tmp_path)
    trainer = quiet(max_steps=1, callbacks=[saved], enable_checkpointing=True)
    trainer.fit(Local(), loader(1))
    assert "of_lambda" not in torch.load(saved.best_model_path, weights_only=False)
    assert "cannot be pickled" in caplog.text


def test_elsewhere_an_object_of_a_hook_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AS_LIGHTNING)
    with pytest.raises(CheckpointError, match=r"'scale'.* is a"):
        fitted(tmp_path, single_file=True)


def test_each_file_has_the_objects_of_its_step(tmp_path: Path) -> None:
    _, module, file = fitted(tmp_path, save_top_k=-1, every_n_train_steps=1)
    assert module.steps == 4
    kept = [torch.load(one, weights_only=False) for one in file.parent.glob("epoch*.ckpt")]
    assert {one["global_step"] for one in kept} == {1, 2, 3, 4}
    assert all(one["scale"].by == one["global_step"] for one in kept)
