"""RunRecord writes down versions and commit, once for each start."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import ModelCheckpoint, RunRecord


def git(*arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *names, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_an_entry_for_each_start_with_versions_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git("init", "-q", "-b", "main")
    Path("train.py").write_text("1\n")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    for steps in (2, 4):
        trainer = quiet(
            max_steps=steps,
            default_root_dir=tmp_path / "runs",
            enable_checkpointing=True,
            callbacks=[RunRecord(packages=["pytest", "no-such-package"]), ModelCheckpoint()],
        )
        trainer.fit(Toy(), loader(), ckpt_path="last")
        Path("train.py").write_text("2\n")
    entries = json.loads((trainer.run_dir / "versions.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 2]
    assert [entry["git"] for entry in entries] == [
        {"commit": git("rev-parse", "HEAD"), "branch": "main", "changed": changed} for changed in (False, True)
    ]
    assert torch.__version__.startswith(entries[0]["versions"]["torch"])  # which may lack what was built for: "+cu128"
    assert entries[0]["versions"]["pytest"] == pytest.__version__
    assert "no-such-package" not in entries[0]["versions"]


def test_without_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    trainer = quiet(max_steps=1, default_root_dir=tmp_path / "runs", callbacks=RunRecord())
    trainer.fit(Toy(), loader())
    assert json.loads((trainer.run_dir / "versions.json").read_text())[0]["git"] is None


def test_a_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    quiet(fast_dev_run=True, default_root_dir=tmp_path / "runs", callbacks=RunRecord()).fit(Toy(), loader())
    assert not list(tmp_path.glob("**/versions.json"))


def test_a_file_that_is_damaged_is_begun_again(tmp_path: Path) -> None:
    class Damage(RunRecord):
        def on_fit_start(self, trainer, module) -> None:  # type: ignore[no-untyped-def]
            trainer.run_dir.mkdir(parents=True, exist_ok=True)
            (trainer.run_dir / "versions.json").write_text("{")
            super().on_fit_start(trainer, module)

    trainer = quiet(max_steps=1, default_root_dir=tmp_path, callbacks=Damage())
    trainer.fit(Toy(), loader())
    assert len(json.loads((trainer.run_dir / "versions.json").read_text())) == 1
