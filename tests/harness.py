"""Real processes for tests: scripts, torchrun, and one function on several ranks."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What a process of a run would read as its place in it, and what tears its lines apart: never inherited.
_DROPPED = (
    "PYTHONUNBUFFERED",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TRAINER_LAUNCHED",
)


@dataclass(frozen=True)
class Result:
    """How a process ended."""

    returncode: int
    stdout: str
    stderr: str

    def check(self, returncode: int = 0) -> Result:
        """This result, if it ended with `returncode`; fails the test with its whole output otherwise."""
        if self.returncode != returncode:
            raise AssertionError(
                f"ended with {self.returncode}, not {returncode}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
            )
        return self


class Running:
    """A started process. Its output goes to files, so that it can be read at any time and never blocks."""

    def __init__(self, command: list[str], cwd: Path, env: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="output-", dir=cwd))
        with open(self._folder / "stdout", "wb") as out, open(self._folder / "stderr", "wb") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for(self, text: str, count: int = 1, timeout: float = 60) -> None:
        """Until `text` stands `count` times in stdout."""
        wait_until(lambda: self.stdout.count(text) >= count or self.process.poll() is not None, timeout, str(self))
        assert self.stdout.count(text) >= count, f"ended without printing {text!r} {count} times\n{self}"

    def wait(self, timeout: float = 120) -> Result:
        """Until it has ended. Kills it, and all that it started, when the time is over."""
        try:
            returncode = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s\n{self}") from None
        return Result(returncode, self.stdout, self.stderr)

    def kill(self) -> None:
        """End it and its descendants."""
        for pid in [self.pid, *descendants(self.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
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
    return Running([sys.executable, *torchrun, str(path), *args], cwd, _environment(env))


def run_python(
    source_or_path: str | Path,
    *args: str,
    nproc: int | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Result:
    """Run a script in a process of its own, to its end.

    Args:
        source_or_path: the script's text if it has several lines, else its path.
        args: its command line.
        nproc: start so many processes of it with torchrun.
        cwd: where it runs; the test's own directory if not given.
        env: variables added to the environment.
        timeout: seconds, after which it is killed and the test fails.
    """
    return start_python(source_or_path, *args, nproc=nproc, cwd=cwd, env=env).wait(timeout)


def run_distributed(function: Callable[..., Any], world_size: int = 2, *args: Any, timeout: float = 120) -> list[Any]:
    """Call a top-level function of a test module on `world_size` processes with torchrun's variables set.

    The function joins the process group itself, if it wants one. Arguments and results are pickled.

    Returns:
        What each rank returned. The first failing rank's output fails the test.
    """
    from torch.distributed import TCPStore

    # As under torchrun, the starting process holds the store, on a port that nobody else can take.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=Path.cwd()))
    (folder / "call").write_bytes(pickle.dumps((function, args)))
    code = f"from tests.harness import _one_rank; _one_rank({str(folder)!r})"
    running = []
    for rank in range(world_size):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        env = _environment({name: str(value) for name, value in place.items()})
        # The test's module is imported by name, from where pytest has imported it.
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], *filter(None, sys.path)])
        running.append(Running([sys.executable, "-c", code], Path.cwd(), env))
    try:
        _wait_for_all(running, timeout)
    finally:
        for one in running:
            one.kill()
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


def _wait_for_all(running: list[Running], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(one.process.poll() is None for one in running):
        for rank, one in enumerate(running):
            if one.process.poll():
                raise AssertionError(f"rank {rank} of {len(running)} ended with {one.process.poll()}\n{one}")
        if time.monotonic() > deadline:
            raise AssertionError(f"still running after {timeout} s\n" + "\n".join(map(str, running)))
        time.sleep(0.02)
    for rank, one in enumerate(running):
        assert one.process.poll() == 0, f"rank {rank} of {len(running)} ended with {one.process.poll()}\n{one}"


def _one_rank(folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    function, args = pickle.loads((Path(folder) / "call").read_bytes())
    result = function(*args)
    (Path(folder) / os.environ["RANK"]).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through Python's own exit: gloo's threads abort there now and then, which is not what such a test is about.
    os._exit(0)


def wait_until(condition: Callable[[], bool], timeout: float = 60, what: object = "") -> None:
    """Poll until it is true; the time only ends a test that would hang."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout} s {what}"
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """The processes that `pid` has started, and those that they have started (Linux)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(pid: int) -> bool:
    """Whether the process runs (one that has ended and is only not yet collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _environment(added: Mapping[str, str] | None) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith(("TORCHELASTIC_", "PYTEST_"))
    }
    path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), **(added or {})}
