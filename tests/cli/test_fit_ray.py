"""`trainer fit --ray` checks its options before anything starts; launchers/test_ray.py runs trainings."""

from __future__ import annotations

import builtins
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.project import Command, done, refused
from tests.messages import raises_recorded
from trainer.cli.ray import RayOptions, read_ray
from trainer.config.tree import Diagnostics
from trainer.errors import ConfigError
from trainer.runs.resolved_config import resolve_config
from trainer.settings import Settings

FIT = ("fit", "--module", "mymodel.py:Net", "--data", "mymodel.py:Data")
WORKER = {
    "RAY_JOB_ID": "01000000",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_the_options_are_rays() -> None:
    findings = Diagnostics()
    words = ["num_workers=2", "use_gpu=true", "resources_per_worker={CPU: 4, GPU: 0.5}", "storage_path=/shared"]
    options = read_ray([*words, "max_failures=-1", "address=auto"], findings)
    assert findings.problems == []
    assert options == RayOptions(2, True, {"CPU": 4.0, "GPU": 0.5}, "/shared", -1, "auto")


def test_without_ray(project: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(command, *FIT, "--ray", "num_workers=2")
    assert not (project / "runs").exists()


def test_the_last_lines_are_printed_once(
    project: Path, command: Command, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In Ray's workers `print` prints, and logs what it prints, which Ray shows as well."""
    plain = builtins.print

    def printed_and_logged(*words: Any, sep: str = " ", file: Any = None, **options: Any) -> None:
        plain(*words, sep=sep, file=file, **options)
        logging.getLogger().info(sep.join(map(str, words)))

    monkeypatch.setattr(builtins, "print", printed_and_logged)
    caplog.set_level(logging.INFO)
    out, _ = done(command(*FIT, "--trainer.max_steps", "2", "--trainer.enable_progress_bar", "false"))
    assert out.count("after 2 steps:") == 1
    assert "after 2 steps:" not in caplog.text


def test_a_relative_folder_is_refused_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    with raises_recorded(ConfigError):
        resolve_config(Settings(accelerator="cpu"))
    assert resolve_config(Settings(accelerator="cpu", default_root_dir=tmp_path)).num_processes == 2
