"""Without a GPU `make test-gpu` fails and names what it skips; its report has machine, figures and what is missing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from tests.helpers.processes import ROOT, alive, run_python, wait_until


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_cuda_the_report_names_all_tests_as_skipped(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = run_python("-m", "benchmarks", "gpu", "--part", "tests", "--report", str(report), env={"PYTHONPATH": ROOT})
    done.check(2)
    assert f"Nothing was run on a GPU: torch {torch.__version__} of {sys.executable} " in done.stderr
    assert "Give PYTHON=an interpreter whose torch sees a GPU." in done.stderr
    text = report.read_text()
    (number,) = re.findall(r"0 passed, 0 failed, (\d+) skipped\.", text)
    assert text.count("- skipped: `tests.") == int(number) > 10


def test_a_report_that_cannot_be_written_is_reported_before_anything_runs(tmp_path: Path, capsys: Any) -> None:
    report = tmp_path / "no such folder" / "report.md"
    assert gpu.main(["--device", "cpu", "--small", "--report", str(report)]) == 2
    assert capsys.readouterr().err == f"Nothing was run: --report {report}: No such file or directory.\n"


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    result = run_python("-m", "benchmarks", "gpu", env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}).check(2)
    assert "cannot import torch: libcudart.so.13: cannot open shared object file. Repair it" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_report_has_the_machine_the_figures_and_what_is_missing(tmp_path: Path) -> None:
    hidden = "import sys\nsys.modules['tensorboard'] = None\n"  # as if it were not installed
    (tmp_path / "sitecustomize.py").write_text(hidden)
    report = tmp_path / "report.md"
    options = ("--device", "cpu", "--small", "--part", "overhead", "--report", str(report))
    run_python("-m", "benchmarks", "gpu", *options, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}).check()
    text = report.read_text()
    assert f"torch {torch.__version__}" in text
    assert "- device cpu" in text
    assert "not installed, and therefore left out:" in text
    assert "tensorboard" in text.split("left out:")[1].splitlines()[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    assert [row.split(" | ")[0].strip("| ") for row in rows[1:]] == [
        "hand-written loop",
        "ours, off",
        "ours, off, one self.log per step",
        "Fabric",
    ]
    assert all(float(row.split(" | ")[1]) > 0 for row in rows[1:])


def test_several_devices_train_with_the_losses_of_one(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    options = ("--device", "cpu", "--small", "--part", "parallel", "--report", str(report))
    run_python("-m", "benchmarks", "gpu", *options, env={"PYTHONPATH": ROOT}).check()
    rows = [line.strip("| ").split(" | ") for line in report.read_text().splitlines() if line.startswith("| ")]
    assert rows[0][0].startswith("2 devices")
    assert [row[0] for row in rows[2:]][:3] == ["one device", "ddp", "fsdp"]
    assert all(0 < float(row[-1]) < 1e-3 for row in rows[3:])


def test_a_part_that_fails_is_reported_and_fails_the_run() -> None:
    text, ended_well = gpu.in_its_own_process("gpt2", "no-such-device", small=True)
    assert "Ended with exit code" in text
    assert not ended_well


STAND_IN = """
import os, pathlib, subprocess, sys
here = pathlib.Path({folder!r})
if "slow" in str(here):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (here / "child").write_text(str(child.pid))
    child.wait()
pathlib.Path(sys.argv[sys.argv.index("--report") + 1]).write_text({text!r})
"""


def test_a_part_that_takes_too_long_is_ended_with_its_processes(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    run_stand_in(folder, "", monkeypatch)
    monkeypatch.setattr(gpu, "TIME_LIMIT_S", 10.0)
    text, ended_well = gpu.in_its_own_process("tests", "cpu", small=True)
    assert (text, ended_well) == ("**Not finished after 10 s.**", False)
    child = int((folder / "child").read_text())
    wait_until(lambda: not alive(child))


def run_stand_in(folder: Path, text: str, monkeypatch: Any) -> None:
    """Let the interpreter run a script in place of a part."""
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / "__main__.py").write_text(STAND_IN.format(folder=str(folder), text=text))
    monkeypatch.setattr(gpu, "ROOT", folder)
