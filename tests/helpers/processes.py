"""Start real processes for tests: scripts, torchrun, and one function on several ranks."""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fork_server import fork_server
from trainer.testing import processes
from trainer.testing.processes import TIMEOUT, Result, Running, alive, clean_environment, descendants, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
DEVICE = os.environ.get("TESTS_DEVICE", "cpu")
"""Kind of device that the suites over strategies, and the toy, run on: "cpu" or "cuda"."""
__all__ = [
    "DEVICE",
    "ROOT",
    "Result",
    "Running",
    "alive",
    "descendants",
    "fork_python",
    "fork_ranks",
    "once_per_module",
    "processes_share_a_gpu",
    "run_distributed",
    "run_python",
    "start_python",
    "wait_until",
]


def start_python(source_or_path: str | Path, *args: str, env: Mapping[str, str] | None = None, **more: Any) -> Running:
    """Call `trainer.testing.start_python` with this repository on the script's path."""
    return processes.start_python(source_or_path, *args, env={**_path(), **(env or {})}, **more)


def run_python(
    source_or_path: str | Path, *args: str, env: Mapping[str, str] | None = None, timeout: float = TIMEOUT, **more: Any
) -> Result:
    """Call `trainer.testing.run_python` with this repository on the script's path."""
    return start_python(source_or_path, *args, env=env, **more).wait(timeout)


def fork_python(
    *words: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None, number: int = 0
) -> Running:
    """Start `python *words` (a script or its source, or `-m` and a module) in a process that has imported torch.

    It saves three seconds of importing; for tests that are not about the start of Python, nor about signals. Processes
    that run beside each other take different `number`s, so that they differ in the order of sets.
    """
    cwd = Path.cwd() if cwd is None else cwd
    return Forked(number, _call(words, cwd), cwd, clean_environment({**_path(), **(env or {})}))


def fork_ranks(*words: str | Path, world_size: int = 2, env: Mapping[str, str] | None = None) -> Ranks:
    """Start `python *words` as `fork_python` does, on several processes with torchrun's variables set."""
    return Ranks(*_start_ranks(_call(words, Path.cwd()), world_size, Path.cwd(), env or {}, TIMEOUT))


def run_distributed(
    function: Callable[..., Any], world_size: int = 2, *args: Any, timeout: float = TIMEOUT
) -> list[Any]:
    """Call a top-level function of a test module on `world_size` forked processes with torchrun's variables set.

    The function joins the process group itself, if it wants one. Arguments and results are pickled.

    Returns:
        What each rank returned. The first failing rank's output fails the test.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=Path.cwd()))
    (folder / "call").write_bytes(pickle.dumps((function, args)))
    code = f"from tests.helpers.processes import _one_rank; _one_rank({str(folder)!r})"
    store, running = _start_ranks(code, world_size, Path.cwd(), {}, timeout)
    try:
        _wait_for_all(running, timeout)
    finally:
        for one in running:
            one.kill()
        del store
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


def processes_share_a_gpu(processes: int) -> bool:
    """Whether tests that run on GPUs have fewer of them than processes."""
    import torch

    return DEVICE == "cuda" and torch.cuda.device_count() < processes


def once_per_module(run: Callable[..., Any], *names: str) -> Any:
    """Return a fixture with the return value of `run`, which is called once for a test module, in an empty folder.

    With `names`, `run` is given the parameters of these names, of those cases of the module that will run.
    """

    @pytest.fixture(scope="module")
    def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
        from tests.tiers import selected  # a plugin, which pytest has to import first

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("runs"))
            return run(selected(request, *names)) if names else run()

    return result


class Forked(Running):
    """A process that has imported torch when it starts; see tests/helpers/fork_server.py."""

    def __init__(self, number: int, code: str, cwd: Path, env: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="output-", dir=cwd))
        output = {"stdout": self._folder / "stdout", "stderr": self._folder / "stderr"}
        for path in output.values():
            path.touch()
        self.process = fork_server(number % 2).start(code, cwd, env, **output)  # type: ignore[assignment]
        self.pid = self.process.pid


class Ranks:
    """Forked processes of one training, with the methods of `Running` for all of them together."""

    def __init__(self, store: Any, running: list[Running]) -> None:
        self._store, self.running = store, running

    def wait(self, timeout: float = TIMEOUT) -> Result:
        """Wait until all have ended; the exit code is that of the first rank that failed."""
        results = [one.wait(timeout) for one in self.running]
        failed = next((result.returncode for result in results if result.returncode), 0)
        return Result(failed, "".join(r.stdout for r in results), "".join(r.stderr for r in results))

    def kill(self) -> None:
        for one in self.running:
            one.kill()


def _start_ranks(
    code: str, world_size: int, cwd: Path, env: Mapping[str, str], timeout: float
) -> tuple[Any, list[Running]]:
    """Return the store, which lives as long as this process holds it, and the processes."""
    from torch.distributed import TCPStore

    # As under torchrun, the starting process serves the store, on a port that no other process can take.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    running: list[Running] = []
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
        if processes_share_a_gpu(world_size):
            # NCCL refuses two processes of a machine on one GPU: each is a machine of its own.
            place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
            place |= {"NCCL_HOSTID": rank, "NCCL_SOCKET_IFNAME": "lo"}
        here = clean_environment({**_path(), **{name: str(value) for name, value in place.items()}, **env})
        running.append(Forked(rank, code, cwd, here))
    return store, running


def _wait_for_all(running: list[Running], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(one.process.poll() is None for one in running):
        if any(one.process.poll() for one in running):
            raise AssertionError(_failures(running))
        if time.monotonic() > deadline:
            raise AssertionError(f"still running after {timeout} s\n" + "\n".join(map(str, running)))
        time.sleep(0.02)
    if any(one.process.poll() for one in running):
        raise AssertionError(_failures(running))


def _failures(running: list[Running]) -> str:
    """Return the output of each process that failed, since the first to end need not be the cause."""
    deadline = time.monotonic() + 5
    while any(one.process.poll() is None for one in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = [(rank, one) for rank, one in enumerate(running) if one.process.poll()]
    return "\n".join(f"rank {rank} of {len(running)} ended with {one.process.poll()}\n{one}" for rank, one in ended)


def _call(words: Sequence[str | Path], cwd: Path) -> str:
    """Return the code that runs these words; a source is written into a file first."""
    program, *arguments = map(str, words)
    if "\n" in program:
        path = Path(tempfile.mkdtemp(prefix="script-", dir=cwd)) / "script.py"
        path.write_text(program)
        program = str(path)
    return f"from tests.helpers.processes import _run_as_main; _run_as_main({[program, *arguments]!r})"


def _one_rank(folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    function, args = pickle.loads((Path(folder) / "call").read_bytes())
    result = function(*args)
    (Path(folder) / os.environ["RANK"]).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit, because gloo's threads sometimes abort in Python's own exit.
    os._exit(0)


def _run_as_main(words: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.orig_argv = [sys.executable, *words]
    root = str(ROOT)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*given, *(folder for folder in sys.path if folder != root)]
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def _path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
