"""A tracker of one's own is one short class: it delays no step, loses nothing over a break, and ends no training."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.test_wandb_logger import Draws
from tests.helpers.stops import Crash
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer
from trainer.callbacks import CSVLogger, ModelCheckpoint, TensorBoardLogger, Tracker


class Shop(Tracker):
    """A tracker whose service is a folder with a file for each run."""

    def __init__(self, slow: threading.Event | None = None, fails: bool = False, log_model: Any = False) -> None:
        self.slow, self.fails, self.log_model = slow, fails, log_model
        self.seconds_at_end = 0.05 if slow else 60.0

    def open(self, run_id: str | None) -> Path:
        return Path(run_id or f"run-{len(list(Path().glob('run-*')))}.jsonl").resolve()

    def opened_run_id(self) -> str:
        return self.experiment.name

    def send_metrics(self, metrics: dict[str, float], step: int) -> None:
        if self.slow is not None:
            self.slow.wait()
        if self.fails:
            raise ConnectionError("no route to host")
        with open(self.experiment, "a") as file:
            file.write(json.dumps([step, metrics]) + "\n")

    def send_checkpoint(self, folder: Path, name: str, aliases: list[str]) -> None:
        assert (folder / "manifest.json").exists()
        with open("sent", "a") as file:
            file.write(f"{name} {aliases}\n")


class Gallery(Shop):
    def send_media(self, key: str, media: Any, step: int) -> None:
        if self.slow is not None:
            self.slow.wait()
        with open("media", "a") as file:
            file.write(json.dumps([step, key, str(vars(media))]) + "\n")


def fit(logger: Any, steps: int = 6, **settings: Any) -> Trainer:
    options = {"log_every_n_steps": 1, "enable_checkpointing": True, "default_root_dir": "runs", **settings}
    trainer = quiet(max_steps=steps, logger=logger, **options)
    trainer.fit(Toy(), loader(8), ckpt_path="last")
    return trainer


def points(file: str = "run-0.jsonl") -> list[int]:
    path = Path(file)
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_client_that_hangs_delays_no_step_and_what_it_has_not_got_is_sent_by_the_resumed_run() -> None:
    never = threading.Event()
    every_other = {"callbacks": [ModelCheckpoint(every_n_train_steps=2)]}
    fit(Shop(slow=never), 4, **every_other)  # it would hang here if a step waited for the client
    assert points() == []
    fit(Shop(), 6, **every_other)
    assert points() == [1, 2, 3, 4, 5, 6]
    never.set()


class DrawsAll(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        step = trainer.global_step
        trainer.logger.log_image("a/picture", torch.arange(12.0).reshape(3, 2, 2) / 12, caption="of noise")
        trainer.logger.log_text("note", f"step {step}")
        trainer.logger.log_histogram("weights", torch.arange(5.0) + step, bins=3)
        trainer.logger.log_table("table", ["x", "y"], [[1, "one"], [None, 0.5]])


def test_media_that_were_not_sent_are_sent_by_the_resumed_run() -> None:
    never = threading.Event()
    fit(Gallery(slow=never), 4, callbacks=[ModelCheckpoint(), DrawsAll()], limit_train_batches=2)
    assert not Path("media").exists()
    fit(Gallery(), 6, callbacks=[ModelCheckpoint(), DrawsAll()], limit_train_batches=2)
    resumed = Path("media").read_text().splitlines()
    fit(Gallery(), 6, callbacks=DrawsAll(), limit_train_batches=2, default_root_dir="whole")
    assert resumed == Path("media").read_text().splitlines()[len(resumed) :]
    assert len(resumed) == 12
    never.set()


def test_a_client_that_fails_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = fit(Shop(fails=True))
    assert trainer.global_step == 6
    assert caplog.text.count("Shop: ConnectionError in send_metrics: no route to host. Training goes on.") == 1
    assert "Shop: 6 calls failed" in caplog.text


def test_an_error_of_open_ends_the_run_before_the_first_step() -> None:
    class Closed(Shop):
        def open(self, run_id: str | None) -> Path:
            raise ConfigError("the shop is closed")

    class NoStep(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            pytest.fail("a step was made")

    with raises_recorded(ConfigError):
        fit(Closed(), callbacks=[NoStep()])


@pytest.mark.parametrize("crash_at", [3, 5])
def test_a_broken_run_goes_on_with_its_run(crash_at: int) -> None:
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(every_n_train_steps=2)]}
    with pytest.raises(RuntimeError, match="crash"):
        fit(Shop(), callbacks=[*options["callbacks"], Crash(crash_at)])
    fit(Shop(), **options)
    assert sorted(set(points())) == [1, 2, 3, 4, 5, 6]
    assert not Path("run-1.jsonl").exists()


def test_a_second_fit_is_a_new_run_unless_it_resumes() -> None:
    logger = Shop()
    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1)
    trainer.fit(Toy(), loader(2))
    trainer.test(Toy(), loader(1))
    trainer.fit(Toy(), loader(2))
    assert (points("run-0.jsonl"), points("run-1.jsonl")) == ([1, 2, 2], [1, 2])


@pytest.mark.parametrize("which", [True, "all"])
def test_checkpoints(which: Any) -> None:
    fit(Shop(log_model=which), callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=1)])
    sent = Path("sent").read_text().splitlines()
    assert len(sent) == (1 if which is True else 3)
    assert sent[-1] == "epoch=0-step=6 ['latest', 'best']"


def test_a_callback_is_written_once_for_all_loggers(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    from tests.callbacks.test_tensorboard import read

    tensorboard = TensorBoardLogger()
    with caplog.at_level(logging.INFO):
        trainer = quiet(max_epochs=2, logger=[CSVLogger(), tensorboard, Shop()], callbacks=[Draws()])
        trainer.fit(Toy(), loader(2))
    tags = read(trainer.run_dir).Tags()
    assert set(tags["images"]) == {"samples/0", "samples/1"}
    assert tags["histograms"] == ["weights"]
    assert {f"{name}/text_summary" for name in ("note", "table", "samples/captions")} <= set(tags["tensors"])
    assert caplog.text.count("CSVLogger shows no") == 1
    assert "Shop shows no" in caplog.text
    quiet(fast_dev_run=True, logger=True, callbacks=[Draws()]).fit(Toy(), loader(2))


def test_the_experiment_of_another_rank_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    logger = Shop()
    logger.experiment.anything["x"].at_all(3)
    assert logger._client is None


def test_several_trackers_send_checkpoints_at_once() -> None:
    """None deletes what another is about to write."""
    both: list[Any] = [Shop(log_model="all"), Shop(log_model="all")]
    fit(both, steps=40, callbacks=[ModelCheckpoint("kept", every_n_train_steps=1, save_top_k=-1)])
    assert len(Path("sent").read_text().splitlines()) == 2 * 40
    assert not list(Path("runs/version_0").glob(".sending*"))
