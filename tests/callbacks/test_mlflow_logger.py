"""MLFlowLogger, with the real client: a store of files, and one in sqlite."""

from __future__ import annotations

import math
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.test_wandb_logger import Draws, WithHyperparameters
from tests.helpers.stops import Crash
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, DataModule
from trainer.callbacks import MLFlowLogger, ModelCheckpoint

pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow"),  # not imported by who collects the tests
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of MLflow's own use of SQLAlchemy and others
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STORES = {"files": "file:./mlruns", "sqlite": "sqlite:///mlflow.db"}


def train(store: str, crash_at: int | None = None, **options: Any) -> MLFlowLogger:
    logger = MLFlowLogger("exp", tracking_uri=STORES[store], artifact_location="./artifacts", **options)
    crash = [] if crash_at is None else [Crash(crash_at)]
    trainer = quiet(
        max_steps=8,
        log_every_n_steps=1,
        logger=logger,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=4), Draws(), *crash],
        default_root_dir="runs",
    )
    try:
        trainer.fit(WithHyperparameters(), loader(4, shuffle=True), ckpt_path="last")
    except RuntimeError:
        assert crash_at is not None
    return logger


@pytest.mark.parametrize("store", STORES)
def test_a_resumed_run_is_the_same_run_with_each_step_once(store: str) -> None:
    broken = train(store, crash_at=7, run_name="mine", tags={"of": 3})
    client, run_id = broken.experiment, broken.run_id
    assert client.get_run(run_id).info.status == "FAILED"
    resumed = train(store, log_model=True)
    assert resumed.run_id == run_id == resumed.version
    run = client.get_run(run_id)
    assert (run.info.status, run.info.run_name, run.data.tags["of"]) == ("FINISHED", "mine", "3")
    assert run.data.params["lr"] == "0.5"
    points = client.get_metric_history(run_id, "train_loss")
    assert sorted(point.step for point in points) == list(range(1, 9))
    assert len(client.search_runs([resumed.experiment_id])) == 1
    last = run.data.tags["checkpoint.best"]
    assert {file.path for file in client.list_artifacts(run_id, last)} >= {f"{last}/model.safetensors"}
    files = [file.path for folder in ("samples", "note", "weights") for file in client.list_artifacts(run_id, folder)]
    wanted = {"samples/step-8-1.png", "samples/step-8.json", "note/step-4.txt", "weights/step-8.json"}
    assert wanted <= {re.sub(r"-[0-9a-f]{8}\.", ".", file) for file in files}
    assert len([file for file in files if "/step-8-1-" in file]) == 1
    assert client.list_artifacts(run_id, "table")


def test_a_second_fit_is_another_run_and_a_test_adds() -> None:
    logger = MLFlowLogger(save_dir="elsewhere", prefix="a")
    trainer = quiet(max_epochs=1, log_every_n_steps=1, logger=logger)
    seen = []
    for _ in range(2):
        trainer.fit(Toy(), loader(1))
        trainer.test(Toy(), loader(1))
        metrics = logger.experiment.get_run(logger.run_id).data.metrics
        assert metrics.keys() == {"a-train_loss", "a-val_loss"}
        seen.append(logger.version)
    assert len(set(seen)) == 2
    assert Path("elsewhere").is_dir()


def test_odd_names_and_numbers() -> None:
    logger = MLFlowLogger(run_id=None)
    for step in (1, 2):
        logger.log_metrics({"acc (top 5)": 1.0, "nan": math.nan}, step)
    assert logger._calls is not None
    assert logger._calls.wait(60)
    assert logger.experiment.get_run(logger.run_id).data.metrics["acc _top 5_-98e7fc46"] == 1.0


def test_names_that_become_one_are_two() -> None:
    """Also of a run that goes on, which may log another one first."""
    run, values = None, {"a:b": 1.0, "a%b": 2.0, "a_b": 3.0}
    for step, names in enumerate((values, list(values)[::-1])):
        logger = MLFlowLogger(run_id=run)
        logger.log_metrics({name: values[name] for name in names}, step)
        assert logger._calls is not None
        assert logger._calls.wait(60)
        run = logger.run_id
    curves = logger.experiment.get_run(run).data.metrics
    found = [{point.value for point in logger.experiment.get_metric_history(run, name)} for name in curves]
    assert sorted(map(sorted, found)) == [[1.0], [2.0], [3.0]]


def test_media_of_one_key_and_step_are_files_of_their_own() -> None:
    logger = MLFlowLogger(artifact_location="./artifacts")
    for value in (0.0, 0.5, 1.0):
        logger.log_text("a", f"it is {value}", step=1)
        logger.log_image("a", torch.full((1, 2, 2), value), 1)
        logger.log_table("a", columns=["x"], data=[[value]], step=1)
    assert logger._calls is not None
    assert logger._calls.wait(60)
    files = [Path(file.path).suffix for file in logger.experiment.list_artifacts(logger.run_id, "a")]
    assert sorted(files) == [".json"] * 3 + [".png"] * 3 + [".txt"] * 3


class Infinite(WithHyperparameters):
    def on_train_batch_end(self, *arguments: Any) -> None:
        self.log("odd", (math.inf, -math.inf, math.nan, 1e39)[self.global_step % 4])


class Seeded(DataModule):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader(4)


def test_a_resumed_run_sends_no_infinity_again_and_has_the_hyperparameters_of_both(tmp_path: Path) -> None:
    for steps in (6, 8):
        logger = MLFlowLogger("exp", tracking_uri=f"sqlite:///{tmp_path}/own.db", artifact_location="./artifacts")
        trainer = quiet(
            max_steps=steps,
            log_every_n_steps=1,
            logger=logger,
            enable_checkpointing=True,
            callbacks=ModelCheckpoint(every_n_train_steps=4),
            default_root_dir="runs",
        )
        trainer.fit(Infinite(), Seeded(77), ckpt_path="last")
    points = logger.experiment.get_metric_history(logger.run_id, "odd")
    assert sorted(point.step for point in points) == list(range(1, 9))
    parameters = logger.experiment.get_run(logger.run_id).data.params
    assert (parameters["lr"], parameters["size"]) == ("0.5", "77")


WRONG: dict[str, dict[str, Any]] = {
    "no such run": {"run_id": "0" * 32},
    "no such store": {"tracking_uri": "nothing://x"},
    "log_model": {"log_model": "best"},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_reported_before_the_first_step(case: str) -> None:
    with raises_recorded(ConfigError):
        quiet(max_steps=1, logger=MLFlowLogger(**WRONG[case])).fit(Toy(), loader(1))
