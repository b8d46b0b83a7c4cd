"""A monitored value belongs to the step it was measured at, and to the checkpoint of that step alone."""

from __future__ import annotations

import itertools
import logging
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import start_python
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer
from trainer.callbacks import EarlyStopping, ModelCheckpoint
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.manifest import verify_checkpoint


class ByStep(Toy):
    """Logs in each validation the value that belongs to the step."""

    def __init__(self, values: dict[int, float]) -> None:
        super().__init__()
        self.values = values

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.values[self.global_step])


def fit(checkpoint: ModelCheckpoint, module: Toy, epochs: int = 1, batches: int = 4, **settings: Any) -> Trainer:
    trainer = quiet(max_epochs=epochs, enable_checkpointing=True, callbacks=checkpoint, **settings)
    trainer.fit(module, loader(batches), loader(1))
    return trainer


def scores(checkpoint: ModelCheckpoint) -> dict[str, float | None]:
    """Return the scores of the checkpoints that are kept, which are those in the folder."""
    assert sorted(checkpoint.kept) == sorted(path.name for path in CheckpointDirectory(folder(checkpoint)).list())
    return checkpoint.kept


def folder(checkpoint: ModelCheckpoint) -> Path:
    return Path(checkpoint.last_model_path).parent


# -- the step of a value -----------------------------------------------------------------------------------------------


def test_a_save_at_the_epochs_last_step_waits_for_its_validation() -> None:
    checkpoint = ModelCheckpoint(every_n_train_steps=4, monitor="val_loss", filename="{step}")
    fit(checkpoint, ByStep({4: 0.5, 8: 0.9, 12: 0.8}), epochs=3)
    assert scores(checkpoint) == {"step=4": 0.5, "step=12": 0.8}


def test_the_last_lines_of_a_run_name_the_best_checkpoint() -> None:
    checkpoint, newest = ModelCheckpoint(monitor="val_loss", filename="{step}"), ModelCheckpoint()
    assert checkpoint.output_location() is None
    fit(checkpoint, ByStep({4: 0.5, 8: 0.25, 12: 0.8}), epochs=3)
    assert checkpoint.output_location() == ("best val_loss 0.25:", folder(checkpoint) / "step=8")
    fit(newest, ByStep({4: 0.5}))
    assert newest.output_location() is None


@pytest.mark.parametrize(
    ("trigger", "settings"),
    [
        ({}, {"epochs": -1, "max_steps": 6}),
        ({"every_n_train_steps": 3}, {"val_check_interval": 2}),
        ({}, {"val_check_interval": 3, "batches": 4}),
        ({"every_n_epochs": 1}, {"epochs": 2, "check_val_every_n_epoch": 2, "batches": 2}),
    ],
)
def test_a_checkpoint_between_validations_has_no_score(trigger: dict[str, Any], settings: dict[str, Any]) -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=-1, filename="{step}", **trigger)
    fit(checkpoint, ByStep(dict.fromkeys(range(9), 0.5)), **settings)
    interval, epochs = (
        settings.get("val_check_interval", settings.get("batches", 4)),
        settings.get("check_val_every_n_epoch", 1),
    )
    known = {f"step={step}" for step in range(interval * epochs, 9, interval * epochs)}
    assert any(score is None for score in scores(checkpoint).values())
    for name, score in scores(checkpoint).items():
        assert (score == 0.5) == (name in known), name


def test_of_equal_values_the_older_one_is_kept() -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{step}", save_last=False)
    fit(checkpoint, ByStep({1: 2, 2: 1, 3: 1, 4: 1, 5: 2}), epochs=5, batches=1)
    assert scores(checkpoint) == {"step=2": 1, "step=3": 1}
    assert Path(checkpoint.best_model_path).name == "step=2"


def test_an_interval_of_one_batch_is_no_epoch() -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", filename="{step}")
    fit(checkpoint, ByStep({1: 0.5, 2: 0.1, 3: 0.9, 4: 0.8}), val_check_interval=1)
    assert scores(checkpoint) == {"step=2": 0.1, "step=4": 0.8}


def test_a_save_by_time_waits_for_the_validation_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr("trainer.callbacks.checkpoint.time.monotonic", lambda: float(next(clock)))
    checkpoint = ModelCheckpoint(monitor="val_loss", train_time_interval=1, filename="{step}", save_top_k=-1)
    fit(checkpoint, ByStep({2: 0.5, 4: 0.6, 6: 0.4}), batches=6, val_check_interval=2)
    assert scores(checkpoint) == {
        "step=1": None,
        "step=2": 0.5,
        "step=3": None,
        "step=4": 0.6,
        "step=5": None,
        "step=6": 0.4,
    }


def test_the_mean_of_a_training_metric_scores_the_end_of_its_epoch() -> None:
    class Trained(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", float(self.global_step), on_step=True, on_epoch=True)
            return self._loss(batch)

    checkpoint = ModelCheckpoint(monitor="loss", save_top_k=-1, filename="{step}")
    fit(checkpoint, Trained(), epochs=2, val_check_interval=2)
    assert scores(checkpoint) == {"step=2": None, "step=4": 1.5, "step=6": None, "step=8": 5.5}
    # Saves by step follow the steps' values.
    checkpoint = ModelCheckpoint(monitor="loss", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    fit(checkpoint, Trained(), epochs=-1, max_steps=6)
    assert scores(checkpoint) == {"step=2": 1, "step=4": 1.5, "step=6": 5}


def test_a_value_logged_when_the_epoch_has_ended() -> None:
    class AtEnd(Toy):
        def on_train_epoch_end(self) -> None:
            self.log("late", 5.0 - self.current_epoch)

    checkpoint = ModelCheckpoint(monitor="late", filename="{step}", save_last=False)
    fit(checkpoint, AtEnd(), epochs=3, val_check_interval=2)
    assert scores(checkpoint) == {"step=12": 3.0}


def test_a_loader_that_does_not_know_its_length() -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", every_n_train_steps=4, save_top_k=-1, filename="{step}-{val_loss}")
    trainer = quiet(max_steps=8, enable_checkpointing=True, callbacks=checkpoint)
    trainer.fit(ByStep({4: 0.5, 8: 0.25}), Endless(4), loader(1))
    assert scores(checkpoint) == {"step=4-val_loss=0.5": 0.5, "step=8-val_loss=0.25": 0.25}


class Endless:
    """Batches without a length."""

    def __init__(self, batches: int) -> None:
        self.batches = list(loader(batches))

    def __iter__(self) -> Any:
        yield from self.batches


@pytest.mark.parametrize(
    ("named", "times"), [({"monitor": "train_loss"}, 2), ({"filename": "{step}-{train_loss}"}, 2), ({}, 1)]
)
def test_the_last_step_of_data_without_a_length_is_written_again_at_the_epochs_end(
    named: dict[str, str], times: int
) -> None:
    class Counted(Toy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            saved.append(self.global_step)

    for data, last in ((Endless(4), times), (loader(4), 1)):
        saved: list[int] = []
        checkpoint = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, **named)
        quiet(max_epochs=1, enable_checkpointing=True, callbacks=checkpoint).fit(Counted(), data)
        assert saved == [0, 2] + [4] * last  # 0: the rehearsal
        assert len(checkpoint.kept) == 2


@pytest.mark.parametrize(("monitor", "kept"), [("step", [4, 5, 6]), ("epoch", [4, 5, 6])])
@pytest.mark.parametrize("trigger", [{}, {"every_n_train_steps": 1}])
def test_the_newest_by_step_or_epoch(monitor: str, kept: list[int], trigger: dict[str, int]) -> None:
    checkpoint = ModelCheckpoint(
        monitor=monitor, mode="max", save_top_k=3, filename="{step}", save_last=False, **trigger
    )
    fit(checkpoint, Toy(), epochs=6, batches=1)
    assert list(scores(checkpoint)) == [f"step={step}" for step in kept]
    assert Path(checkpoint.best_model_path).name == "step=6"


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trigger", [{}, {"every_n_train_steps": 2}, {"train_time_interval": 1000}, {"every_n_epochs": 3}]
)
@pytest.mark.parametrize("wrong", [{"monitor": "val_los"}, {"filename": "{val_los:.1f}"}])
def test_a_name_misspelt_is_reported_after_the_first_validation(trigger: dict[str, Any], wrong: dict[str, Any]) -> None:
    trainer = quiet(
        max_epochs=3, val_check_interval=2, enable_checkpointing=True, callbacks=ModelCheckpoint(**trigger, **wrong)
    )
    with raises_recorded(ConfigError):
        trainer.fit(Toy(), loader(4), loader(1))
    assert trainer.global_step == 2


def test_a_value_not_known_yet_is_nan_in_a_name() -> None:
    checkpoint = ModelCheckpoint(
        filename="{step}-{val_loss:.1f}", monitor="val_loss", every_n_train_steps=1, save_top_k=-1
    )
    fit(checkpoint, ByStep({2: 0.5, 4: 0.3}), val_check_interval=2)
    assert list(scores(checkpoint)) == [
        "step=1-val_loss=nan",
        "step=2-val_loss=0.5",
        "step=3-val_loss=nan",
        "step=4-val_loss=0.3",
    ]


@pytest.mark.parametrize("monitor", ["val_los", "val_loss", "train_loss", "val_lose"])
def test_monitors_that_are_nearly_a_name_of_the_sanity_check_are_refused_before_the_first_step(monitor: str) -> None:
    class Stop(Callback):
        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            raise InterruptedError

    class Lose(Toy):
        def on_train_epoch_end(self) -> None:
            self.log("val_lose", 1.0)

    callbacks = [ModelCheckpoint(filename=f"{{{monitor}:.2f}}"), EarlyStopping(monitor), Stop()]
    trainer = quiet(max_epochs=1, num_sanity_val_steps=1, enable_checkpointing=True, callbacks=callbacks)
    with pytest.raises(ConfigError if monitor == "val_los" else InterruptedError) as refused:
        trainer.fit(Lose(), loader(2), loader(1))
    if monitor == "val_los":
        for problem in ("2 problems", "filename='{val_los:.2f}')", "EarlyStopping(monitor='val_los')"):
            assert problem in str(refused.value)
        assert str(refused.value).count("Did you mean 'val_loss'?") == 2


def test_wrong_monitors_are_reported_together_and_the_epoch_is_saved(tmp_path: Path) -> None:
    class Plateau(Toy):
        name = "train_loss"

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": scheduler, "monitor": self.name}]

    Plateau.name = "other"
    saves = ModelCheckpoint(tmp_path, monitor="accuracy", mode="max")
    callbacks = [EarlyStopping("score", mode="max"), saves]
    trainer = quiet(max_epochs=3, enable_checkpointing=True, callbacks=callbacks)
    with raises_recorded(ConfigError):
        trainer.fit(Plateau(), loader(4))
    assert trainer.global_step == 4
    Plateau.name = "train_loss"
    later = quiet(max_epochs=2)
    later.fit(Plateau(), loader(4), ckpt_path=saves.last_model_path)
    assert later.global_step == 8


def test_an_unclear_mode_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    class Score(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("points", -float(self.current_epoch))

    checkpoint = ModelCheckpoint(monitor="points", filename="{epoch}")
    with caplog.at_level(logging.WARNING, logger="trainer"):
        fit(checkpoint, Score(), epochs=3)
    assert caplog.text.count("ModelCheckpoint(monitor='points'): smaller is better") == 1
    assert Path(checkpoint.best_model_path).name == "epoch=2"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_name_without_fields_is_always_there(async_save: bool, tmp_path: Path) -> None:
    seen: list[bool] = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((tmp_path / "model").exists())

    checkpoint = ModelCheckpoint(tmp_path, filename="model", every_n_train_steps=1, async_save=async_save)
    quiet(max_epochs=3, enable_checkpointing=True, callbacks=[Look(), checkpoint]).fit(Toy(), loader(2))
    assert all(seen[1 + async_save :])
    assert [path.name for path in CheckpointDirectory(tmp_path).list()] == ["model"]
    assert CheckpointDirectory(tmp_path).info("model")["step"] == 6


def test_the_best_keeps_the_name_without_a_number(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="model", monitor="val_loss")
    fit(checkpoint, ByStep({1: 5, 2: 6, 3: 4, 4: 7, 5: 6}), epochs=5, batches=1)
    directory = CheckpointDirectory(tmp_path)
    assert {path.name: directory.info(path)["step"] for path in directory.list()} == {"model": 3, "model-v1": 5}
    assert directory.resolve("last") == tmp_path / "model-v1"
    assert directory.resolve("best") == tmp_path / "model"


KILLED = """
import sys
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback
from trainer.callbacks import EarlyStopping, ModelCheckpoint

class Say(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step > 1:
            print("step", trainer.global_step, flush=True)

checkpoint = ModelCheckpoint(sys.argv[1], filename="model", every_n_train_steps=1)
trainer = quiet(max_epochs=-1, max_steps=100000, enable_checkpointing=True, callbacks=[Say(), checkpoint])
trainer.fit(Toy(), loader(4), ckpt_path="last")
"""


def test_a_name_without_fields_survives_a_kill_at_any_time(tmp_path: Path) -> None:
    before = 0
    for kill in range(5):
        running = start_python(KILLED, str(tmp_path / "c"), cwd=tmp_path)
        running.wait_for(f"step {before + 2 + kill}\n")
        running.send(signal.SIGKILL)
        running.process.wait()
        assert verify_checkpoint(tmp_path / "c" / "model") == []
        before = CheckpointDirectory(tmp_path / "c").info("model")["step"]
        assert CheckpointDirectory(tmp_path / "c").resolve("last").name == "model"


# -- a second fit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_a_second_fit_knows_nothing_of_the_first(monitor: str | None) -> None:
    checkpoint = ModelCheckpoint(monitor=monitor)
    trainer = quiet(max_epochs=1, enable_checkpointing=True, callbacks=checkpoint)
    for number, value in enumerate((0.5, 0.9)):
        trainer.fit(ByStep({4: value}), loader(4), loader(1))
        path = trainer.run_dir / "checkpoints" / "epoch=0-step=4"
        assert trainer.run_dir.name == f"version_{number}"
        assert (checkpoint.last_model_path, checkpoint.best_model_path) == (str(path), str(path))
        assert scores(checkpoint) == {"epoch=0-step=4": value if monitor else None}
        assert verify_checkpoint(path) == []


def test_a_second_fit_into_the_same_folder_does_not_point_to_the_best_of_the_first(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=2, save_top_k=-1)
    fit(checkpoint, ByStep({4: 0.5}))
    directory = CheckpointDirectory(tmp_path)
    assert directory.resolve("best").name == "epoch=0-step=4"
    fit(checkpoint, ByStep({}), epochs=-1, max_steps=2)
    assert directory.pointer("best") is None
    fit(checkpoint, ByStep({4: 0.9}))
    assert directory.resolve("best").name == "epoch=0-step=4-v1"
    assert checkpoint.kept == {"epoch=0-step=2-v2": None, "epoch=0-step=4-v1": 0.9}


def test_a_callback_without_a_value_leaves_the_best_of_another_in_its_folder(tmp_path: Path) -> None:
    class Both(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log_dict({"val_loss": 0.5, "rare": math.nan})

    monitors = [ModelCheckpoint(tmp_path, monitor=name, filename=name) for name in ("val_loss", "rare")]
    trainer = quiet(max_epochs=1, callbacks=monitors, enable_checkpointing=True)
    trainer.fit(Both(), loader(2), loader(1))
    assert CheckpointDirectory(tmp_path).resolve("best").name == "val_loss"


def test_a_second_fit_has_no_values_of_the_first() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def on_train_start(self, trainer: Trainer, module: Any) -> None:
            self.seen.append((len(trainer.callback_metrics), len(trainer.logged_metrics)))

    watch = Watch()
    trainer = quiet(max_epochs=1, callbacks=watch)
    for _ in range(2):
        trainer.fit(Toy(), loader(2), loader(1))
    assert watch.seen == [(0, 0), (0, 0)]


def test_nan_is_a_score_that_is_never_the_best() -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", every_n_train_steps=1, filename="{step}")
    fit(checkpoint, ByStep({2: math.nan, 4: 0.5}), val_check_interval=2)
    assert scores(checkpoint) == {"step=4": 0.5}
