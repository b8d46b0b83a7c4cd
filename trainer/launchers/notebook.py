"""Run a function on several processes from a notebook or a REPL: `trainer.launch(fn, devices=2)`."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import ConfigError, TrainerError
from trainer.fault_tolerance.failure import lost_connection
from trainer.launchers.launcher import die_with_parent
from trainer.launchers.restarts import LAUNCHED

T = TypeVar("T")

_SHUTDOWN_TIMEOUT_S = 8
"""How long the other processes have to end after one has failed, or after Ctrl-C."""


class WorkerError(TrainerError):
    """A function failed on a process that `launch` started; has its rank and traceback."""


def launch(function: Callable[..., T], *args: Any, devices: int | str = "auto", **kwargs: Any) -> list[T]:
    """Call `function(*args, **kwargs)` on several processes of this machine, and wait.

    Each process has torchrun's variables, so a `Trainer` in the function joins the others. On Linux the processes are
    forked: the function may be defined in a notebook cell and use the objects of the notebook, but CUDA must not have
    been used before. If it was, and on other systems, the function has to come from an importable module.

    Args:
        function: called once on each process.
        devices: number of processes; "auto": one for each GPU, or a single one without GPUs.

    Returns:
        The results of the processes, by rank, with tensors on the CPU.

    Raises:
        WorkerError: the function failed; has the traceback of the process that failed first.
        ConfigError: the processes cannot be started here.
        KeyboardInterrupt: Ctrl-C; the processes have received it too, and none is left.
    """
    number = _number(devices)
    _refuse_nesting()
    method = _start_method(function)
    import torch
    from torch._C._distributed_c10d import TCPStore
    from torch.multiprocessing.spawn import start_processes

    # Hosted by this process, on a port that no other program can take.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        call = (function, args, kwargs)
        given = call if method == "fork" else _pickled(call)
        sys.stdout.flush()
        sys.stderr.flush()
        context = start_processes(
            _work,
            (number, store.port, os.getpid(), str(folder), method == "fork", given),
            nprocs=number,
            join=False,
            start_method=method,
        )
        processes = list(context.processes)
        try:
            _wait(processes, folder)
        except BaseException:
            _end(processes)
            raise
        return [torch.load(folder / f"result-{r}", map_location="cpu", weights_only=False) for r in range(number)]


def _number(devices: int | str) -> int:
    if devices == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"launch(devices={devices!r}): give a number of processes from 1, or 'auto'.")
    return devices


def _refuse_nesting() -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "launch() was called in a process that is one of several already "
            f"(RANK={os.environ['RANK']} WORLD_SIZE={os.environ['WORLD_SIZE']}): call the function itself."
        )


def _start_method(function: Callable[..., Any]) -> str:
    """Return "fork" where possible, else "spawn" for functions that a new Python process can import."""
    why = _no_fork()
    if why is None:
        return "fork"
    if _importable(function):
        return "spawn"
    raise ConfigError(
        f"launch() cannot start processes here: {why} Begin again in a fresh kernel, and do everything on the GPU "
        "inside the function; or write the function into a file, `from myfile import fn`: then each process imports "
        "it anew. (A function of a notebook's cell cannot be sent to a new process: pickle only knows its name.)"
    )


def _no_fork() -> str | None:
    """Return why a forked process could not work; None if it can."""
    import torch

    if not sys.platform.startswith("linux"):
        return f"processes cannot be forked safely on {sys.platform}."
    if not torch.cuda.device_count():  # asks NVML, which does not initialize CUDA
        return None
    if torch.cuda.is_initialized():
        return (
            "CUDA has been initialised in this process (a tensor or a model was moved to a GPU): it cannot be forked."
        )
    # torch.cuda.is_available() breaks forks, too, without a sign in this process: only a fork can tell.
    child = os.fork()
    if child == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        return (
            "CUDA has been asked for its devices in this process (torch.cuda.is_available(), or a Trainer that was "
            "made here), after which a forked process cannot use it. Set PYTORCH_NVML_BASED_CUDA_CHECK=1 before Python "
            "starts to ask without harm."
        )
    return None


def _importable(function: Callable[..., Any]) -> bool:
    if function.__module__ == "__main__":
        return False
    try:
        pickle.dumps(function)
    except Exception:
        return False
    return True


def _pickled(call: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(call)
    except Exception as error:
        raise ConfigError(f"launch(): an argument cannot be sent to another process: {error}.") from None


def _work(rank: int, number: int, port: int, parent: int, folder: str, forked: bool, given: Any) -> None:
    """Run the function in a started process."""
    import torch

    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(number),
            "LOCAL_WORLD_SIZE": str(number),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            LAUNCHED: str(parent),
        }
    )
    die_with_parent()
    # The children must not inherit the notebook's own handlers.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if forked:
        # The threads of OpenMP do not survive a fork; a process that uses them would hang.
        torch.set_num_threads(1)
        _forget_process_group()
    function, args, kwargs = given if forked else pickle.loads(given)
    code = 1
    try:
        result = function(*args, **kwargs)
        torch.save(result, Path(folder) / f"result-{rank}")
        code = 0
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 0:
            torch.save(None, Path(folder) / f"result-{rank}")
    except BaseException as error:
        _write_error(Path(folder), rank, error)
    finally:
        _destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
    if code:
        sys.exit(code)


def _write_error(folder: Path, rank: int, error: BaseException) -> None:
    order = f"{int(lost_connection(error))} {time.monotonic()}"
    text = f"{order}\n{''.join(traceback.format_exception(error))}"
    path = folder / f"error-{rank}"
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


_inherited: list[Any] = []
"""Process groups of the notebook, in a forked process: their threads have not survived, so that a destructor hangs."""


def _forget_process_group() -> None:
    """Forget the process group that a fit in the notebook has left; for a forked process."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
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

    if dist.is_available() and dist.is_initialized():
        gc.collect()
        with suppress(Exception):
            dist.destroy_process_group()


def _wait(processes: list[Any], folder: Path) -> None:
    """Wait until all processes have ended.

    Raises:
        WorkerError: one failed, and the others had eight seconds to end.
    """
    while any(process.exitcode is None for process in processes):
        if any(process.exitcode for process in processes):
            deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
            while any(p.exitcode is None for p in processes) and time.monotonic() < deadline:
                time.sleep(0.05)
            break
        time.sleep(0.02)
    codes = [process.exitcode for process in processes]
    if not any(codes):
        return
    number = len(processes)
    notes = {rank: path.read_text() for rank in range(number) if (path := folder / f"error-{rank}").exists()}
    if any(code is not None and code < 0 for code in codes) and not _own_errors(notes):
        rank = next(rank for rank, code in enumerate(codes) if code is not None and code < 0)
        raise WorkerError(f"rank {rank} of {number} was ended by {signal.Signals(-codes[rank]).name}.")
    if notes:
        rank = min(notes, key=lambda r: _order(notes[r]))
        raise WorkerError(f"rank {rank} of {number} failed:\n\n{notes[rank].partition(chr(10))[2]}")
    rank = next(rank for rank, code in enumerate(codes) if code)
    raise WorkerError(f"rank {rank} of {number} ended with exit code {codes[rank]}.")


def _order(note: str) -> tuple[float, ...]:
    return tuple(map(float, note.partition("\n")[0].split()))


def _own_errors(notes: dict[int, str]) -> bool:
    """Return True if a process failed by itself, not only because another was gone."""
    return any(_order(note)[0] == 0 for note in notes.values())


def _end(processes: list[Any]) -> None:
    """Stop the processes as by Ctrl-C; kill those that do not end."""
    for process in processes:
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
    deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join()
