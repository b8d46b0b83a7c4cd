"""Runs with a model that is split over processes end after trouble, and resume to the same bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT, Result, Running, fork_python
from tests.helpers.strategy_runs import IN_THREE, SPLIT, WAYS
from tests.tiers import selected
from trainer.testing import fault
from trainer.testing.compare import compare_runs

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are killed, and their parents looked at"),
    pytest.mark.timeout(900),
]

SCRIPT = ROOT / "tests" / "helpers" / "trouble.py"
MANY = 1_000_000
DISTURBED: dict[str, tuple[str, int | None, bool]] = {
    "killed in a step": ("", None, False),
    "killed while it writes its part": ("in_file", 1, False),
    "killed in the background while it writes its part": ("in_file", 1, True),
    "killed when a file of its part is there": ("after_file", 1, False),
    "killed when all parts are there": ("before_manifest", 0, False),
    "killed before the commit": ("before_rename", 0, False),
    "killed after the commit": ("after_rename", 0, False),
}
"""The point, the rank that is killed there, and whether checkpoints are written in the background.

Rank 1 has a part of its own in every way. The last rank is killed in a step.
"""
POINTS = sorted({(point, rank) for point, rank, _ in DISTURBED.values() if point})


def start(way: str, run: dict[str, Any], env: dict[str, str] | None = None) -> Running:
    return fork_python(SCRIPT, json.dumps({"way": way, **run}), env=env)


def passes(way: str) -> dict[tuple[str, int | None], int]:
    """Run undisturbed; return how often each point is passed, in three checkpoints."""
    faults = [next(iter(fault(point, count=MANY, rank=rank).items())) for point, rank in POINTS]
    env = {faults[0][0]: ",".join(text for _, text in faults)}
    printed = start(way, {"root": "uninterrupted"}, env).wait(300).check(0).stdout.splitlines()
    left = {
        line.partition(":")[0]: int(line.partition(":")[2].partition("@")[0]) for line in printed if "=kill" in line
    }
    return {(point, rank): MANY - left[point] for point, rank in POINTS}


def disturbed(way: str, name: str, passed: dict[tuple[str, int | None], int]) -> Running:
    """Start a run that is killed once, where it has a point in the middle of its second checkpoint."""
    point, rank, in_background = DISTURBED[name]
    run = {"root": name, "max_restarts": 1, "async_save": in_background}
    if not point:
        return start(way, {**run, "how": "SIGKILL", "who": str(WAYS[way].processes - 1)})
    return start(way, run, fault(point, count=passed[point, rank] // 2 + 1, rank=rank))


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Result]]]:
    """Return a function that runs, once, all cases of a way: two beside each other."""

    @cache
    def run_all(way: str) -> tuple[Path, dict[str, Result]]:
        folder = tmp_path_factory.mktemp("way")
        names = [name for other, name in selected(request, "way", "name") if other == way]
        results = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            passed = passes(way)
            for two in (names[i : i + 2] for i in range(0, len(names), 2)):
                running = {name: disturbed(way, name, passed) for name in two}
                try:
                    results.update({name: one.wait(280) for name, one in running.items()})
                finally:
                    for one in running.values():
                        one.kill()
        return folder, results

    return run_all


@pytest.mark.parametrize("name", DISTURBED)
@pytest.mark.parametrize("way", [way for way in SPLIT if way not in IN_THREE and "," not in way])
def test_it_goes_on_to_the_same_bits(
    ended: Callable[[str], tuple[Path, dict[str, Result]]], way: str, name: str
) -> None:
    folder, results = ended(way)
    result = results[name].check(0)
    assert "starting all processes again (1 of 1)" in result.stderr, result.stderr
    assert compare_runs(folder / "uninterrupted/version_0", folder / name / "version_0") == []
    assert list((folder / name).glob("version_0/checkpoints/.tmp-*")) == []
