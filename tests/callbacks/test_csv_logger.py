"""CSVLogger writes the values of a step in a row, whatever is logged when, and however often the run is interrupted."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.stops import Crash
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, Trainer
from trainer.callbacks import CSVLogger, ModelCheckpoint


def rows(path: Any = "metrics.csv") -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.fixture
def logger() -> Iterator[CSVLogger]:
    logger = CSVLogger(".", flush_seconds=math.inf)
    assert logger.version == 0  # whatever a test writes into the folder
    yield logger
    logger.close()


def test_a_row_that_is_on_disk_still_takes_values(logger: CSVLogger) -> None:
    logger.log_metrics({"a": 0.123456789}, 1)
    logger.flush()
    logger.log_metrics({"b": 1.0}, 1)
    logger.flush()
    assert Path("metrics.csv").read_text() == "step,a,b\n1,0.123456789,1.0\n"


def test_a_second_value_of_a_name_has_a_row_of_its_own(logger: CSVLogger) -> None:
    """As Lightning's: a name that is logged in training and in validation loses neither."""
    logger.log_metrics({"loss": 4.0, "rate": 0.1}, 4)
    logger.log_metrics({"loss": 50.0, "acc": 0.5}, 4)
    logger.flush()
    logger.log_metrics({"loss": 3.0}, 5)
    logger.log_metrics({"loss": 60.0, "new": 1.0}, 4)  # a test of an older checkpoint
    logger.flush()
    of_step_4 = [{"loss": "4.0", "rate": "0.1"}, {"loss": "50.0", "acc": "0.5"}, {"loss": "60.0", "new": "1.0"}]
    assert rows() == [*({"step": "4", **row} for row in of_step_4), {"step": "5", "loss": "3.0"}]


def test_both_values_of_a_name_survive_a_resume() -> None:
    class Same(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("train_loss", 50.0 + self.global_step)

    def trainer(epochs: int) -> Trainer:
        loggers, saves = [CSVLogger("log")], {"enable_checkpointing": True}
        return quiet(max_epochs=epochs, logger=loggers, log_every_n_steps=2, default_root_dir="runs", **saves)

    for epochs in (1, 2):
        trainer(epochs).fit(Same(), loader(4), loader(1), ckpt_path="last")
    with Path("log/metrics.csv").open() as file:
        found = [(int(row["step"]), float(row["train_loss"])) for row in csv.DictReader(file) if row["train_loss"]]
    assert [step for step, _ in found] == [2, 4, 4, 6, 8, 8]
    assert [value for _, value in found if value >= 50] == [54.0, 58.0]


def test_a_new_name_adds_a_column_to_all_rows(logger: CSVLogger) -> None:
    for step in range(1, 4):
        logger.log_metrics({"a": float(step)}, step)
    logger.flush()
    logger.log_metrics({"b, c": 9.0}, 3)
    logger.log_metrics({"d": 8.0}, 4)
    logger.flush()
    assert Path("metrics.csv").read_text() == 'step,a,"b, c",d\n1,1.0,,\n2,2.0,,\n3,3.0,9.0,\n4,,,8.0\n'


def test_an_earlier_row_takes_values(logger: CSVLogger) -> None:
    for step in (1, 2, 3):
        logger.log_metrics({"a": float(step)}, step)
    logger.flush()
    logger.log_metrics({"a": 4.0}, 4)
    logger.log_metrics({"test": 0.5}, 2)
    logger.log_metrics({"test": 0.6}, 3)
    logger.flush()
    assert [row.get("test") for row in rows()] == [None, "0.5", "0.6", None]
    assert [row["a"] for row in rows()] == ["1.0", "2.0", "3.0", "4.0"]


def test_all_digits_and_odd_numbers(logger: CSVLogger) -> None:
    values = {"third": 1 / 3, "nan": math.nan, "inf": -math.inf, "big": 1e300, "integer": 7}
    logger.log_metrics(values, 1)
    logger.flush()
    read = {name: float(value) for name, value in rows()[0].items()}
    assert math.isnan(read.pop("nan"))
    assert read == {"step": 1, "third": 1 / 3, "inf": -math.inf, "big": 1e300, "integer": 7}


def test_names_with_any_sign(logger: CSVLogger) -> None:
    names = ["a\rb", "a\nb", "a\r\nb", "c,d", 'q"x', "é/ü", " lead", "=1+1"]
    logger.log_metrics({name: float(number) for number, name in enumerate(names)}, 1)
    logger.close()
    logger.log_metrics({"later": 9.0}, 2)
    logger.close()
    assert logger.path is not None
    with logger.path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert [first[name] for name in names] == [f"{float(number)}" for number in range(len(names))]
    assert second["later"] == "9.0"


def test_rows_reach_the_disk_without_being_asked() -> None:
    logger = CSVLogger(".", flush_seconds=0)
    logger.log_metrics({"a": 1.0}, 1)
    assert len(rows()) == 1
    logger.close()


def test_a_file_that_was_cut_off_is_repaired(logger: CSVLogger) -> None:
    Path("metrics.csv").write_text("step,a,b\n1,1.0,1.0\n2,2.0,2.0\n3,3.0,3")
    logger.log_metrics({"a": 4.0}, 4)
    logger.flush()
    assert [row["step"] for row in rows()] == ["1", "2", "4"]


def test_a_disk_that_is_full_for_a_while(
    logger: CSVLogger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger.log_metrics({"a": 1.0}, 1)
    logger.flush()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="trainer"):
        patch.setattr("trainer.logger.write_all", full)
        patch.setattr(os, "replace", full)
        for step in (2, 3, 4):
            logger.log_metrics({"a": float(step), "b": 1.0}, step)
            logger.flush()
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    logger.log_metrics({"a": 5.0}, 5)
    logger.flush()
    assert [row["a"] for row in rows()] == ["1.0", "2.0", "3.0", "4.0", "5.0"]


def train(folder: str, crash_at: int | None = None, **settings: Any) -> Path:
    """Train three epochs of 8 steps, with a checkpoint after every 4; return the path of the CSV file."""
    crash = [] if crash_at is None else [Crash(crash_at)]
    trainer = quiet(
        max_epochs=3,
        log_every_n_steps=1,
        logger=CSVLogger(),
        default_root_dir=folder,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=4), *crash],
        **settings,
    )
    try:
        trainer.fit(Toy(), loader(8, shuffle=True), loader(2), ckpt_path="last")
    except RuntimeError:
        assert crash_at is not None
    return Path(trainer.run_dir / "metrics.csv")


@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 4}], ids=["val by epoch", "val by step"])
@pytest.mark.parametrize("crash_at", [4, 7, 8, 9, 15])
def test_an_interrupted_run_leaves_the_file_of_one_that_was_not(crash_at: int, settings: dict[str, Any]) -> None:
    uninterrupted = train("uninterrupted", **settings)
    assert train("broken", crash_at, **settings) == train("broken", **settings)
    broken = Path("broken/version_0/metrics.csv")
    assert [row["step"] for row in rows(uninterrupted)] == [str(step) for step in range(1, 25)]
    assert [row["epoch"] for row in rows(uninterrupted)] == ["0"] * 8 + ["1"] * 8 + ["2"] * 8
    assert broken.read_text() == uninterrupted.read_text()


def test_the_row_of_the_checkpoint_survives_a_power_cut() -> None:
    """Rows that were not on the disk when the machine died are restored from the checkpoint."""
    uninterrupted = train("uninterrupted")
    broken = train("broken", crash_at=9)
    lines = broken.read_text().splitlines(keepends=True)
    assert lines[8].startswith("8,")
    broken.write_text("".join(lines[:8]) + lines[8][:5])
    train("broken")
    assert broken.read_text() == uninterrupted.read_text()


def test_evaluation_after_training_adds_to_the_file() -> None:
    class Tested(Toy):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", 0.5)

    trainer = quiet(max_epochs=2, log_every_n_steps=1, logger=CSVLogger())
    trainer.fit(Tested(), loader(2))
    before = rows(trainer.run_dir / "metrics.csv")
    trainer.test(Tested(), loader(1))
    after = rows(trainer.run_dir / "metrics.csv")
    assert after == [*before, {"step": "4", "epoch": "1", "test_loss": "0.5"}]


def test_no_evaluation_changes_the_rows_of_the_training_or_of_another_evaluation() -> None:
    class Two(Toy):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", 0.5)
            self.log("batches", 1.0, reduce_fx="sum")

    trainer = quiet(max_epochs=2, log_every_n_steps=1, logger=CSVLogger(), check_val_every_n_epoch=2,
                    callbacks=[ModelCheckpoint(save_top_k=-1)], enable_checkpointing=True)  # fmt: skip
    trainer.fit(Two(), loader(2), loader(2))
    path, first = trainer.run_dir / "metrics.csv", trainer.run_dir / "checkpoints" / "epoch=0-step=2"
    before = rows(path)
    for _ in range(2):
        trainer.test(Two(), loader(1))
    trainer.validate(Two(), loader(1), ckpt_path=first)  # at a step at which the training has not validated
    tested = {"step": "4", "epoch": "1", "test_loss": "0.5", "batches": "1.0"}
    after = rows(path)
    assert after[: len(before) + 2] == [*before, tested, tested]
    (last,) = after[len(before) + 2 :]
    assert last.keys() == {"step", "epoch", "val_loss"}
    assert (last["step"], last["epoch"]) == ("2", "0")


def test_a_value_of_the_name_of_the_first_column_is_refused(tmp_path: Path) -> None:
    with raises_recorded(ConfigError):
        CSVLogger(tmp_path).log_metrics({"loss": 1.0, "step": 3.0}, 1)


class Own(CSVLogger):
    """Overrides methods of Lightning's names."""

    def __init__(self) -> None:
        super().__init__("logs", name="own")
        self.recorded: dict[str, Any] = {}
        self.saved = 0

    def log_hyperparams(self, params: Any = None, metrics: Any = None) -> None:
        self.recorded = dict(params)
        super().log_hyperparams({**params, "more": 1}, metrics)

    def save(self) -> None:
        self.saved += 1
        super().save()


def test_methods_of_lightnings_names_are_called_and_may_be_overridden() -> None:
    class Module(Toy):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = Own()
    quiet(max_epochs=1, logger=logger).fit(Module(), loader(2))
    assert logger.recorded == {"width": 3}
    assert json.loads((Path(logger.log_dir) / "hparams.json").read_text()) == {"width": 3, "more": 1}
    assert logger.saved > 0
    logger.experiment.log_metrics({"after": 1.0}, step=9)
    logger.save()
    assert "after" in (Path(logger.log_dir) / "metrics.csv").read_text()
    CSVLogger.log_hyperparams(logger, {"width": 4}, {"score": 0.5}, 11)
    logger.save()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert (rows[-1]["step"], rows[-1]["score"]) == ("11", "0.5")
