"""GradientAccumulationScheduler: windows by epoch, also after a resume in the middle of one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.callbacks import GradientAccumulationScheduler


class Windows(Callback):
    """Record (epoch, micro-batches done) after every step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.seen.append((trainer.current_epoch, trainer.progress.batch))


def test_windows_grow_with_the_epochs() -> None:
    windows = Windows()
    trainer = quiet(max_epochs=4, callbacks=[GradientAccumulationScheduler({0: 4, 2: 3}), windows])
    trainer.fit(Toy(), loader(8))
    assert windows.seen == [(0, 4), (0, 8), (1, 4), (1, 8), (2, 3), (2, 6), (2, 8), (3, 3), (3, 6), (3, 8)]


def test_a_window_set_while_training_ends_with_the_fit_and_one_set_before_it_stays() -> None:
    class Grows(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.accumulate_grad_batches = 4

    trainer, steps = quiet(max_epochs=2, callbacks=Grows()), []
    for window in (None, None, 2):
        if window is not None:
            trainer.accumulate_grad_batches = window
        trainer.fit(Toy(), loader(8))
        steps.append(trainer.global_step)
    assert steps == [8 + 2, 8 + 2, 4 + 2]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", None, True])
def test_a_window_that_is_no_number_of_batches_is_refused(wrong: Any) -> None:
    with raises_recorded(ConfigError):
        quiet().accumulate_grad_batches = wrong


def test_keys_of_a_json_file_are_strings() -> None:
    assert GradientAccumulationScheduler({"4": 2, "0": 8}).scheduling == {0: 8, 4: 2}  # type: ignore[dict-item]


@pytest.mark.parametrize("wrong", [{}, None, {-1: 2}, {0: 0}, {0: 1.5}, {"soon": 2}, {0: True}])
def test_a_wrong_schedule_is_refused(wrong: Any) -> None:
    with raises_recorded(ConfigError):
        GradientAccumulationScheduler(wrong)


def test_two_answers_to_how_the_run_begins_are_refused() -> None:
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=[GradientAccumulationScheduler({0: 4})])
    with raises_recorded(ConfigError):
        trainer.fit(Toy(), loader())


def test_manual_optimization_is_refused() -> None:
    module = Toy()
    module.automatic_optimization = False
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, callbacks=[GradientAccumulationScheduler({0: 4})]).fit(module, loader())


@pytest.mark.parametrize("schedule", [{0: 8, 1: 1}, {0: 8, 1: 2}, {2: 3}, {1: 2, 3: 5, 9: 1}])
@pytest.mark.parametrize("limit", [{"max_epochs": 4}, {"max_epochs": 4, "max_steps": 6}])
def test_the_total_number_of_steps_is_that_of_the_schedule(schedule: dict[int, int], limit: dict[str, int]) -> None:
    estimates: list[float] = []

    class Scheduled(Toy):
        def configure_optimizers(self) -> Any:
            estimates.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    trainer = quiet(**limit, accumulate_grad_batches=1, callbacks=GradientAccumulationScheduler(schedule))
    trainer.fit(Scheduled(), loader(8))
    assert estimates == [trainer.global_step]
    assert trainer.estimated_stepping_batches == trainer.global_step
