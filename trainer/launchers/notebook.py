"""Run a function on several processes from a notebook or a REPL: `trainer.launch(fn, devices=2)`."""

from __future__ import annotations

import importlib
import io
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from trainer.distributed.environment import Environment
from trainer.distributed.store import LOOPBACK, loopback_store
from trainer.errors import ConfigError, TrainerError
from trainer.fault_tolerance.failure import lost_connection
from trainer.fault_tolerance.signals import in_main_thread
from trainer.launchers.launcher import die_with_parent, open_closed_streams
from trainer.launchers.restarts import LAUNCHED

T = TypeVar("T")

_SHUTDOWN_TIMEOUT_S = 8
"""Seconds that the other processes have to end after one has failed."""


class WorkerError(TrainerError):
    """A function failed on a process that `launch` started; has its rank and traceback."""


def launch(function: Callable[..., T], *args: Any, devices: int | str = "auto", **kwargs: Any) -> list[T]:
    """Call `function(*args, **kwargs)` on several processes of this machine, and wait.

    Each process has torchrun's variables, so a `Trainer` in the function joins the others. The processes are forked, on
    Linux only: the function may be defined in a notebook cell and use the objects of the notebook, but CUDA must not
    have been used before.

    Args:
        function: called once on each process.
        devices: number of processes; "auto": one for each GPU, or a single one without GPUs.

    Returns:
        The results of the processes, by rank, with tensors on the CPU.

    Raises:
        WorkerError: the function failed; has the traceback of the process that failed first.
        ConfigError: the processes cannot be started here.
        KeyboardInterrupt: Ctrl-C; the processes have received it too, and have ended, a training after its step with a
            checkpoint. The second Ctrl-C kills them.
    """
    number = _number(devices)
    _require_fork()
    # Hosted by this process, on a port that no other program can take.
    store, context = loopback_store(), multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(number)]
    ends = [end for _, end in pipes]
    call = partial(function, *args, **kwargs)
    processes = [
        context.Process(target=_work, args=(rank, number, store.port, os.getpid(), call, ends))
        for rank in range(number)
    ]
    open_closed_streams()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with _interrupts_held_back():
            for process in processes:
                process.start()
        for end in ends:
            end.close()
        results = _wait(processes, [end for end, _ in pipes])
    except BaseException as error:
        _end(processes, math.inf if isinstance(error, KeyboardInterrupt) else _SHUTDOWN_TIMEOUT_S)
        raise
    finally:
        for end, _ in pipes:
            end.close()
    return [_unpacked(results[rank]) for rank in range(number)]


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block: a KeyboardInterrupt within Python's own work around a fork is lost.

    A mask of this thread would not do: the signal may come to a thread of torch, and Python's handler runs here then.
    """
    if not in_main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        os.kill(os.getpid(), signal.SIGINT)


def _number(devices: int | str) -> int:
    if devices == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"launch(devices={devices!r}): give a number of processes from 1, or 'auto'.")
    return devices


def _require_fork() -> None:
    """Raise ConfigError if this process is one of several already, or if a forked process could not work."""
    import torch

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "launch() was called in a process that is one of several already "
            f"(RANK={os.environ['RANK']} WORLD_SIZE={os.environ['WORLD_SIZE']}): call the function itself."
        )
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"launch() forks processes, which is not safe on {sys.platform}: put the code into a script.")
    if not torch.cuda.device_count():  # asks NVML, which does not initialize CUDA
        return
    # Only a fork can tell: torch.cuda.is_available() breaks forks, too, without a sign in this process.
    with _interrupts_held_back():
        child = os.fork()
        if child == 0:
            os._exit(int(torch.cuda._is_in_bad_fork()))
        _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status):
        raise ConfigError(
            "launch() cannot start processes here: CUDA has been used in this process, by a tensor, a model, a Trainer "
            "or torch.cuda.is_available(), and cannot be used in a fork. Begin in a fresh kernel, and use CUDA only in "
            "the function, or put the code into a script with Trainer(devices=...)."
        )


def _packed(result: Any) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _unpacked(result: bytes) -> Any:
    """Return the result that a process started here has sent through its pipe."""
    import torch

    return torch.load(io.BytesIO(result), map_location="cpu", weights_only=False)


def _work(rank: int, number: int, port: int, parent: int, call: Callable[[], Any], pipes: list[Connection]) -> None:
    """Run the function in a started process."""
    for other, pipe in enumerate(pipes):
        if other != rank:
            pipe.close()  # so that the pipe of a process that dies ends
    import torch

    Environment(rank, rank, number, number, 0, 1, "trainer.launch", LOOPBACK, port).export()
    os.environ.update({"TORCHELASTIC_USE_AGENT_STORE": "True", LAUNCHED: str(parent)})
    die_with_parent()
    os.setpgid(0, 0)  # a Ctrl-C for the group, and the one that is passed on, would be two, which end a run at once
    # The children must not inherit the notebook's own handlers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The threads of OpenMP do not survive a fork; a process that uses them would hang.
    torch.set_num_threads(1)
    _forget_process_group()
    code = 1
    try:
        pipes[rank].send(_packed(call()))
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 0:
            pipes[rank].send(_packed(None))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        pipes[rank].send(_Failure(lost_connection(error), time.monotonic(), text))
    finally:
        _destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
    if code:
        sys.exit(code)


_inherited: list[Any] = []
"""Process groups of the notebook, in a forked process: their threads have not survived, so that a destructor hangs."""


def _forget_process_group() -> None:
    """Forget the process group that a fit in the notebook has left; for a forked process."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    _inherited.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    if "deepspeed" in sys.modules:
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
        importlib.reload(sys.modules["deepspeed.utils.groups"])


def _destroy_process_group() -> None:
    """Destroy the process group explicitly: an exit while gloo's threads run sometimes aborts."""
    import gc

    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()
        with suppress(Exception):
            dist.destroy_process_group()


class _Failure(NamedTuple):
    """An error of a process. The least of several is the cause of the others."""

    lost_connection: bool
    when: float
    text: str


def _wait(processes: Sequence[BaseProcess], pipes: list[Connection]) -> dict[int, bytes]:
    """Wait until all processes have ended, and return their results.

    Raises:
        WorkerError: a process failed; the others were given eight seconds to end.
    """
    answers: dict[int, Any] = {}
    deadline = math.inf
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        _receive(pipes, answers)
        if deadline == math.inf and any(process.exitcode for process in processes):
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        time.sleep(0.02)
    failed = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    _receive(pipes, answers)
    if not failed:
        return answers
    number = len(processes)
    failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
    killed = next((rank for rank, code in failed.items() if code < 0), None)
    if killed is not None and all(failure.lost_connection for failure in failures.values()):
        raise WorkerError(f"rank {killed} of {number} was ended by {signal.Signals(-failed[killed]).name}.")
    if failures:
        rank = min(failures, key=lambda r: failures[r])
        raise WorkerError(f"rank {rank} of {number} failed:\n\n{failures[rank].text}")
    rank, code = next(iter(failed.items()))
    raise WorkerError(f"rank {rank} of {number} ended with exit code {code}.")


def _receive(pipes: list[Connection], answers: dict[int, Any]) -> None:
    for rank, pipe in enumerate(pipes):
        if rank not in answers and pipe.poll():
            with suppress(EOFError, OSError):  # it ended, perhaps in the middle of its answer
                answers[rank] = pipe.recv()


def _end(processes: Sequence[BaseProcess], timeout: float) -> None:
    """Stop the processes as by Ctrl-C; kill those that do not end in these seconds, and all at a Ctrl-C."""
    started = {process.pid: process for process in processes if process.pid is not None}
    for pid, process in started.items():
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in started.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in started.values():
            process.kill()
        for process in started.values():
            process.join()
