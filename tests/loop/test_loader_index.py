"""Steps and hooks of an evaluation get `dataloader_idx` where there are several loaders, and need not take it else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.callbacks import LambdaCallback


def test_a_method_may_need_the_index_of_the_only_loader_or_not_take_it() -> None:
    seen: list[Any] = []

    class Module(Toy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append(("step", dataloader_idx))

        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            seen.append(("start", dataloader_idx))

        def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, **more: Any) -> None:  # type: ignore[override]
            seen.append(("end", more))

    def without(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen.append("callback")

    quiet(callbacks=LambdaCallback(on_validation_batch_end=without)).validate(Module(), loader(1))
    assert seen == [("start", 0), ("step", 0), "callback", ("end", {})]


def test_a_step_that_cannot_take_the_index_of_one_of_several_loaders_is_reported_before_the_first_step() -> None:
    class Module(Toy):
        def on_train_start(self) -> None:
            raise AssertionError("training has begun")

        def validation_step(self, batch: Any, batch_idx: int, **more: Any) -> None: ...

    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(Module(), loader(1), [loader(1), loader(1)])


def test_a_hook_that_takes_neither_is_reported_when_the_trainer_is_made() -> None:
    class Hooks(Callback):
        def on_test_batch_start(self, trainer: Any, module: Any, **more: Any) -> None: ...  # type: ignore[override]

    with raises_recorded(ConfigError):
        quiet(callbacks=Hooks())


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_an_index_by_keyword_is_reported_in_every_evaluation_of_several_loaders(stage: str) -> None:
    class Module(Toy):
        def test_step(self, batch: Any, batch_idx: int, *, dataloader_idx: int = 0) -> None: ...

        def predict_step(self, batch: Any, batch_idx: int, *, dataloader_idx: int = 0) -> None: ...

    with raises_recorded(ConfigError):
        getattr(quiet(), stage)(Module(), [loader(1), loader(1)])
    getattr(quiet(), stage)(Module(), loader(1))


def test_a_step_without_the_index_evaluates_several_loaders() -> None:
    results = quiet().validate(Toy(), [loader(1), loader(2)])
    assert [set(one) for one in results] == [{"val_loss/dataloader_idx_0"}, {"val_loss/dataloader_idx_1"}]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_hooks_and_steps_have_the_index_of_each_of_several_loaders(stage: str) -> None:
    seen: list[Any] = []

    class Indices(Toy):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 7) -> None:
            seen.append(("step", dataloader_idx))

        test_step = predict_step = validation_step

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(("transfer", dataloader_idx))
            return batch

    def start(trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 7) -> None:
        seen.append(("start", dataloader_idx))

    def end(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 7) -> None:
        seen.append(("end", dataloader_idx))

    name = {"validate": "validation"}.get(stage, stage)
    hooks: dict[str, Any] = {f"on_{name}_batch_start": start, f"on_{name}_batch_end": end}
    getattr(quiet(callbacks=LambdaCallback(**hooks)), stage)(Indices(), [loader(1), loader(1)])
    assert seen == [(where, index) for index in (0, 1) for where in ("transfer", "start", "step", "end")]
