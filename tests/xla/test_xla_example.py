"""The GPT example trains on XLA devices, resumes, and its checkpoint is read without XLA."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

from tests.helpers.examples import example_module
from tests.helpers.processes import ROOT, run_python

PAGE = (ROOT / "docs" / "tpu.md").read_text()

SMALLER = (
    *("--module.layers", "2", "--module.width", "32", "--module.context", "16", "--module.warmup_steps", "5"),
    *("--data.context", "16", "--data.val_pieces", "64", "--trainer.val_check_interval", "20"),
)


def fit(folder: Path, steps: int, *more: str) -> list[dict[str, Any]]:
    """Train in `folder` with the command of the docs; returns the rows of the log."""
    (line,) = re.findall(r"^(.*)\.venv-xla/bin/trainer (fit .*)$", PAGE, flags=re.MULTILINE)
    variables = dict(word.split("=") for word in line[0].split())
    (folder / "examples").exists() or (folder / "examples").symlink_to(ROOT / "examples")
    words = ["-m", "trainer", *line[1].split(), *SMALLER, "--trainer.max_steps", str(steps), *more]
    run_python(*words, cwd=folder, env=variables).check()
    with open(next(folder.glob("runs/gpt-xla/*/metrics.csv"))) as file:
        return list(csv.DictReader(file))


def test_the_gpt_trains_and_goes_on(tmp_path: Path) -> None:
    rows = fit(tmp_path, 40)
    losses = [float(row["train_loss"]) for row in rows if row.get("train_loss")]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert [row for row in rows if row.get("val_loss")]

    rows = fit(tmp_path, 60, "--ckpt-path", "last")
    assert len([row for row in rows if row.get("train_loss")]) == 6
    assert len(list(tmp_path.glob("runs/gpt-xla/*"))) == 1

    newest = max(tmp_path.rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent
    module = example_module("gpt", "module").GPT.load_from_checkpoint(newest)
    assert module.net is not None
    assert module.net.head.weight is module.net.token_embedding.weight
    assert module.net.head.weight.device.type == "cpu"
