"""The benchmarks run and report what they measured; no test asserts a speed."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import pytest

from benchmarks.chart import chart
from tests.helpers.processes import ROOT, run_python


@pytest.mark.parametrize("name", ["overhead", "dataloader", "accumulate", "validate", "average"])
def test_contenders_do_the_work_and_the_report_is_complete(name: str, tmp_path: Path) -> None:
    if name == "validate":
        pytest.importorskip("torchmetrics")
    options = ("--steps", "20", "--rounds", "1", "--only", "ours", "--save", str(tmp_path))
    run_python("-m", "benchmarks", name, *options).check()
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert not report["left_out"]
    assert {len(times["cpu"]) for name, times in report["results"].items() if name.startswith("ours")} == {1}
    page = (tmp_path / f"{name}.md").read_text()
    assert all(name in page for name in report["results"])
    assert "torch" in report["versions"]


def test_growth_measures_every_row() -> None:
    from benchmarks.growth import ROWS

    done = run_python("-m", "benchmarks", "growth", "--rounds", "1", "--most", "100").check().stdout
    assert all(f"| {name} |" in done for name in ROWS)
    assert "| 1e10 |" in done


def test_the_calls_of_a_step_are_counted() -> None:
    done = run_python("-m", "benchmarks", "functions", "--steps", "20").check().stdout
    assert "| +1.00 | " in done
    assert "`_train_step` (trainer/trainer.py) |" in done
    assert "`_train_epoch` (trainer/trainer.py) |" in done  # called once, but a loop over all steps
    assert "`hand_written` (benchmarks/_task.py) |" in done
    assert re.search(r"Of this trainer's own functions: \+\d", done)


def test_without_a_name_all_are_listed() -> None:
    listed = run_python("-m", "benchmarks").check().stdout
    names = {line.split()[0] for line in listed.splitlines()[2:]}
    assert names >= {
        *("overhead", "dataloader", "accumulate", "validate", "average", "import", "startup", "ddp"),
        *("fsdp", "deepspeed"),
    }
    assert names >= {"checkpoint", "resume", "chaos", "growth", "functions"}
    assert not any(name.startswith("_") for name in names)


@pytest.mark.parametrize("name", ["overhead", "dataloader", "validate"])
def test_the_charts_of_the_pages_are_those_of_the_figures_next_to_them(name: str) -> None:
    pictures = ROOT / "docs" / "pictures"
    figures = json.loads((pictures / f"{name}.json").read_text())
    picture = chart(figures)
    assert picture == (pictures / f"{name}.svg").read_text()
    for name, result in figures["results"].items():
        assert escape(name) in picture
        assert f">{result['ratio_cpu']:.2f}<" in picture
