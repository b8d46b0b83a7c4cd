"""WandbLogger, with the real client, offline."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.stops import Crash
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.callbacks import JSONLLogger, ModelCheckpoint, WandbLogger

wandb = pytest.importorskip("wandb")

BLOCK, FULL, LAST = 32768, 1, 4


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "of-wandb"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    for logger in list(WandbLogger._all):
        logger._leave_run()
    if wandb.run is not None:
        wandb.finish()


def records(folder: Path) -> list[Any]:
    """Return the records of a start that has ended. The client's own process writes them, also after `finish`."""
    (path,) = folder.glob("*.wandb")
    for _ in range(600):
        found = records_so_far(path.read_bytes())
        if any(one.WhichOneof("record_type") == "exit" for one in found):
            return found
        time.sleep(0.1)
    pytest.fail(f"{path} has no end")


def records_so_far(data: bytes) -> list[Any]:
    """Return the records of a log as LevelDB's: blocks of parts."""
    from wandb.proto import wandb_internal_pb2

    position, parts, found = 7, b"", []
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # too little for the head of a part
            position += BLOCK - position % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (FULL, LAST):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one start, without what wandb adds."""
    rows = [r.history for r in records(folder) if r.WhichOneof("record_type") == "history"]
    named = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in named]


def starts(folder: Any = "logs") -> list[Path]:
    return sorted(Path(folder, "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime_ns)


class Draws(Callback):
    """A callback that is written once, for all loggers."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        for logger in trainer.loggers:
            logger.log_image("samples", torch.rand(2, 3, 4, 4), caption=["a", "b"])
            logger.log_text("note", "hello")
            logger.log_histogram("weights", module.layer.weight)
            logger.log_table("table", ["x"], [[1]])


class WithHyperparameters(Toy):
    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()


def train(crash_at: int | None = None, **options: Any) -> WandbLogger:
    logger = WandbLogger(save_dir="logs", offline=True, project="p", **options)
    crash = [] if crash_at is None else [Crash(crash_at)]
    trainer = quiet(
        max_steps=8,
        log_every_n_steps=1,
        logger=[logger, JSONLLogger()],
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=2), Draws(), *crash],
        default_root_dir="runs",
    )
    try:
        trainer.fit(WithHyperparameters(), loader(4, shuffle=True), ckpt_path="last")
    except RuntimeError:
        assert crash_at is not None
    logger._leave_run()  # as the end of the process
    return logger


def test_a_resumed_run_is_the_same_run_with_everything_there() -> None:
    train(crash_at=5)
    train()
    first, second = starts()
    assert first.name.split("-")[-1] == second.name.split("-")[-1]
    rows = [*history(first), *history(second)]
    losses = [(row["trainer/global_step"], row["train_loss"]) for row in rows if "train_loss" in row]
    assert {step for step, _ in losses} == set(range(1, 9))
    assert len(set(losses)) == 8  # the repeated step has the same value
    media = [row for row in rows if row.keys() & {"samples/_type", "samples", "note"}]
    assert {row["trainer/global_step"] for row in media} == {4, 8}
    written = {path.name.split("_")[0] for path in second.glob("files/media/*/*")}
    assert written == {"samples", "note", "table"}
    config = [r.config for r in records(second) if r.WhichOneof("record_type") == "config"]
    assert any(u.key == "lr" and u.value_json == "0.5" for c in config for u in c.update)
    kept = [json.loads(line) for line in Path("runs/version_0/metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train_loss"]) for line in kept if "train_loss" in line] == sorted(set(losses))


@pytest.mark.parametrize("which", [True, "all"])
def test_checkpoints_are_artifacts(which: Any) -> None:
    train(log_model=which)
    (start,) = starts()
    sent = [r.artifact for r in records(start) if r.WhichOneof("record_type") == "artifact"]
    sent = [artifact for artifact in sent if artifact.type == "model"]  # tables are artifacts, too
    assert {one.name for one in sent} == {f"model-{start.name.split('-')[-1]}"}
    assert len(sent) == (1 if which is True else 4)
    assert set(sent[-1].aliases) == {"latest", "best"}
    assert {entry.path for entry in sent[-1].manifest.contents} >= {"manifest.json", "model.safetensors"}
    assert not list(Path("runs/version_0").glob(".sending*"))


def test_the_run_of_the_program_is_used_and_left_open() -> None:
    run = wandb.init(mode="offline", dir=".", project="mine")
    logger = WandbLogger(save_dir="logs", offline=True)
    quiet(max_epochs=1, logger=logger).fit(Toy(), loader(1))
    assert logger.experiment is run
    assert logger.version == run.id
    assert not starts()
    run.log({"more": 1})


def test_a_run_that_the_program_has_ended_is_opened_again() -> None:
    logger = WandbLogger(save_dir="logs", offline=True)
    trainer = quiet(max_epochs=1, logger=logger)
    trainer.fit(Toy(), loader(1))
    run_id = logger.version
    wandb.finish()
    trainer.test(Toy(), loader(1))
    assert logger.version == run_id
    logger._leave_run()
    assert [row.keys() - {"trainer/global_step"} for row in history(starts()[-1])] == [{"val_loss"}]


def test_two_at_once_and_one_after_the_other() -> None:
    both = [WandbLogger(save_dir="logs", offline=True, id="one"), WandbLogger(dir="logs", offline=True, prefix="b")]
    quiet(max_epochs=1, log_every_n_steps=1, logger=both).fit(Toy(), loader(2), loader(1))
    assert both[0].experiment.id == "one" != both[1].version
    third = WandbLogger(save_dir="logs", offline=True)
    quiet(max_epochs=1, log_every_n_steps=1, logger=third).fit(Toy(), loader(2))
    assert len(starts()) == 3
    assert all(one._client is None for one in both)  # ended, since their training is over
    third._leave_run()
    names = [set().union(*map(set, history(start))) - {"trainer/global_step"} for start in starts()]
    assert sorted(map(sorted, names)) == [["b-train_loss", "b-val_loss"], ["train_loss"], ["train_loss", "val_loss"]]


WRONG: dict[str, dict[str, Any]] = {
    "no run": {"experiment": True},
    "log_model": {"log_model": "best"},
    "folder": {"save_dir": "/dev/null/x"},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_reported_before_the_first_step(case: str) -> None:
    with raises_recorded(ConfigError):
        quiet(max_steps=1, logger=WandbLogger(offline=True, **WRONG[case])).fit(Toy(), loader(1))
