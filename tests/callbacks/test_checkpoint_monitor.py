"""A monitored value belongs to the step it was measured at, and to the checkpoint of that step alone."""

from __future__ import annotations

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


def test_the_last_lines_of_a_run_name_the_best_checkpoint() -> None:
    checkpoint, newest = ModelCheckpoint(monitor="val_loss", filename="{step}"), ModelCheckpoint()
    assert checkpoint.output_location() is None
    fit(checkpoint, ByStep({4: 0.5, 8: 0.25, 12: 0.8}), epochs=3)
    assert checkpoint.output_location() == ("best val_loss 0.25:", folder(checkpoint) / "step=8")
    fit(newest, ByStep({4: 0.5}))
    assert newest.output_location() is None


def test_a_value_logged_when_the_epoch_has_ended() -> None:
    class AtEnd(Toy):
        def on_train_epoch_end(self) -> None:
            self.log("late", 5.0 - self.current_epoch)

    checkpoint = ModelCheckpoint(monitor="late", filename="{step}", save_last=False)
    fit(checkpoint, AtEnd(), epochs=3, val_check_interval=2)
    assert scores(checkpoint) == {"step=12": 3.0}


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
