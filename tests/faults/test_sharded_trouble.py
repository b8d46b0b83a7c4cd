"""Runs with sharded state end after trouble as all others do, and resume to the same bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT, Result, Running, fork_python, fork_ranks
from tests.helpers.trouble import STEPS, TROUBLE
from tests.tiers import selected
from trainer.strategies import STRATEGIES
from trainer.testing import fault
from trainer.testing.compare import compare_runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are killed, and their parents looked at")

SCRIPT = ROOT / "tests" / "helpers" / "trouble.py"
KINDS = ("fsdp", "deepspeed_stage_2", "deepspeed_stage_3")
"""One of each kind of dividing."""
OTHERS = sorted(
    name for name, kind in STRATEGIES.items() if kind.shards_state and kind.multi_process and name not in KINDS
)
"""They share the code of those."""

DISTURBED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "killed in a step": ({"how": "SIGKILL", "who": "1"}, {}),
    "an error in a step": ({"how": "error", "who": "1"}, {}),
    "hangs in a step": ({"how": "hang", "who": "1", "watchdog_seconds": 5.0}, {}),
    "killed while it writes its part": ({}, fault("in_file", count=16, rank=1)),
    "killed when all parts are there": ({}, fault("before_manifest", count=2, rank=0)),
    "killed after the commit": ({}, fault("after_rename", count=2, rank=0)),
    "its disk is full": ({}, fault("in_file", "full", count=16, rank=1)),
    "killed in the background while it writes its part": ({"async_save": True}, fault("in_file", count=16, rank=1)),
}
ONCE = ("killed while it writes its part",)
OF_OTHER_KINDS = (
    "killed in a step",
    "killed while it writes its part",
    "killed in the background while it writes its part",
)
CASES = [
    (strategy, name)
    for strategy in (*KINDS, *OTHERS)
    for name in (ONCE if strategy in OTHERS else DISTURBED if strategy == "fsdp" else OF_OTHER_KINDS)
]
AGAIN = {"max_restarts": 1}


def start(strategy: str, *runs: dict[str, Any], env: dict[str, str] | None = None) -> Running:
    return fork_python(SCRIPT, *(json.dumps({"strategy": strategy, **run}) for run in runs), env=env)


Ended = tuple[Path, dict[str, Result]]
"""The folder of a strategy's runs, and their results."""


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """Return a function that runs, once, all cases of a strategy beside each other."""

    @cache
    def run_all(strategy: str) -> Ended:
        folder = tmp_path_factory.mktemp(strategy)
        names = [name for other, name in selected(request, "strategy", "name") if other == strategy]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            fork_ranks(SCRIPT, json.dumps({"strategy": strategy, "root": "uninterrupted"})).wait(200).check(0)
            running = {}
            for name in names:
                run, env = DISTURBED[name]
                running[name] = start(strategy, {"root": name, **AGAIN, **run}, env=env)
            try:
                return folder, {name: one.wait(280) for name, one in running.items()}
            finally:
                for one in running.values():
                    one.kill()

    return run_all


@pytest.mark.parametrize(("strategy", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_it_goes_on_to_the_same_bits(ended: Callable[[str], Ended], strategy: str, name: str) -> None:
    folder, results = ended(strategy)
    result = results[name].check(0)
    assert "starting all processes again (1 of 1)" in result.stderr, result.stderr
    assert compare_runs(folder / "uninterrupted/version_0", folder / name / "version_0") == []
    assert list((folder / name).glob("version_0/checkpoints/.tmp-*")) == []


@pytest.mark.parametrize("strategy", KINDS)
def test_an_agreed_stop_is_saved_and_gone_on_from(strategy: str) -> None:
    stops = {
        "term": {"how": "SIGTERM", "who": "1"},
        "in the background": {"how": "SIGTERM", "who": "1", "async_save": True},
    }
    runs = [
        {"root": "uninterrupted"},
        *({"root": name, **run} for name, run in stops.items()),
        *({"root": n} for n in stops),
    ]
    result = start(strategy, *runs).wait(280).check(0)
    for name in stops:
        (line,) = {line for line in result.stdout.splitlines() if line.startswith(f"{name} ") and line.endswith("143")}
        assert TROUBLE < int(line.removeprefix(name).split()[0]) < STEPS
        assert f"{name} {STEPS} None None" in result.stdout
        differences = compare_runs(Path("uninterrupted/version_0"), Path(name) / "version_0")
        assert [difference for difference in differences if "follows" not in difference] == [], name
