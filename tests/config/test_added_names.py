"""Callbacks, loggers, strategies and precisions of another package, which is really installed, by their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "added-names"
version = "1.0"

[tool.setuptools]
py-modules = ["added_names"]

[project.entry-points."trainer.callbacks"]
Counts = "added_names:Counts"
TextLogger = "added_names:TextLogger"
Broken = "added_names:Nothing"

[project.entry-points."trainer.strategies"]
one_cpu = "added_names:OneCPU"

[project.entry-points."trainer.precisions"]
half = "added_names:HALF"
"""
PACKAGE = """
import torch

from trainer import Callback
from trainer.logger import Logger
from trainer.precision import Precision
from trainer.strategies import SingleDeviceStrategy

HALF = Precision("half", torch.bfloat16)


class Counts(Callback):
    def __init__(self, start: int = 0):
        self.count = start

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1

    def on_train_end(self, trainer, module):
        print("counted", self.count, trainer.strategy.name, trainer.precision, module.layer.weight.dtype)


class TextLogger(Logger):
    def log_metrics(self, metrics, step):
        print("logged", sorted(metrics))


class OneCPU(SingleDeviceStrategy):
    name = "one_cpu"
"""
RUN = """
module: tests.helpers.toy.Toy
trainer:
  max_steps: 3
  log_every_n_steps: 1
  accelerator: cpu
  strategy: one_cpu
  precision: half
  enable_progress_bar: false
  enable_checkpointing: false
  logger: TextLogger
  callbacks: [{class_path: Counts, start: 10}]
"""
SCRIPT = """
from tests.helpers.toy import Toy, loader
from trainer import Trainer

module = Toy()
Trainer(max_steps=3, accelerator="cpu", strategy="one_cpu", precision="half", logger=False,
        enable_progress_bar=False, enable_checkpointing=False).fit(module, loader(4))
print(module.trainer.strategy.name, module.trainer.precision)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the package into a folder of its own; return the environment of processes that have it."""
    folder, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "added_names.py").write_text(PACKAGE)
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(place)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(folder)], check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), str(ROOT)])}


def ran(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_configuration_names_them(installed: dict[str, str], tmp_path: Path) -> None:
    data = "data:\n  class_path: data.py:Data\n"
    (tmp_path / "data.py").write_text(
        "from trainer import DataModule\nfrom tests.helpers.toy import loader\n\n\nclass Data(DataModule):\n"
        "    def train_dataloader(self):\n        return loader(8)\n"
    )
    (tmp_path / "run.yaml").write_text(RUN + data)
    done = ran(installed, tmp_path, "-m", "trainer", "fit", "--config", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "counted 13 one_cpu half torch.bfloat16" in done.stdout
    assert "logged [" in done.stdout


def test_trainer_takes_them_by_name(installed: dict[str, str], tmp_path: Path) -> None:
    done = ran(installed, tmp_path, "-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "one_cpu half" in done.stdout


MISTAKES = [
    ("class_path: Counts, start", "class_path: Broken, start", "'Broken' is of the package added-names, which"),
    ("class_path: Counts, start", "class_path: Count, start", "'Count'"),
    ("start: 10", "begin: 10", "(Counts) has no argument 'begin'"),
    ("strategy: one_cpu", "strategy: one_cpus", "Did you mean 'one_cpu'"),
]


def test_mistakes_with_them_are_reported(installed: dict[str, str], tmp_path: Path) -> None:
    calls = "import sys; from trainer.cli.main import main; [print(main(['fit', '--config', f])) for f in sys.argv[1:]]"
    files = [f"{number}.yaml" for number in range(len(MISTAKES))]
    for file, (old, new, _) in zip(files, MISTAKES, strict=True):
        (tmp_path / file).write_text(RUN.replace(old, new))
    done = ran(installed, tmp_path, "-c", calls, *files)
    assert done.stdout.split() == ["2"] * len(files)
    for _, _, words in MISTAKES:
        assert words in done.stderr
    assert "Traceback" not in done.stderr
