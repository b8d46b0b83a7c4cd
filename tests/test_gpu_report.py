"""`make test-gpu` ends in words without a GPU; its report names the machine, the figures, and what is left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from tests.helpers.processes import ROOT, run_python


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_cuda_it_ends_in_words_and_runs_nothing() -> None:
    done = subprocess.run(
        ["make", "test-gpu", "PART=tests", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"Nothing was run: torch {torch.__version__} of {sys.executable} " in done.stderr
    assert "Give PYTHON=an interpreter whose torch sees a GPU." in done.stderr
    assert not (ROOT / "gpu-report.md").exists()


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
        "ours, off, one self.log per step",
    ]
    assert all(float(row.split(" | ")[1]) > 0 for row in rows[1:])


def test_results_of_tests_are_counted_and_reasons_named(tmp_path: Path) -> None:
    tests = (
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no second GPU')\ndef test_c(): assert 1 == 2\n"
    )
    (tmp_path / "test_some.py").write_text(tests)
    result = tmp_path / "result.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={result}", str(tmp_path)]
    subprocess.run(command, cwd=tmp_path, check=False, capture_output=True)
    lines = gpu._of_junit(result).splitlines()
    assert lines[0] == "1 passed, 1 failed, 1 skipped."
    assert lines[2:] == [
        "- skipped: `test_some.test_b`: no second GPU",
        "- failed: `test_some.test_c`: assert 1 == 2",
    ]


def test_a_part_that_fails_is_reported_and_fails_the_run() -> None:
    text, ended_well = gpu.in_its_own_process("gpt2", "no-such-device", small=True)
    assert "Ended with exit code" in text
    assert not ended_well
