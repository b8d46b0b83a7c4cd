"""A run reports once what it leaves out although it was given: states of a checkpoint, a step, a validation loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import fork_python
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, DataModule
from trainer.callbacks import EarlyStopping, ModelCheckpoint


class Counts(Callback):
    def __init__(self, key: str = "Counts") -> None:
        self.key, self.count = key, 0

    @property
    def state_key(self) -> str:
        return self.key

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader(2)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3}


def saved(tmp_path: Path, *callbacks: Callback, **given: Any) -> str:
    checkpoint = ModelCheckpoint(tmp_path / "checkpoints")
    quiet(max_epochs=1, callbacks=[checkpoint, *callbacks], enable_checkpointing=True).fit(Toy(), **given)
    return checkpoint.last_model_path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_states_of_callbacks_and_data_that_are_missing_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopping = EarlyStopping("train_loss", patience=9)
    path = saved(tmp_path, Counts(), Counts("mine"), stopping, datamodule=Data())
    caplog.clear()
    counts = Counts()
    quiet(max_epochs=2, callbacks=counts).fit(Toy(), loader(2), loader(1), ckpt_path=path)
    [reported] = [message for message in warnings_of(caplog) if "the state of" in message]
    for name in ("the callback mine", "EarlyStopping", "ModelCheckpoint", "the data module"):
        assert name in reported
    assert "callback Counts," not in reported
    assert counts.count == 4


def test_nothing_is_reported_where_nothing_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = saved(tmp_path, Counts(), train_dataloaders=loader(2), val_dataloaders=loader(1))
    caplog.clear()
    again = [ModelCheckpoint(tmp_path / "checkpoints"), Counts(), EarlyStopping("train_loss")]
    quiet(max_epochs=1, callbacks=again, enable_checkpointing=True).fit(Toy(), loader(2), loader(1), ckpt_path=path)
    quiet(fast_dev_run=True).fit(Toy(), loader(2), loader(1), ckpt_path=path)
    quiet().validate(Toy(), loader(1), ckpt_path=path)
    assert [message for message in warnings_of(caplog) if "nothing is left to train" not in message] == []


@pytest.mark.parametrize("loaders", [None, {}], ids=["none", "no loader by name"])
def test_a_validation_step_without_a_loader_is_reported(loaders: Any, caplog: pytest.LogCaptureFixture) -> None:
    quiet(max_epochs=1).fit(Toy(), loader(1), loaders)
    assert warnings_of(caplog) == ["Toy has a validation_step, but there is no validation loader: nothing is validated"]


def test_a_validation_loader_without_a_step_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    module = Toy()
    module.validation_step = None  # type: ignore[assignment, method-assign]
    quiet(max_epochs=1).fit(module, loader(1), loader(1))
    assert warnings_of(caplog) == ["Toy has no validation_step: the validation loader is not used"]


@pytest.mark.parametrize(
    "settings", [{"limit_val_batches": 0}, {"limit_val_batches": 0.0}, {"overfit_batches": 1}], ids=str
)
def test_validation_that_is_off_is_not_reported(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    quiet(max_epochs=1, **settings).fit(Toy(), loader(1))
    assert warnings_of(caplog) == []


TWO = """
from tests.helpers.toy import Toy, loader, quiet
quiet(max_epochs=1, devices=2).fit(Toy(), loader(2))
"""


def test_several_processes_report_it_once() -> None:
    assert fork_python(TWO).wait().check().stderr.count("there is no validation loader") == 1


@pytest.mark.parametrize("interval", [9, 0.5])
def test_an_interval_means_nothing_without_validation(interval: float) -> None:
    class Unknown:
        def __iter__(self) -> Any:
            return iter(loader(2))

    data: Any = loader(2) if interval == 9 else Unknown()
    quiet(max_epochs=1, val_check_interval=interval).fit(Toy(), data)
    quiet(max_epochs=1, val_check_interval=interval, limit_val_batches=0).fit(Toy(), data, loader(1))
    with pytest.raises(ValueError, match="val_check_interval"):
        quiet(max_epochs=1, val_check_interval=interval).fit(Toy(), data, loader(1))
