"""ModelCheckpoint writes, names and keeps checkpoints as configured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer
from trainer.callback import Checkpoint
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import read_manifest


class Scored(Toy):
    """A module that logs one value of a list in each validation."""

    def __init__(self, values: Sequence[float], name: str = "val_loss") -> None:
        super().__init__()
        self.values, self.name = values, name

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and self.current_epoch < len(self.values):
            self.log(self.name, self.values[self.current_epoch])


def fit(
    checkpoint: ModelCheckpoint | list[Callback],
    module: Toy | None = None,
    batches: int = 4,
    ckpt_path: str | None = None,
    **settings: Any,
) -> Trainer:
    trainer = quiet(**{"max_epochs": 1, "enable_checkpointing": True, "callbacks": checkpoint, **settings})
    trainer.fit(module or Toy(), loader(batches), loader(2), ckpt_path=ckpt_path)
    return trainer


def there(folder: Path) -> list[str]:
    """Return the names of the checkpoints, sorted by step."""
    return [path.name for path in CheckpointDirectory(folder).list()]


def pointers(folder: Path) -> list[str | None]:
    files = [folder / f"{name}.json" for name in ("last", "best")]
    return [json.loads(file.read_bytes())["checkpoint"] if file.exists() else None for file in files]


class Saved(Callback):
    """Record the steps at which checkpoints were written."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_checkpoint_saved(self, trainer: Trainer, module: Any, path: str) -> None:
        assert read_manifest(path).info["step"] == trainer.global_step
        assert path == trainer.checkpoint_callbacks[0].last_model_path
        self.steps.append(trainer.global_step)


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "epochs", "steps"),
    [
        ({}, 3, [4, 8, 12]),
        ({"every_n_epochs": 2}, 5, [8, 16, 20]),
        ({"every_n_train_steps": 3}, 2, [3, 6, 8]),
        ({"every_n_train_steps": 4}, 2, [4, 8]),
        ({"train_time_interval": timedelta(hours=1)}, 2, [8]),
        ({"train_time_interval": 1e-9}, 1, [1, 2, 3, 4]),
        ({"every_n_epochs": 2, "save_top_k": 0, "save_last": False}, 1, []),
    ],
)
def test_the_steps(trigger: dict[str, Any], epochs: int, steps: list[int]) -> None:
    saved = Saved()
    fit([ModelCheckpoint(**trigger), saved], max_epochs=epochs)
    assert saved.steps == steps


@pytest.mark.parametrize("save", [True, False])
def test_an_exception_is_saved_if_wanted(save: bool, tmp_path: Path) -> None:
    class Failing(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError):
        fit(ModelCheckpoint(tmp_path / "c", save_on_exception=save), Failing())
    assert there(tmp_path / "c") == (["epoch=0-step=2"] if save else [])


# -- which are kept ----------------------------------------------------------------------------------------------------

VALUES = [0.5, 0.3, 0.4, 0.2, 0.6]


@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({"save_top_k": 1}, [3, 4], 3),
        ({"save_top_k": 2}, [1, 3, 4], 3),
        ({"save_top_k": 2, "mode": "max"}, [0, 4], 4),
        ({"save_top_k": 2, "save_last": False}, [1, 3], 3),
        ({"save_top_k": -1}, [0, 1, 2, 3, 4], 3),
        ({"save_top_k": 0}, [4], None),
    ],
)
def test_the_best_are_kept(options: dict[str, Any], kept: list[int], best: int | None, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="val_loss", **options)
    fit(checkpoint, Scored(VALUES), max_epochs=5)
    assert there(tmp_path) == [f"epoch={epoch}" for epoch in kept]
    assert list(checkpoint.kept) == there(tmp_path)
    assert pointers(tmp_path) == [f"epoch={kept[-1]}", None if best is None else f"epoch={best}"]
    assert checkpoint.best_model_path == ("" if best is None else str(tmp_path / f"epoch={best}"))
    assert checkpoint.best_model_score == (None if best is None else VALUES[best])
    assert checkpoint.last_model_path == str(tmp_path / f"epoch={kept[-1]}")


def test_without_monitor_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=2)
    fit(checkpoint, max_epochs=4)
    assert there(tmp_path) == ["epoch=2", "epoch=3"]
    assert pointers(tmp_path) == ["epoch=3", None]
    assert checkpoint.best_model_path == checkpoint.last_model_path
    assert checkpoint.best_model_score is None


def test_the_new_one_is_committed_and_pointed_to_before_an_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    remove = CheckpointDirectory.remove

    def spy(directory: CheckpointDirectory, name: str) -> None:
        seen.append((there(tmp_path), pointers(tmp_path)[0]))
        remove(directory, name)

    monkeypatch.setattr(CheckpointDirectory, "remove", spy)
    fit(ModelCheckpoint(tmp_path, filename="{epoch}"), max_epochs=3)
    assert seen == [(["epoch=0", "epoch=1"], "epoch=1"), (["epoch=1", "epoch=2"], "epoch=2")]


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "epoch=0-step=4"),
        ({"filename": "{epoch}-{val_loss:.2f}"}, "epoch=0-val_loss=0.12"),
        ({"filename": "e{epoch:03d} {val_loss:.1e}", "auto_insert_metric_name": False}, "e000 1.2e-01"),
        ({"filename": "a/b"}, "a_b"),
    ],
)
def test_names_are_filled_in(options: dict[str, Any], name: str, tmp_path: Path) -> None:
    fit(ModelCheckpoint(tmp_path, **options), Scored([0.123]))
    assert there(tmp_path) == [name]


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    for _ in range(3):
        fit(ModelCheckpoint(tmp_path, filename="same"))
    assert sorted(there(tmp_path)) == ["same", "same-v1", "same-v2"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_n_epochs": 1, "every_n_train_steps": 1},
        {"every_n_epochs": -1},
        {"every_n_train_steps": 1.5},
        {"train_time_interval": "1h"},
        {"save_top_k": -2},
        {"monitor": "val_loss", "mode": "minimum"},
        {"monitor": 3},
        {"monitor": "val_acc"},
        {"save_last": "lnk"},
        {"async_save": 1},
        {"on_write_error": "warning"},
        {"dirpath": 3},
        {"dirpath": "nosuch://x"},
        {"filename": 3},
        {"filename": "{epoch"},
        {"filename": "{val_loss:.2q}"},
    ],
    ids=str,
)
def test_arguments_that_cannot_be(arguments: dict[str, Any]) -> None:
    with raises_recorded(ConfigError):
        ModelCheckpoint(**arguments)


# -- going on ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_known_after_a_resume(tmp_path: Path) -> None:
    def go_on(epochs: int) -> ModelCheckpoint:
        checkpoint = ModelCheckpoint(filename="{epoch}", monitor="val_loss", save_top_k=2)
        fit(checkpoint, Scored([*VALUES, 0.9]), max_epochs=epochs, default_root_dir=tmp_path, ckpt_path="last")
        return checkpoint

    folder = tmp_path / "version_0" / "checkpoints"
    first = go_on(3)
    assert first.kept == {"epoch=1": 0.3, "epoch=2": 0.4}
    second = go_on(5)
    assert there(folder) == ["epoch=1", "epoch=3", "epoch=4"]
    assert list(second.kept) == there(folder)
    assert pointers(folder) == ["epoch=4", "epoch=3"]
    # A checkpoint that was deleted by hand is no problem.
    CheckpointDirectory(folder).remove("epoch=1")
    third = go_on(6)
    assert there(folder) == ["epoch=3", "epoch=4", "epoch=5"]
    assert third.best_model_score == 0.2


@pytest.mark.parametrize("other", [{"monitor": "val_gap", "mode": "min"}, {"monitor": "val_loss", "mode": "max"}, {}])
def test_values_of_another_monitor_are_not_compared(
    other: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Both(Scored):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("val_gap", 0.25)

    def go_on(epochs: int, **options: Any) -> ModelCheckpoint:
        checkpoint = ModelCheckpoint(filename="{epoch}", **options)
        fit(checkpoint, Both(VALUES), max_epochs=epochs, default_root_dir=tmp_path, ckpt_path="last")
        return checkpoint

    folder = tmp_path / "version_0" / "checkpoints"
    assert go_on(3, monitor="val_loss", mode="min").best == "epoch=1"
    caplog.clear()
    later = go_on(5, **other)
    assert (
        caplog.text.count("ModelCheckpoint(val_loss, min, every_n_epochs=1, {epoch}), which this run does not have")
        == 1
    )
    expected = {"epoch=3": 0.25} if other.get("mode") == "min" else {"epoch=4": VALUES[4]}
    if other:
        assert {name: value for name, value in later.kept.items() if name == later.best} == expected
    assert there(folder)[:2] == ["epoch=1", "epoch=2"]
    assert pointers(folder) == ["epoch=4", later.best if other else "epoch=1"]


def test_what_a_dying_process_could_not_delete_goes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(directory: CheckpointDirectory, name: str) -> None:
        raise KeyboardInterrupt

    def go_on(epochs: int) -> None:
        fit(ModelCheckpoint(filename="{epoch}"), max_epochs=epochs, default_root_dir=tmp_path, ckpt_path="last")

    folder = tmp_path / "version_0" / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            go_on(2)
    assert there(folder) == ["epoch=0", "epoch=1"]
    go_on(3)
    assert there(folder) == ["epoch=2"]


def test_a_checkpoint_by_hand_is_announced_too(tmp_path: Path) -> None:
    saved: list[str] = []

    class SavedPaths(Callback):
        def on_checkpoint_saved(self, trainer: Trainer, module: Any, path: str) -> None:
            saved.append(path)

        def on_train_step_end(self, trainer: Trainer, module: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "by hand", info={"why": "a test"})

    quiet(max_epochs=1, callbacks=SavedPaths()).fit(Toy(), loader(4))
    assert saved == [str(tmp_path / "by hand")]
    info = read_manifest(tmp_path / "by hand").info
    assert [type(info.pop(name)) for name in ("began", "captured")] == [int, int]
    assert info == {"step": 2, "epoch": 0, "finished": False, "why": "a test"}
    assert read_checkpoint(tmp_path / "by hand")["progress"]["step"] == 2


def test_a_checkpoint_callback_of_the_user_replaces_the_default() -> None:
    class Own(Checkpoint):
        """A callback that writes nothing."""

    own = Own()
    assert quiet(enable_checkpointing=True, callbacks=[own]).checkpoint_callbacks == [own]
    dry = quiet(enable_checkpointing=True, callbacks=[own], fast_dev_run=True)
    assert (own in dry.callbacks, dry.checkpoint_callbacks) == (False, [own])
    assert (own.best_model_path, own.best_model_score, own.last_model_path) == ("", None, "")
