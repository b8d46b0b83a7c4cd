"""After trouble on rank 0, rank 1 or both, under DDP, all processes end, and the run can be resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT, Result, fork_python, run_distributed, run_python
from tests.helpers.trouble import STEPS, TROUBLE, fit
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.format import read_checkpoint
from trainer.testing.compare import IGNORED, compare_runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")

SCRIPT = ROOT / "tests" / "helpers" / "trouble.py"
WHO = ("0", "1", "both")
CODES = {"error": 1, "SIGKILL": 137, "hang": 1}
WATCHDOG_S = 4.0


def arguments(*runs: dict[str, Any]) -> list[str]:
    return [json.dumps(run) for run in runs]


def go(*runs: dict[str, Any], nproc: int | None = None) -> Result:
    if nproc is None:
        return fork_python(SCRIPT, *arguments(*runs)).wait()
    return run_python(SCRIPT, *arguments(*runs), nproc=nproc)


def lines(result: Result) -> set[str]:
    """Return the lines that the script printed; both ranks print the same, so each line occurs twice.

    Without the trainer's own word on a stop, which rank 0 prints once.
    """
    printed = [line for line in result.stdout.splitlines() if not line.startswith("stopped after step ")]
    assert sorted(printed) == sorted(list(set(printed)) * 2), result.stdout
    return set(printed)


def left_behind(text: str) -> list[str]:
    """Return the command lines of running processes that contain `text`."""
    return [line for line in command_lines() if text in line]


def command_lines() -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        run_distributed(fit, 2, str(root))
    return root / "version_0"


def test_graceful_stops_on_any_rank_go_on_to_the_same_bits(undisturbed: Path) -> None:
    """Many runs share one start of two processes, which catch SystemExit and print its code."""
    stops = {
        "term-0": ({"how": "SIGTERM", "who": "0"}, "SIGTERM 143"),
        "term-1": ({"how": "SIGTERM", "who": "1"}, "SIGTERM 143"),
        "term-both": ({"how": "SIGTERM", "who": "both"}, "SIGTERM 143"),
        "usr1-1": ({"how": "SIGUSR1", "who": "1"}, "SIGUSR1 75"),
        "int-1": ({"how": "SIGINT", "who": "1"}, "SIGINT 130"),
        "deadline-1": ({"how": "slow", "who": "1", "deadline": 2.0}, "deadline 75"),
        "max_time": (
            {"how": "slow", "who": "0", "max_time": "00:00:00:02"},
            "the time is used up: 0:00:02 of training None",
        ),
    }
    again = [{"root": name} for name in stops]
    result = go(*({"root": name, **run} for name, (run, _) in stops.items()), *again).check(0)
    assert "Traceback" not in result.stderr
    printed = lines(result)
    for name, (_, reason) in stops.items():
        (step,) = [line.split()[1] for line in printed if line.startswith(f"{name} ") and line.endswith(reason)]
        # The step in progress is finished; the other rank may have begun the next one.
        assert TROUBLE < int(step) < STEPS, printed
        assert f"{name} {STEPS} None None" in printed
        differences = compare_runs(undisturbed, Path(name) / "version_0", [*IGNORED, "callbacks.Timer*"])
        assert [d for d in differences if "follows" not in d] == [], name


@pytest.mark.parametrize(("how", "code"), [("SIGTERM", 143), ("SIGUSR1", 75)])
def test_exit_codes_of_stops(how: str, code: int) -> None:
    result = go({"root": how, "how": how, "who": "1", "max_restarts": 1}).check(code)
    assert "Traceback" not in result.stderr
    assert len(lines(result)) == 1  # and nothing was restarted


def check_failure(result: Result, how: str, who: str, root: Path, code: int) -> None:
    """Check how a run has ended; its being over at all is far below the group's timeout of half an hour."""
    result.check(code)
    errors = result.stderr
    assert not left_behind(str(root))
    if how == "error":
        assert errors.count("ValueError: deliberate") == 1, errors
        first = errors.index("failed:\nTraceback (most recent call last):")
        assert who == "both" or errors[:first].endswith(f"rank {who} of 2 "), errors
    elif how == "SIGKILL" and who != "both":
        assert f"rank {who} of 2 is gone" in errors
        assert "ValueError" not in errors
        assert "Connection" not in errors
    elif how == "hang":
        for rank in "01":
            assert f"rank {rank} of 2, " in errors
        assert errors.count("in training_step") >= (2 if who == "both" else 1)
        assert "the run hangs: no progress for 4 s" in errors
        assert (f"behind the others: rank {who}" if who != "both" else "No rank is behind") in errors
    assert (
        read_checkpoint(CheckpointDirectory(root / "version_0" / "checkpoints").resolve("last"))["progress"]["step"]
        == 5
    )


def failing(how: str, who: str, nproc: int | None = None) -> dict[str, Any]:
    root = Path(f"{how}-{who}").absolute()
    return {"root": str(root), "how": how, "who": who, "watchdog_seconds": WATCHDOG_S}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("how", CODES)
def test_failures_end_all_and_leave_a_checkpoint(undisturbed: Path, how: str, who: str) -> None:
    run = failing(how, who)
    root = Path(run["root"])
    check_failure(go(run), how, who, root, CODES[how])
    run_distributed(fit, 2, str(root))
    assert compare_runs(undisturbed, root / "version_0") == []


@pytest.mark.parametrize("how", CODES)
def test_failures_under_torchrun(how: str) -> None:
    run = failing(how, "1")
    result = go(run, nproc=2)
    check_failure(result, how, "1", Path(run["root"]), 1)


@pytest.mark.parametrize("how", ["SIGKILL", "hang"])
def test_max_restarts_goes_on_from_the_last_checkpoint_of_this_run(undisturbed: Path, how: str) -> None:
    # Older runs in the same folder must not be resumed instead of this one.
    fit("r", devices=1, max_steps=2)
    fit("r", devices=1, max_steps=4, seed=9, ckpt_path=None)
    run = {**failing(how, "1"), "root": "r", "ckpt_path": None, "max_restarts": 1}
    result = go(run).check(0)
    assert "starting all processes again (1 of 1)" in result.stderr
    assert sorted(path.name for path in Path("r").glob("version_*")) == ["version_0", "version_1", "version_2"]
    assert compare_runs(undisturbed, Path("r/version_2")) == []


def test_restarts_by_torchrun(undisturbed: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    script = Path("start.py")
    script.write_text(f"import os, sys\nos.execv(sys.executable, [sys.executable, *{command}, *sys.argv[1:]])\n")
    run = {"root": "r", "how": "SIGKILL", "who": "1", "ckpt_path": None}
    run_python(script, str(SCRIPT), *arguments(run)).check(0)
    assert compare_runs(undisturbed, Path("r/version_0")) == []
    # torchrun would restart the process after an exit code other than 0.
    run_python(script, str(SCRIPT), *arguments({"root": "s", "how": "SIGTERM", "who": "1"})).check(0)
    assert compare_runs(undisturbed, Path("s/version_0")) != []
