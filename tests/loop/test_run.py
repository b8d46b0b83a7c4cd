"""The trainer's properties work before, during and after a run, and a failed set-up leaves nothing behind."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import fork_python
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, Trainer, TrainModule
from trainer.errors import ConfigError
from trainer.loop.run import Run, Session
from trainer.loop.setup import start_run

SETTINGS = ("settings", "config", "strategy", "precision", "callbacks", "loggers", "logger", "hooks", "config_text")
LIMITS = ("max_epochs", "max_steps", "val_check_interval", "accumulate_grad_batches")
COUNTS = ("progress", "global_step", "current_epoch", "num_training_batches", "num_val_batches", "num_test_batches")
STATE = ("stage", "training", "validating", "sanity_checking", "evaluating", "has_fit", "stop_reason", "should_stop")
OBJECTS = ("datamodule", "optimizers", "manual_optimizers", "scheduler_configs", "dataloader_names")
LOADERS = ("train_loader", "val_loaders", "test_loaders", "predict_loaders", "num_predict_batches")
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
PLACE = ("seed", "run_dir", "rank", "global_rank", "local_rank", "world_size", "is_global_zero")
CHECKPOINTS = ("checkpoint_group", "checkpoint_callbacks", "checkpoint_callback")
ALWAYS = (*SETTINGS, *LIMITS, *COUNTS, *STATE, *OBJECTS, *LOADERS, *METRICS, *PLACE, *CHECKPOINTS)
FROM_THE_FIRST_RUN_ON = ("module", "metrics", "device", "estimated_stepping_batches", "run")


class Reader(Callback):
    """A callback that reads all properties in each hook of the set-up and of the training."""

    def __init__(self) -> None:
        self.read: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self.on_train_start(trainer, module)

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.read.append({name: getattr(trainer, name) for name in (*ALWAYS, *FROM_THE_FIRST_RUN_ON)})

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self.on_train_start(trainer, module)


def test_attributes_are_there_before_during_and_after_a_run() -> None:
    reader = Reader()
    trainer = quiet(max_epochs=1, callbacks=[reader])
    before = {name: getattr(trainer, name) for name in ALWAYS}
    assert (before["global_step"], before["stage"], before["optimizers"], before["train_loader"]) == (0, None, [], None)
    assert not any(hasattr(trainer, name) for name in FROM_THE_FIRST_RUN_ON)
    with raises_recorded(ConfigError):
        _ = trainer.module
    trainer.fit(Toy(), loader(3))
    early, begun, late = reader.read
    assert (early["stage"], early["optimizers"], early["num_training_batches"]) == ("fit", [], math.inf)
    assert (begun["stage"], begun["training"], begun["num_training_batches"]) == ("fit", True, 3)
    assert len(begun["optimizers"]) == 1
    assert late["global_step"] == 3
    after = {name: getattr(trainer, name) for name in (*ALWAYS, *FROM_THE_FIRST_RUN_ON)}
    assert (after["stage"], after["training"], after["global_step"], after["has_fit"]) == (None, False, 3, True)
    assert after["run"] is begun["run"]


def test_the_next_run_goes_on_with_the_session_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Toy(), loader(3))
    fit = trainer.run
    trainer.validate(Toy(), loader(1))
    assert trainer.run is not fit
    assert (trainer.optimizers, trainer.train_loader) == ([], None)
    assert trainer.global_step == 3
    with caplog.at_level(logging.INFO, "trainer"):
        trainer.fit(Unlogged(), loader(2))
    assert trainer.global_step == 2
    assert "another fit: it starts at step 0 with the weights as they are" in caplog.text
    assert trainer.callback_metrics == {}, "values of the fit before"


class Unlogged(Toy):
    def log(self, *args: Any, **options: Any) -> None: ...


def test_a_run_needs_no_trainer() -> None:
    config = quiet(max_epochs=1).config
    adopted: list[Run] = []
    data = {"train": loader(3), "val": None}
    module = Toy()
    with start_run(config, Session(config.settings), "fit", module, data, None, None, adopted.append) as run:
        assert adopted == [run]
        assert run.train_loader is not None
        assert (run.num_training_batches, len(run.optimizers), run.estimated_stepping_batches) == (3, 1, 3)
        run.hooks.on_train_start()
    assert run.session.stage is None


def test_what_the_set_up_changed_is_undone_when_it_fails() -> None:
    class Fails(Toy):
        def configure_optimizers(self) -> Any:
            raise RuntimeError("on purpose")

    trainer, module = quiet(max_epochs=1), Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, loader(1))
    assert trainer.stage is None
    with raises_recorded(ConfigError):
        module.log("late", 1.0)
    trainer.fit(Toy(), loader(1))
    assert trainer.global_step == 1


HOOKS = ("on_sanity_check_start", "on_train_start", "on_validation_start", "on_train_epoch_end", "on_train_end")
HOOKS += ("on_fit_end", "on_test_start", "on_exception", "setup", "teardown")


class Activities(Callback):
    """A callback that notes in some hooks what the trainer says that it does."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        for hook in HOOKS:
            setattr(self, hook, partial(self.note, hook))

    def note(self, hook: str, trainer: Trainer, *args: Any) -> None:
        flags = ("training", "validating", "sanity_checking", "evaluating")
        self.seen.append((hook, " ".join(name for name in flags if getattr(trainer, name))))


class Failing(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step:
            raise RuntimeError("on purpose")


def test_an_error_leaves_what_a_run_did_for_the_hooks_that_follow() -> None:
    activities = Activities()
    trainer = quiet(max_epochs=1, callbacks=[activities])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Failing(), loader(2), loader(1))
    assert activities.seen[-2:] == [("on_exception", "validating evaluating"), ("teardown", "validating evaluating")]
    assert not any((trainer.training, trainer.validating))


def test_the_steps_of_a_fit_are_known_in_setup() -> None:
    class Schedules(Toy):
        def setup(self, stage: str) -> None:
            self.steps = self.trainer.estimated_stepping_batches, self.trainer.num_training_batches

    trainer = quiet(max_epochs=2)
    trainer.fit(module := Schedules(), loader(3))
    assert module.steps == (6, 3)
    assert trainer.global_step == 6


def test_run_directories_into_which_nothing_was_written_are_removed_at_the_end(tmp_path: Path) -> None:
    source = """
import os
from tests.helpers.toy import Toy, loader, quiet

for number in range(3):
    trainer = quiet(max_epochs=1)
    trainer.fit(Toy(), loader(2))
    if number == 1:
        (trainer.run_dir / "mine.txt").write_text("kept")
os.mkdir("elsewhere")
os.chdir("elsewhere")
"""
    fork_python(source, cwd=tmp_path).wait().check()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_1"]
