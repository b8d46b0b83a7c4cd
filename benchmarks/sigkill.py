"""Kill a training with SIGKILL at random times, restart it by the same command, and compare the final bits.

python -m benchmarks sigkill --kills 200
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.format import verify_checkpoint
from trainer.testing import compare_runs, kill_at_random, run_python

SCRIPT = Path(__file__).resolve().parent / "_sigkill_training.py"
ROOT = SCRIPT.parent.parent


@dataclass
class Outcome:
    """Result of one training that was killed repeatedly."""

    kills: int
    starts: int
    seconds: float
    problems: list[str] = field(default_factory=list)
    """Differences from the uninterrupted training, damaged checkpoints, leftover files."""
    passed_over: int = 0
    """Warnings about a broken checkpoint, in the last start."""


def python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def undisturbed(folder: Path, *options: str) -> Path:
    """Train without interruption, and return the run directory."""
    run_python(SCRIPT, str(folder), *options, cwd=folder.parent, env=python_path()).check()
    return last_run(folder)


def disturbed(folder: Path, uninterrupted: Path, kills: int, seed: int, longest: float, *options: str) -> Outcome:
    """Kill a training at most `kills` times, let it end, and compare it with `uninterrupted`."""
    began = time.monotonic()
    storm = kill_at_random(
        SCRIPT,
        *(str(folder), *options),
        kills=kills,
        longest=longest,
        ready="ready",
        seed=seed,
        cwd=folder.parent,
        env=python_path(),
    )
    outcome = Outcome(storm.kills, storm.starts, time.monotonic() - began)
    outcome.problems = problems(folder, uninterrupted)
    outcome.passed_over = storm.result.stderr.count("Skipping the damaged checkpoint")
    return outcome


def problems(folder: Path, uninterrupted: Path) -> list[str]:
    """Return differences from the uninterrupted training, and problems in the folder of checkpoints."""
    run = last_run(folder)
    directory = CheckpointDirectory(run / "checkpoints")
    found = compare_runs(uninterrupted, run)
    found += [problem for path in directory.list() for problem in verify_checkpoint(path)]
    found += [f"left behind: {path}" for path in directory.folder.iterdir() if path.name.startswith(".")]
    kept, expected = len(directory.list()), len(CheckpointDirectory(uninterrupted / "checkpoints").list())
    if kept != expected:
        found.append(f"{kept} checkpoints are kept instead of {expected}: {[path.name for path in directory.list()]}")
    return found


def last_run(folder: Path) -> Path:
    """Return the newest run directory in a folder."""
    return max(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trial, and return 0 if every bit is equal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sigkill", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kills-per-run", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=40, help="five steps each")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds from ready to the latest kill")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="of the loader; by turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the runs are written and kept (default: a temporary folder)")
    options = parser.parse_args(arguments)
    temporary = None if options.folder else tempfile.mkdtemp(prefix="sigkill-")
    folder = Path(options.folder or str(temporary)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _run(options, folder)
    finally:
        if temporary:
            shutil.rmtree(temporary)


def _run(options: argparse.Namespace, folder: Path) -> int:
    uninterrupted = undisturbed(folder / "uninterrupted", "--epochs", str(options.epochs))
    done = run = bad = 0
    began = time.monotonic()
    while done < options.kills:
        workers = str(options.workers[run % len(options.workers)])  # changes no bit
        kills = min(options.kills_per_run, options.kills - done)
        seed = options.seed + run
        arguments = ("--epochs", str(options.epochs), "--workers", workers)
        outcome = disturbed(folder / f"run-{run}", uninterrupted, kills, seed, options.longest, *arguments)
        done, run, bad = done + outcome.kills, run + 1, bad + bool(outcome.problems)
        verdict = "the same" if not outcome.problems else "; ".join(outcome.problems[:5])
        print(
            f"run {run}: killed {outcome.kills} times in {outcome.starts} starts, {outcome.seconds:.0f} s, "
            f"{workers} workers, checkpoints passed over: {outcome.passed_over}; {verdict}",
            flush=True,
        )
    seconds = time.monotonic() - began
    print(f"{done} kills in {run} runs, {seconds:.0f} s: {run - bad} of {run} ended like the uninterrupted one")
    return 1 if bad else 0
