"""Kill, stop, starve and confuse trainings at random, start them again, and compare the final bits.

python -m benchmarks chaos --minutes 60
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._chaos_events import DURING, FROM_THE_START, Event
from benchmarks._chaos_processes import Processes
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.manifest import read_manifest, verify_checkpoint
from trainer.precision import PRECISIONS
from trainer.strategies import STRATEGIES
from trainer.testing import compare_runs, small_disk, start_python
from trainer.testing.compare import IGNORED

ROOT = Path(__file__).resolve().parent.parent
TRAINING = ("-m", "benchmarks._chaos_training")
EPOCHS = 60
"""Epochs of each training, which take some seconds."""
LIMIT_S = 900.0
"""Seconds for one start of a training, after which it counts as hung."""
DISK_BYTES = 8 * 2**20


@dataclass
class Start:
    """One start of a training, and what happens to it."""

    options: dict[str, Any]
    before: Event | None = None
    during: list[Event] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        return [*([self.before] if self.before else []), *self.during]

    def codes(self) -> set[int]:
        """Return the exit codes that these events may cause, as a shell shows them: 143 for -15."""
        return {0}.union(*(event.kind.codes(event) for event in self.events))

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"[{options}] " + ("; ".join(map(str, self.events)) or "undisturbed")


@dataclass
class Trial:
    """A training of one strategy, determined by its seed, that is started until it ends."""

    seed: int
    strategy: str
    processes: int
    small_disk: bool
    starts: list[Start]
    remote: bool
    """Checkpoints go to an object store that fails now and then."""

    def __str__(self) -> str:
        places = ["small disk"] * self.small_disk + ["failing store"] * self.remote
        return f"{self.strategy} x{self.processes}{''.join(f', {place}' for place in places)}"


def drawn(seed: int, strategies: Sequence[str]) -> Trial:
    """Return the trial of a seed: its strategy, its options, and the events of each start, in order."""
    rng = random.Random(seed)
    strategy = strategies[seed % len(strategies)]
    processes = 2 if STRATEGIES[strategy].multi_process else 1
    place = rng.choice(["disk", "disk", "disk", "small disk", "store"])
    starts = []
    for _ in range(rng.randint(3, 5)):
        options: dict[str, Any] = {
            "max_restarts": rng.choice([0, 0, 1, 2]),
            "workers": rng.choice([0, 2]),
            "async_save": rng.choice([False, True]),
            "on_write_error": rng.choice(["raise", "warn"]),
            "every_n_train_steps": rng.choice([1, 1, 2, 5]),
            "watchdog_seconds": 8.0,
        }
        if place == "store":
            options["store"] = {"rate": rng.choice([0.0, 0.002, 0.02]), "delay": 0.002, "seed": rng.randint(0, 999)}
        before = rng.choice(FROM_THE_START).draw(rng, processes) if rng.random() < 0.4 else None
        possible = [kind for kind in DURING if kind.possible(options, processes, place)]
        during = [rng.choice(possible).draw(rng, processes) for _ in range(rng.choice([1, 1, 2]))]
        starts.append(Start(options, before, during))
    return Trial(seed, strategy, processes, place == "small disk", starts, place == "store")


class Runner:
    """Runs trials below a folder, and prints every event before it happens."""

    def __init__(self, folder: Path, say: Callable[[str], None], keep: bool = False) -> None:
        self.folder, self.say, self.keep = folder, say, keep
        self.undisturbed: dict[tuple[str, int], Path] = {}
        self.events = self.runs = 0

    def run(self, trial: Trial) -> list[str]:
        """Run a trial to its end, and return its problems."""
        expected = self._expected(trial)
        self.say(f"trial {trial.seed}: {trial}")
        folder = self.folder / f"trial-{trial.seed}"
        with ExitStack() as mounted:
            if trial.small_disk:
                try:
                    mounted.enter_context(small_disk(folder, DISK_BYTES))
                except PermissionError:
                    self.say("  (no small disk: this user may not mount one)")
            wrong = self._start_until_it_ends(trial, folder)
            wrong = wrong or self._differences(folder, expected)
            if wrong and self.keep:
                shutil.copytree(folder, self.folder / f"failed-{trial.seed}", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        return wrong

    def _start_until_it_ends(self, trial: Trial, folder: Path) -> list[str]:
        calm = Start({"store": {"rate": 0.0, "delay": 0.0, "seed": 0}} if trial.remote else {})
        for start in [*trial.starts, calm]:
            self.say(f"  {start}")
            ended, wrong = self._start(trial, start, folder)
            if wrong or ended:
                return wrong
        return ["the training did not end, though it was left in peace"]

    @staticmethod
    def _differences(folder: Path, expected: Path) -> list[str]:
        if (folder / "store").is_dir():
            (folder / "store").rename(last_run(folder) / "checkpoints")
        return problems(folder, expected)

    def _expected(self, trial: Trial) -> Path:
        """Return the run directory of the undisturbed training."""
        key = trial.strategy, trial.processes
        if key not in self.undisturbed:
            folder = self.folder / f"undisturbed-{trial.strategy}"
            processes = self._processes(trial, Start({}), folder)
            processes.running.wait(LIMIT_S).check(0)
            self.undisturbed[key] = last_run(folder)
        return self.undisturbed[key]

    def _processes(self, trial: Trial, start: Start, folder: Path) -> Processes:
        folder.mkdir(parents=True, exist_ok=True)
        options = {"strategy": trial.strategy, "devices": trial.processes, "epochs": EPOCHS, **start.options}
        options |= {} if start.before is None else start.before.options()
        output = self.folder / "output"
        temporary = output / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        env = {**python_path(), "TMPDIR": str(temporary)}
        env |= {} if start.before is None else start.before.environment()
        mark = {"CHAOS": f"{trial.seed}-{self.runs}-{os.getpid()}"}
        running = start_python(*TRAINING, str(folder), *command_line(options), cwd=output, env={**env, **mark})
        launched = trial.processes > 1 or options.get("max_restarts", 0) > 0
        return Processes(running, f"CHAOS={mark['CHAOS']}", launched, trial.processes)

    def _start(self, trial: Trial, start: Start, folder: Path) -> tuple[bool, list[str]]:
        """Start the training once; return whether it has ended, and its problems."""
        self.runs += 1
        shared_memory = Processes.shared_memory()
        processes = self._processes(trial, start, folder)
        problems: list[str] = []
        try:
            for event in start.during:
                if processes.wait_for_ready(event.early):
                    time.sleep(event.delay)
                    self.events += 1
                    reachable = processes.reachable()
                    problems += [f"other machines can reach {reachable}"] if reachable else []
                    event.kind.happen(event, processes, folder)
            self.events += start.before is not None
            result = processes.running.wait(LIMIT_S)
        except AssertionError as error:
            return False, [*problems, f"hung: {str(error)[-6000:]}"]
        finally:
            for event in start.during:
                event.kind.undo(event, processes, folder)
            left = processes.left_behind()
        tail = f"\n{result.stdout[-1500:]}\n{result.stderr[-4000:]}"
        if left:
            problems.append(f"processes left behind: {left}{tail}")
        new = Processes.left_in_shared_memory(shared_memory)
        problems += [f"left in /dev/shm: {new}"] if new else []
        code = result.returncode if result.returncode >= 0 else 128 - result.returncode
        if code not in start.codes():
            problems.append(f"exit code {code}, expected one of {sorted(start.codes())}{tail}")
        if "Segmentation fault" in result.stderr or code in (134, 139):
            problems.append(f"a process crashed{tail}")
        return result.returncode == 0, problems


def command_line(options: dict[str, Any]) -> list[str]:
    """Return the options of the training as its arguments."""
    arguments = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif value is not False:
            arguments += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def python_path() -> dict[str, str]:
    """Return an environment that lets a process import this repository."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def problems(folder: Path, undisturbed: Path) -> list[str]:
    """Return differences from the undisturbed training, damaged checkpoints, and leftovers in the folder."""
    run = last_run(folder)
    directory = CheckpointDirectory(run / "checkpoints")
    found = compare_runs(undisturbed, run, ignore=[*IGNORED, "info.follows"])
    found += [problem for path in directory.list() for problem in verify_checkpoint(path)]
    found += [f"left behind: {path}" for path in leftovers(folder)]
    # A ModelCheckpoint with another every_n_train_steps is a different one, and keeps its predecessor's files.
    owners = [read_manifest(path).info.get("owner") for path in directory.list()]
    expected = len(CheckpointDirectory(undisturbed / "checkpoints").list())
    kept = owners.count(owners[-1]) if owners else 0
    # Fewer if no saved step was validated, as with every_n_train_steps=5 to the end: then there is not a best one.
    if not 1 <= kept <= expected:
        found.append(f"{kept} checkpoints are kept instead of {expected}: {[path.name for path in directory.list()]}")
    return found


def leftovers(folder: Path) -> list[Path]:
    """Return temporary files and folders below a folder."""
    patterns = (".tmp-*", ".old-*", "*.part", "*.put-*")
    return sorted(path for pattern in patterns for path in folder.rglob(pattern))


def last_run(folder: Path) -> Path:
    """Return the newest run directory in a folder."""
    return max(folder.glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))


def runnable(names: Sequence[str]) -> list[str]:
    """Return the strategies that run here; say why the others do not."""
    found = []
    for name in names:
        kind = STRATEGIES[name]
        if problems := kind().problems(PRECISIONS["32-true"], "cpu", 2 if kind.multi_process else 1):
            print(f"{name} is left out: {problems[0]}")
        else:
            found.append(name)
    return found


def chaos(
    minutes: float,
    seed: int = 0,
    strategies: Sequence[str] = tuple(STRATEGIES),
    folder: Path | None = None,
    trials: int | None = None,
) -> list[str]:
    """Run trials until the time is up, at least one, or `trials` of them; return all problems."""
    names = runnable(strategies)
    base = folder or Path(tempfile.mkdtemp(prefix="chaos-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    runner = Runner(base, lambda text: print(text, flush=True), keep=folder is not None)
    began, done, wrong = time.monotonic(), 0, []
    try:
        while done < trials if trials is not None else not done or time.monotonic() - began < 60 * minutes:
            trial = drawn(seed + done, names)
            problems = runner.run(trial)
            done += 1
            again = f"python -m benchmarks chaos --trials 1 --seed {trial.seed}"
            if len(strategies) != len(STRATEGIES):
                again += f" --strategy {' '.join(strategies)}"
            for problem in problems:
                print(f"  WRONG: {problem}\n  again: {again}", flush=True)
            wrong += [f"{again}: {problem}" for problem in problems]
    finally:
        if folder is None:
            shutil.rmtree(base, ignore_errors=True)
    took = time.monotonic() - began
    print(
        f"{runner.events} events in {runner.runs} starts of {done} trainings, {took / 60:.0f} minutes, seeds {seed} to "
        f"{seed + done - 1}: {len(wrong)} problems"
    )
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run trials, and return 0 if every bit is equal and nothing is left behind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no further trial after this time")
    parser.add_argument("--trials", type=int, help="run so many trials instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first trial; the next ones count up")
    parser.add_argument("--strategy", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--folder", type=Path, help="where trials that fail are kept (default: nowhere)")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve() if options.folder else None
    return 1 if chaos(options.minutes, options.seed, options.strategy, folder, options.trials) else 0
