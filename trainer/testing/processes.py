"""Run scripts in their own processes: start, watch, signal, and kill them at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Never inherited: variables for rank and world size, and those that split its lines of output.
_DROPPED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TRAINER_LAUNCHED", "TRAINER_FAULT", "TRAINER_ATTEMPT", "TRAINER_SOURCE", "PYTHONUNBUFFERED"),
)


TIMEOUT = 600.0
"""Seconds after which a wait gives up by default: it only ends what hangs, on a busy machine too."""


@dataclass(frozen=True)
class Result:
    """Exit code and output of a process."""

    returncode: int
    """Negative: the number of the signal that killed it."""
    stdout: str
    stderr: str

    def check(self, returncode: int = 0) -> Result:
        """Return this result if the process ended with `returncode`.

        Raises:
            AssertionError: it did not; has the full output.
        """
        if self.returncode != returncode:
            raise AssertionError(
                f"ended with {self.returncode}, not {returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
            )
        return self


class Running:
    """A started process. Its output goes to files, which can be read at any time and never block it."""

    def __init__(self, command: list[str], cwd: Path, env: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="output-", dir=cwd))
        with open(self._folder / "stdout", "wb") as out, open(self._folder / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        """The standard output so far."""
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """The standard error so far."""
        return (self._folder / "stderr").read_text(errors="replace")

    def send(self, number: signal.Signals, rank: int | None = None) -> None:
        """Send a signal to the process itself, or to one rank of the processes that it has started."""
        os.kill(self.pid if rank is None else rank_of(self.pid, rank), number)

    def wait_for(self, text: str, count: int = 1, timeout: float = TIMEOUT) -> None:
        """Wait until `text` appears `count` times in stdout.

        Raises:
            AssertionError: the process ended before, or the timeout passed.
        """
        wait_until(lambda: self.stdout.count(text) >= count or self.process.poll() is not None, timeout, str(self))
        if self.stdout.count(text) < count:
            raise AssertionError(f"ended without printing {text!r} {count} times\n{self}")

    def wait(self, timeout: float = TIMEOUT) -> Result:
        """Wait until the process has ended.

        Raises:
            AssertionError: the timeout passed; the process and its descendants are killed.
        """
        try:
            returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s\n{self}") from None
        return Result(returncode, self.stdout, self.stderr)

    def kill(self) -> None:
        """Kill the process and its descendants."""
        for pid in [self.pid, *descendants(self.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def __str__(self) -> str:
        return f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def start_python(
    source_or_path: str | Path,
    *args: str,
    nproc: int | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Running:
    """Start a script; see `run_python`."""
    cwd = Path.cwd() if cwd is None else cwd
    if isinstance(source_or_path, str) and "\n" in source_or_path:
        path = Path(tempfile.mkdtemp(prefix="script-", dir=cwd)) / "script.py"
        path.write_text(source_or_path)
    else:
        path = Path(source_or_path)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)] if nproc else []
    return Running([sys.executable, *torchrun, str(path), *args], cwd, clean_environment(env))


def run_python(
    source_or_path: str | Path,
    *args: str,
    nproc: int | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Result:
    """Run a script in a separate process, and wait for its end.

    Args:
        source_or_path: the source if it has several lines, else the path of the script.
        args: its command line.
        nproc: start this many processes of it with torchrun.
        cwd: working directory; default: the current one.
        env: variables added to the environment, such as `fault(...)`.
        timeout: seconds after which it is killed.

    Raises:
        AssertionError: it did not end in time.
    """
    return start_python(source_or_path, *args, nproc=nproc, cwd=cwd, env=env).wait(timeout)


@dataclass(frozen=True)
class Storm:
    """Result of `kill_at_random`."""

    kills: int
    starts: int
    result: Result
    """Result of the last start, which was not killed."""


def kill_at_random(
    script: str | Path,
    *args: str,
    kills: int,
    longest: float,
    ready: str,
    seed: int = 0,
    early: float = 0.1,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT,
) -> Storm:
    """Start a script repeatedly, and kill it each time with SIGKILL at a random time; then let it end.

    Args:
        script: its path. It has to resume where it was, as with `fit(..., ckpt_path="last")`.
        args: its command line.
        kills: number of kills; fewer if the script ends before.
        longest: most kills come within this many seconds after the script is ready.
        ready: text that the script prints when it has begun to work.
        seed: seed of the random times.
        early: fraction of the kills that come before the script is ready.
        cwd: working directory.
        env: variables added to the environment.
        timeout: seconds for one start.

    Raises:
        AssertionError: a start ended with an error; the message has its output.
    """
    rng = random.Random(seed)
    done = starts = 0
    until_ready = 2.0
    while True:
        starts += 1
        running = start_python(script, *args, cwd=cwd, env=env)
        began = time.monotonic()
        if done < kills and rng.random() < early:
            _sleep_or_end(running, rng.uniform(0, until_ready))
        elif done < kills:
            wait_until(lambda run=running: ready in run.stdout or run.process.poll() is not None, timeout, str(running))  # type: ignore[misc]
            until_ready = time.monotonic() - began
            _sleep_or_end(running, rng.uniform(0, longest))
        if done < kills and running.process.poll() is None:
            running.process.kill()
        result = running.wait(timeout)
        if result.returncode != -signal.SIGKILL:
            return Storm(done, starts, result.check())
        done += 1


def _sleep_or_end(running: Running, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        running.process.wait(seconds)


def wait_until(condition: Callable[[], bool], timeout: float = TIMEOUT, what: object = "") -> None:
    """Poll until `condition` is true; the timeout only ends what would hang.

    Raises:
        AssertionError: it is not true in time; has `what`.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not true after {timeout} s {what}")
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Return the descendants of process `pid`, parents before children (Linux)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it may have ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def rank_of(pid: int, rank: int) -> int:
    """Return the process of a rank among `pid` and its descendants (Linux).

    Raises:
        AssertionError: the process does not exist (yet).
    """
    wanted = f"RANK={rank}".encode()
    for candidate in [pid, *descendants(pid)]:
        with suppress(OSError):  # it may have ended
            if wanted in Path(f"/proc/{candidate}/environ").read_bytes().split(b"\0"):
                return candidate
    raise AssertionError(f"process {pid} has started no process of rank {rank}")


def alive(pid: int) -> bool:
    """Return True if the process runs (not if it is a zombie)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def clean_environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment with `added`, with one thread, and without the variables of a launcher."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith(("TORCHELASTIC_", "PYTEST_"))
    }
    return {**env, "OMP_NUM_THREADS": "1", **(added or {})}
