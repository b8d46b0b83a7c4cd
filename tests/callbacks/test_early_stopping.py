"""EarlyStopping stops a run at the right time, also after a resume."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.callbacks import EarlyStopping, ModelCheckpoint


class Scripted(Toy):
    """Logs the values given, one for each validation or training epoch, as a validation loss."""

    def __init__(self, values: list[float], name: str = "val_loss") -> None:
        super().__init__()
        self.values, self.name = values, name

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.name, self.values[self.current_epoch])


def epochs_run(values: list[float], **options: Any) -> int:
    trainer = quiet(max_epochs=len(values), callbacks=[EarlyStopping("val_loss", **options)])
    trainer.fit(Scripted(values), loader(1), loader(1))
    return trainer.current_epoch


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, 5),
        ([5, 6, 7, 8, 9, 10], {"patience": 3}, 4),
        ([5, 6, 4, 5, 6, 7, 8], {"patience": 3}, 6),
        ([5, 5, 5, 5], {"patience": 2}, 3),
        ([1, 2, 3, 2, 1, 0], {"patience": 2, "mode": "max"}, 5),
        ([5, 4.95, 4.91, 4.8], {"patience": 2, "min_delta": 0.1}, 3),
        ([5, 5.4, 5.8, 6.4, 6.8, 7.4], {"patience": 1, "min_delta": -0.5}, 4),
        ([0.5, 0.6, 0.6, 0.6], {"mode": "max", "patience": 2, "min_delta": 0.1}, 3),
        ([0.9, 0.6, 0.6, 0.5], {"stopping_threshold": 0.6}, 4),
        ([5, 4, 0.5, 0.4], {"stopping_threshold": 1}, 3),
        ([5, 4, 50, 3], {"divergence_threshold": 10}, 3),
        ([5, 4, math.nan, 3], {}, 3),
        ([5, -math.inf, 3], {}, 2),
        ([math.nan, math.nan, 3, 2, 1], {"check_finite": False, "patience": 3}, 5),
        ([math.nan, math.nan, math.nan, 1], {"check_finite": False, "patience": 3}, 3),
        ([1, 2, 3, 4], {"patience": 2, "check_on_train_epoch_end": False}, 3),
        ([1, 2, 3, 4], {"patience": 2, "check_on_train_epoch_end": True}, 3),
    ],
)
def test_when_it_stops(values: list[float], options: dict[str, Any], epochs: int) -> None:
    assert epochs_run(values, **options) == epochs


def test_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainer"):
        epochs_run([5, 6, 7, 8], patience=2)
        epochs_run([4, 3], patience=2)  # ends by itself
    (message,) = [record.getMessage() for record in caplog.records if "stopped" in record.getMessage()]
    assert message == "stopped after step 3: early stopping: val_loss has not improved in 2 validations; best 5"


@pytest.mark.parametrize("name", ["loss", "loss_epoch"])
@pytest.mark.parametrize("interval", [1.0, 2, 3])
def test_a_training_metric_is_checked_by_its_mean_over_the_epoch(name: str, interval: float) -> None:
    class Trained(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # The last value of an epoch falls, the mean rises.
            epoch = self.current_epoch
            self.log("loss", -5.0 * epoch if batch_idx == 3 else 9.0 * epoch, on_step=True, on_epoch=True)
            return self._loss(batch)

    stopping = EarlyStopping(name, patience=2)
    trainer = quiet(max_epochs=9, val_check_interval=interval, callbacks=[stopping])
    trainer.fit(Trained(), loader(4), loader(1))
    assert (trainer.current_epoch, stopping.best_score, stopping.last_score) == (3, 0.0, 11.0)


def test_a_value_is_checked_once() -> None:
    # The value of the validation inside the epoch is the newest at the end of that epoch, and of the next one.
    stopping = EarlyStopping("val_loss", patience=2, check_on_train_epoch_end=True)
    trainer = quiet(max_epochs=6, val_check_interval=3, check_val_every_n_epoch=2, callbacks=[stopping])
    trainer.fit(Scripted([0, 1, 0, 2, 0, 3]), loader(4), loader(1))
    assert (trainer.current_epoch, stopping.wait_count) == (6, 2)


def test_a_stop_before_min_epochs_is_remembered() -> None:
    trainer = quiet(max_epochs=9, min_epochs=6, callbacks=[EarlyStopping("val_loss", patience=1)])
    trainer.fit(Scripted([3, 4, 2, 1, 0, -1, -2, -3, -4]), loader(1), loader(1))
    assert (trainer.current_epoch, trainer.stop_reason) == (
        6,
        "early stopping: val_loss has not improved in 1 validation; best 3",
    )


def test_the_sanity_check_does_not_count() -> None:
    stopping = EarlyStopping("val_loss", patience=9)
    trainer = quiet(max_epochs=2, num_sanity_val_steps=2, callbacks=[stopping])
    trainer.fit(Scripted([5, 6]), loader(1), loader(1))
    assert (stopping.best_score, stopping.wait_count) == (5, 1)


def test_a_name_that_was_not_logged() -> None:
    trainer = quiet(max_epochs=2, callbacks=[EarlyStopping("val_los")])
    with raises_recorded(ConfigError):
        trainer.fit(Toy(), loader(2), loader(1))
    trainer = quiet(max_epochs=2, log_every_n_steps=1, callbacks=[EarlyStopping("val_loss")])
    with raises_recorded(ConfigError):
        trainer.fit(Toy(), loader(2))


def test_not_strict_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=3, callbacks=[EarlyStopping("val_los", strict=False)])
    with caplog.at_level(logging.WARNING, logger="trainer"):
        trainer.fit(Toy(), loader(2), loader(1))
    assert trainer.current_epoch == 3
    assert sum("was not logged" in record.message for record in caplog.records) == 1


def test_validating_seldom_is_no_missing_value() -> None:
    trainer = quiet(max_epochs=4, check_val_every_n_epoch=2, callbacks=[EarlyStopping("val_loss", patience=1)])
    trainer.fit(Scripted([0, 1, 0, 2, 0]), loader(1), loader(1))
    assert trainer.current_epoch == 4
    assert "1 validation;" in str(trainer.stop_reason)


@pytest.mark.parametrize("checkpoint_first", [False, True])
def test_a_checkpoint_inside_an_epoch_has_the_early_stopping_state_of_its_step(checkpoint_first: bool) -> None:
    def run(steps: int) -> int:
        stopping = EarlyStopping("val_loss", patience=9)
        callbacks: list[Callback] = [stopping, ModelCheckpoint(monitor="val_loss", save_top_k=-1)]
        if checkpoint_first:
            callbacks.reverse()
        trainer = quiet(max_steps=steps, val_check_interval=2, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(Scripted([1, 1]), loader(4), loader(1), ckpt_path="last")
        return stopping.wait_count

    assert [run(6), run(8)] == [2, 3]


def test_a_resumed_run_goes_on_counting() -> None:
    def run(epochs: int, ckpt_path: str | None = None) -> Any:
        stopping = EarlyStopping("val_loss", patience=3)
        trainer = quiet(max_epochs=epochs, enable_checkpointing=True, callbacks=[stopping, ModelCheckpoint()])
        trainer.fit(Scripted([3, 4, 5, 6, 7, 8]), loader(1), loader(1), ckpt_path=ckpt_path)
        return trainer, stopping

    _, stopping = run(2)
    assert stopping.wait_count == 1
    trainer, stopping = run(9, "last")
    assert (trainer.current_epoch, stopping.wait_count, stopping.best_score) == (4, 3, 3)
    # Restarted by the same command, a run that had stopped makes no further step.
    steps = trainer.global_step
    trainer, _ = run(9, "last")
    assert trainer.global_step == steps
    assert "not improved in 3 validations" in trainer.stop_reason


def test_a_reason_to_stop_is_known_after_a_resume_while_min_epochs_holds_the_stop() -> None:
    class Dies(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 3:
                raise KeyError

    def run(*callbacks: Callback, epochs: int = 5) -> EarlyStopping:
        stopping = EarlyStopping("val_loss", patience=1)
        callbacks = (stopping, ModelCheckpoint(), *callbacks)
        trainer = quiet(max_epochs=9, min_epochs=epochs, enable_checkpointing=True, callbacks=[*callbacks])
        trainer.fit(Scripted([3, 4, 2, 1, 0, 0, 0, 0, 0]), loader(1), loader(1), ckpt_path="last")
        assert trainer.current_epoch == epochs
        return stopping

    with pytest.raises(KeyError):
        run(Dies())
    stopping = run()
    assert (stopping.stopping_reason.name, stopping.stopped_epoch) == ("PATIENCE_EXHAUSTED", 1)


def test_a_finished_run_that_is_started_again_keeps_the_epoch_of_its_stop() -> None:
    stopped = []
    for _ in range(2):
        stopping = EarlyStopping("val_loss", patience=2)
        trainer = quiet(max_epochs=9, enable_checkpointing=True, callbacks=[stopping, ModelCheckpoint()])
        trainer.fit(Scripted([3, 2, 4, 4, 4, 4]), loader(1), loader(1), ckpt_path="last")
        stopped.append((stopping.stopped_epoch, trainer.global_step, stopping.stopping_reason.name))
    assert stopped == [(3, 4, "PATIENCE_EXHAUSTED")] * 2


def test_a_second_fit_starts_afresh() -> None:
    stopping = EarlyStopping("val_loss", patience=2)
    trainer = quiet(max_epochs=9, callbacks=[stopping])
    for _ in range(2):
        trainer.fit(Scripted([1, 2, 3, 4, 5, 6]), loader(1), loader(1))
        assert trainer.current_epoch == 3
