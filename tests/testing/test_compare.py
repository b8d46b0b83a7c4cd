"""compare_runs finds every difference, and nothing else."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.messages import raises_recorded
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.writing import write_checkpoint
from trainer.errors import CheckpointError
from trainer.testing import compare_runs, each_damage, flip_byte, truncate

LOG = "step,loss,throughput/steps_per_s\n1,0.5,10\n2,0.25,\n"


def state() -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3), "nan": torch.tensor([math.nan])},
        "optimizers": [{"state": {"w": {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "nan": math.nan}]}],
        "progress": {"step": 2},
        "rng": [{"torch": torch.zeros(4, dtype=torch.uint8)}],
        "callbacks": {"ModelCheckpoint": {"last": "a"}, "Mine": {"count": 1}},
        "run_dir": "here",
    }


def make_run(folder: Path, change: Callable[[dict[str, Any]], None] | None = None, log: str | None = LOG) -> Path:
    contents = state()
    if change:
        change(contents)
    write_checkpoint(folder / "checkpoints" / "c", contents, info={"step": 2})
    CheckpointDirectory(folder / "checkpoints").set_pointer("last", "c")
    if log is not None:
        (folder / "metrics.csv").write_text(log)
    return folder


def change_run_dir(contents: dict[str, Any]) -> None:
    contents["run_dir"] = "there"
    contents["callbacks"]["ModelCheckpoint"]["last"] = "b"


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", change_run_dir)
    assert compare_runs(one, other) == []
    assert compare_runs(one / "checkpoints" / "c", other / "checkpoints" / "c") == []
    assert compare_runs(one, other, ignore=()) == [
        "callbacks.ModelCheckpoint.last: 'a' and 'b'",
        "run_dir: 'here' and 'there'",
    ]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "weight": (lambda c: c["model"]["w"][1, 2].add_(1e-6), "model.w: 1 of 6 values differ, by up to 9.54e-07"),
    "sign of zero": (lambda c: c["model"]["w"][0, 0].neg_(), "model.w: 1 of 6 values differ, by up to 0"),
    "dtype": (lambda c: c["model"].update(n=torch.tensor(3.0)), "model.n: torch.int64 () and torch.float32 ()"),
    "name": (lambda c: c["model"].update(v=torch.ones(1)), "model.v: only in the second"),
    "rate": (
        lambda c: c["optimizers"][0]["param_groups"][0].update(lr=0.1 + 1e-17 * 2),
        "optimizers.0.param_groups.0.lr",
    ),
    "groups": (lambda c: c["optimizers"].append({}), "optimizers: 1 and 2 entries"),
    "step": (lambda c: c["progress"].update(step=3), "progress.step: 2 and 3"),
    "random state": (lambda c: c["rng"][0]["torch"].add_(1), "rng.0.torch: 4 of 4 values differ"),
    "callback": (lambda c: c["callbacks"]["Mine"].update(count=True), "callbacks.Mine.count: int and bool"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_difference_is_found(name: str, tmp_path: Path) -> None:
    change, expected = CHANGES[name]
    found = compare_runs(make_run(tmp_path / "one"), make_run(tmp_path / "other", change))
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOG.replace("0.25", "0.250"), ["metrics.csv, step 2: loss is 0.25 and 0.250"]),
        (LOG.replace("0.25", ""), ["metrics.csv, step 2: loss is 0.25 and empty"]),
        (LOG + "3,0.1,\n", ["metrics.csv: 2 and 3 rows; steps in one of them only: 3"]),
        (LOG + "2,0.25,\n", ["metrics.csv: 2 and 3 rows"]),
        (LOG.replace(",10", ",11"), []),  # a clock
    ],
)
def test_logs_are_compared_by_cell(log: str, expected: list[str], tmp_path: Path) -> None:
    assert compare_runs(make_run(tmp_path / "one"), make_run(tmp_path / "other", log=log)) == expected


def test_a_missing_log_or_checkpoint_is_reported(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", log=None)
    assert compare_runs(one, other) == [f"metrics.csv: there is no {other / 'metrics.csv'}"]
    shutil.rmtree(other / "checkpoints")
    with raises_recorded(CheckpointError):
        compare_runs(one, other)


def test_damage_is_done_and_undone(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    content = (4).to_bytes(8, "little") + b"{  }" + bytes(range(20))
    file.write_bytes(content)
    seen = {}
    for what in each_damage(tmp_path):
        seen[what] = file.read_bytes() if file.exists() else None
    assert file.read_bytes() == content
    assert len(seen) == len(set(seen.values())) == 13
    assert content not in seen.values()
    assert seen["a.safetensors: removed"] is None
    damage = each_damage(tmp_path)
    assert next(damage).endswith("flipped")
    damage.close()
    assert file.read_bytes() == content
    flip_byte(file, 8)
    assert file.read_bytes()[8] == content[8] ^ 0xFF
    truncate(file, -30)
    assert file.stat().st_size == 2
