"""Timer stops in time, and keeps its count after a resume."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import ModelCheckpoint, Timer


class Slow(Toy):
    """A module whose training batches take 10 ms and whose validation batches take 20."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)


def test_stops_in_the_middle_of_an_epoch() -> None:
    timer = Timer(timedelta(seconds=0.1))
    trainer = quiet(max_epochs=9, callbacks=[timer])
    trainer.fit(Slow(), loader(100))
    assert 1 <= trainer.global_step <= 10
    assert trainer.current_epoch == 0
    assert "the time is used up" in str(trainer.stop_reason)
    assert timer.time_remaining() == 0
    assert timer.time_elapsed() >= 0.1


def test_stops_only_after_complete_epochs() -> None:
    trainer = quiet(max_epochs=9, callbacks=[Timer(0.05, interval="epoch")])
    trainer.fit(Slow(), loader(10))
    assert (trainer.current_epoch, trainer.global_step) == (1, 10)


def test_max_time_of_the_trainer_is_a_timer() -> None:
    trainer = quiet(max_epochs=9, max_time={"seconds": 0.05})
    trainer.fit(Slow(), loader(100))
    assert trainer.current_epoch == 0


@pytest.mark.parametrize("timer", [Timer(), Timer(1e6), Timer(interval="epoch")], ids=["measures", "longer", "epochs"])
@pytest.mark.parametrize("of_module", [False, True])
def test_max_time_holds_next_to_a_timer_of_the_user(timer: Timer, of_module: bool) -> None:
    class Own(Slow):
        def configure_callbacks(self) -> list[Any]:
            return [timer] if of_module else []

    trainer = quiet(max_time=0.05, callbacks=[] if of_module else timer)
    trainer.fit(Own(), loader(100))
    assert trainer.current_epoch == 0
    assert "the time is used up" in str(trainer.stop_reason)


def test_stages_are_measured_apart() -> None:
    timer = Timer()
    trainer = quiet(max_epochs=1, callbacks=[timer], num_sanity_val_steps=2)
    trainer.fit(Slow(), loader(3), loader(2))
    trainer.test(Slow(), loader(2))
    assert 0.04 <= timer.time_elapsed("validate") < timer.time_elapsed("train") - 0.03
    assert timer.time_elapsed("test") > 0
    assert timer.time_elapsed("predict") == 0
    assert timer.time_remaining() is None


def test_a_resumed_run_goes_on_counting() -> None:
    def run(seconds: float, steps: int) -> tuple[Timer, int]:
        timer = Timer(seconds)
        checkpoint = ModelCheckpoint(every_n_train_steps=1)
        trainer = quiet(max_steps=steps, enable_checkpointing=True, callbacks=[timer, checkpoint])
        trainer.fit(Slow(), loader(100), ckpt_path="last")
        return timer, trainer.global_step

    timer, step = run(60.0, 6)
    assert step == 6
    before = timer.time_elapsed()
    assert before >= 0.06
    # The remaining time is too short for a step, and a run without time left makes none.
    timer, step = run(0.05, 9)
    assert step == 6
    assert timer.time_elapsed() >= 0.06
    timer, step = run(60.0, 8)
    assert step == 8
    assert timer.time_elapsed() >= 0.08
