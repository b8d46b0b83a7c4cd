"""JSONLLogger writes a line each time, once, however often the run is interrupted."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.stops import Crash
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError
from trainer.callbacks import JSONLLogger, ModelCheckpoint
from trainer.metrics.media import as_images, png


def lines(folder: Any = ".") -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
    ]


class Speaks(Callback):
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        trainer.logger.log_text("note", f"epoch {trainer.current_epoch}")


def train(folder: str, crash_at: int | None = None, **settings: Any) -> Path:
    """Train three epochs of 8 steps, with a checkpoint after every 4."""
    crash = [] if crash_at is None else [Crash(crash_at)]
    trainer = quiet(
        max_epochs=3,
        log_every_n_steps=1,
        logger=JSONLLogger(),
        default_root_dir=folder,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=4), Speaks(), *crash],
        **settings,
    )
    try:
        trainer.fit(Toy(), loader(8, shuffle=True), loader(2), ckpt_path="last")
    except RuntimeError:
        assert crash_at is not None
    return trainer.run_dir


def test_lines() -> None:
    found = lines(train("runs"))
    assert found[0] == {"step": 0, "hyperparameters": {"module": {}, "data": {}}}
    assert [line["step"] for line in found if "train_loss" in line] == list(range(1, 25))
    assert [line["step"] for line in found if "val_loss" in line] == [8, 16, 24]
    notes = [line for line in found if line.get("kind") == "text"]
    assert notes[1] == {"step": 16, "key": "note", "kind": "text", "text": "epoch 1"}


@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 4}], ids=["val by epoch", "val by step"])
@pytest.mark.parametrize("crash_at", [3, 4, 9, 15])
def test_an_interrupted_run_leaves_the_file_of_one_that_was_not(crash_at: int, settings: dict[str, Any]) -> None:
    uninterrupted = train("uninterrupted", **settings)
    first, second = train("broken", crash_at, **settings), train("broken", **settings)
    assert (second / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    assert first == second or crash_at == 3


def test_numbers_that_json_lacks_and_other_things() -> None:
    logger = JSONLLogger(".")
    logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1 / 3}, 1)
    logger.log_histogram("h", [0.0, 1.0], 2, bins=2)
    logger.log_table("t", ["x"], [["y"]], step=2)
    logger.log_image("a/b c", torch.zeros(3, 2, 2), 2, caption="black")
    logger.close()
    metrics, histogram, table, image = lines()
    assert metrics == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1 / 3}
    assert float(metrics["c"]) == -math.inf
    assert histogram == {"step": 2, "key": "h", "kind": "histogram", "counts": [1, 1], "edges": [0.0, 0.5, 1.0]}
    assert table == {"step": 2, "key": "t", "kind": "table", "columns": ["x"], "data": [["y"]]}
    paths = {"paths": ["media/a_b_c-2-3-0.png"], "captions": ["black"]}
    assert image == {"step": 2, "key": "a/b c", "kind": "images", **paths}
    assert Path("media/a_b_c-2-3-0.png").read_bytes().startswith(b"\x89PNG")


def test_pictures_of_one_step_and_of_keys_that_differ_in_a_sign_are_files_of_their_own() -> None:
    logger = JSONLLogger(".")
    shades = {"a/b": [0.0, 0.25], "a_b": [1.0]}
    for key, values in shades.items():
        for value in values:
            logger.log_image(key, torch.full((1, 2, 2), value), 2)
    logger.close()
    found: dict[str, list[bytes]] = {}
    for line in lines():
        found.setdefault(line["key"], []).append(Path(line["paths"][0]).read_bytes())
    of_shade = {value: png(as_images(torch.full((1, 2, 2), value), None, {}).arrays[0]) for value in (0.0, 0.25, 1.0)}
    assert found == {key: [of_shade[value] for value in values] for key, values in shades.items()}


def test_a_second_fit_writes_next_to_the_first_and_a_test_adds() -> None:
    trainer = quiet(max_epochs=1, log_every_n_steps=1, logger=JSONLLogger("here"))
    for folder in ("here", "here/version_1"):
        trainer.fit(Toy(), loader(2))
        trainer.test(Toy(), loader(1))
        assert [sorted(line)[-1] for line in lines(folder)] == ["step", *["train_loss"] * 2, "val_loss"]


def test_a_file_that_was_cut_off_or_is_no_log() -> None:
    logger = JSONLLogger(".")
    assert logger.version == 0
    Path("metrics.jsonl").write_bytes(b'{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    logger.log_metrics({"a": 3.0}, 3)
    logger.close()
    assert [line["step"] for line in lines()] == [1, 3]
    Path("metrics.jsonl").write_bytes(b"\xff\n[]\n3\n")
    quiet(max_epochs=1, enable_checkpointing=True).fit(Toy(), loader(1))
    resumed = quiet(max_epochs=2, enable_checkpointing=True, logger=JSONLLogger("."), log_every_n_steps=1)
    resumed.fit(Toy(), loader(1), ckpt_path="last")
    assert [line["step"] for line in lines("version_1")] == [0, 2]
    assert Path("metrics.jsonl").read_bytes() == b"\xff\n[]\n3\n"


def test_a_full_disk_is_reported_once_and_lines_are_kept(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = JSONLLogger(".", flush_seconds=0)
    logger.log_metrics({"a": 1.0}, 1)
    Path("metrics.jsonl").unlink()
    Path("metrics.jsonl").mkdir()
    with caplog.at_level(logging.WARNING):
        logger.log_metrics({"a": 2.0}, 2)
        logger.log_metrics({"a": 3.0}, 3)
    assert caplog.text.count(f"cannot write {Path('metrics.jsonl').absolute()} ") == 1
    Path("metrics.jsonl").rmdir()
    Path("metrics.jsonl").write_bytes(b'{"step": 1, "a": 1.0}\n')
    logger.close()
    assert [line["step"] for line in lines()] == [1, 2, 3]


def test_the_key_of_the_step() -> None:
    with raises_recorded(ConfigError):
        JSONLLogger(".").log_metrics({"step": 1.0}, 1)
