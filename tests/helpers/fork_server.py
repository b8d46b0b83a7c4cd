"""A process that has imported what every rank of a test needs, and forks: a rank starts in 0.05 instead of 5 seconds.

Two of them serve a session, with different hash seeds, so that ranks differ in the order of sets as real processes do.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PRELOADED = (
    *("pytest", "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "deepspeed"),
    *("trainer.callbacks", "trainer.strategies"),
)


class ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, ended: Path) -> None:
        self.pid = pid
        self._ended = ended

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the process runs."""
        return int(self._ended.read_text()) if self._ended.exists() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end in `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (returncode := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.005)
        return returncode


class ForkServer:
    """The starting side: a child that forks on request."""

    def __init__(self, hash_seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
        # The question of which GPUs there are must not initialize CUDA, which does not survive a fork.
        env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", str(self.folder)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.stop)

    def start(self, code: str, cwd: Path, env: Mapping[str, str], stdout: Path, stderr: Path) -> ForkedProcess:
        """Fork a process that runs `code` there."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        request = {"code": code, "cwd": str(cwd), "env": dict(env), "path": sys.path}
        request |= {"stdout": str(stdout), "stderr": str(stderr)}
        print(json.dumps(request), file=self.server.stdin, flush=True)
        pid = int(self.server.stdout.readline())
        return ForkedProcess(pid, self.folder / str(pid))

    def stop(self) -> None:
        """End the server and remove its folder."""
        with self.server:  # closes the pipes, which ends it
            pass
        shutil.rmtree(self.folder)


_servers: dict[int, ForkServer] = {}


def fork_server(number: int) -> ForkServer:
    """Return server `number` of this session, started at its first use."""
    if number not in _servers:
        _servers[number] = ForkServer(hash_seed=number + 1)
    return _servers[number]


def serve(folder: Path) -> None:
    """Fork for every line of stdin, and write the exit code of each child to a file named by its process id."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what modules print while they are imported is no answer
    for name in PRELOADED:
        if importlib.util.find_spec(name) is not None:  # torch_xla's environment has no deepspeed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each collection in a child goes through all modules, and copies their memory
    signal.signal(signal.SIGCHLD, lambda *_: _write_exit_codes(folder))
    for line in sys.stdin:
        # A child's end is written when its process id has been sent.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            _become(**json.loads(line))
        (folder / str(pid)).unlink(missing_ok=True)
        print(pid, file=answers, flush=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _write_exit_codes(folder: Path) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            partial = folder / f"{pid}.partial"
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(folder / str(pid))


def _become(code: str, cwd: str, env: dict[str, str], path: list[str], stdout: str, stderr: str) -> NoReturn:
    """Run `code` in this forked process as `python -c` would in a new one, and end it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for number, name, flags in ((0, os.devnull, os.O_RDONLY), (1, stdout, os.O_WRONLY), (2, stderr, os.O_WRONLY)):
        opened = os.open(name, flags | (os.O_CREAT | os.O_TRUNC if number else 0))
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.argv, sys.path[:] = open(0, closefd=False), ["-c"], path  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    status = 1
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # As Python ends: os._exit does not wait for threads, nor call what was registered.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
