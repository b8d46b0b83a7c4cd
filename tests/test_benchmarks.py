"""The benchmarks run and report what they measured; no test asserts a speed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.chart import chart
from tests.helpers.processes import ROOT, run_python


@pytest.mark.parametrize("name", ["overhead", "dataloader", "accumulate", "validate"])
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


@pytest.mark.parametrize(("what", "most", "most_own"), [("off", 2, 18), ("on", 36, 32)])
def test_a_step_makes_no_more_calls_than_it_did(what: str, most: int, most_own: int) -> None:
    """The calls of a step beyond those of the hand-written loop, in all and to the trainer's own functions.

    They are counted: the same on every machine, however busy. Raise a number only for something worth its time.
    """
    done = run_python("-m", "benchmarks", "functions", "--what", what, "--steps", "200").check().stdout
    found = re.search(r"\n([+-][\d.]+) calls a step, .* own functions: ([+-][\d.]+) calls", done)
    assert found is not None, done
    assert float(found[1]) <= most
    assert float(found[2]) <= most_own


def test_without_a_name_all_are_listed() -> None:
    listed = run_python("-m", "benchmarks").check().stdout
    names = {line.split()[0] for line in listed.splitlines()[2:]}
    assert names >= {
        "overhead",
        "dataloader",
        "accumulate",
        "validate",
        "import",
        "startup",
        "ddp",
        "fsdp",
        "deepspeed",
    }
    assert names >= {"checkpoint", "resume", "chaos", "growth", "functions"}
    assert not any(name.startswith("_") for name in names)


def test_the_chart_of_the_readme_is_that_of_the_figures_beside_it() -> None:
    pictures = ROOT / "docs" / "pictures"
    figures = json.loads((pictures / "overhead.json").read_text())
    picture = chart(figures)
    assert picture == (pictures / "overhead.svg").read_text()
    for name, result in figures["results"].items():
        assert name in picture
        assert f">{result['ratio_cpu']:.2f}<" in picture
