"""Start the processes of one machine: the same command line once per device, under torch's elastic agent."""

from __future__ import annotations

import builtins
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.distributed.rendezvous import free_port
from trainer.distributed.tpu import share_chips
from trainer.errors import ConfigError
from trainer.launchers.restarts import LAUNCHED

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from trainer.launchers.elastic_agent import Agent

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def launch_processes(num_processes: int, max_restarts: int = 0, device_type: str = "cpu") -> NoReturn:
    """Run this very command line in `num_processes` new processes, wait for them, and exit as they did.

    The processes get torchrun's environment variables, and inherit the output of this one. SIGINT, SIGTERM, SIGUSR1 and
    SIGHUP (as SIGTERM) are passed on, so that they stop together; the second SIGINT kills them. When one of them fails,
    the others have eight seconds to end; then all are restarted, at most `max_restarts` times, but not after a signal
    nor after an agreed stop (`restart_safe_exit_code`).

    Raises:
        SystemExit: always, with 0 or the exit code of the process that failed first (128 + n if signal n killed it;
            130 after the second SIGINT).
        ConfigError: this process cannot be run a second time.
    """
    why_not = can_relaunch()
    if why_not is not None:
        asked = f"{num_processes} processes are" if num_processes > 1 else f"max_restarts={max_restarts} is"
        raise ConfigError(
            f"{asked} asked for, but this one cannot be started again: {why_not}. Put the code "
            "into a script and run `python script.py`, or start it with "
            f"`torchrun --nproc-per-node {num_processes} script.py`, or use devices=1."
        )
    if device_type == "tpu":
        share_chips(num_processes)
    launch_command(sys.orig_argv[1:], num_processes, max_restarts)


def launch_command(command: Sequence[str], num_processes: int, max_restarts: int = 0) -> NoReturn:
    """Run `command`, the arguments of Python, as `launch_processes` runs this process."""
    run_agents(lambda: _local_agent(command, num_processes, max_restarts), num_processes)


def run_agents(make_agent: Callable[[], Agent], num_processes: int) -> NoReturn:
    """Run the `num_processes` processes of this machine to their end; see `launch_processes`.

    Raises:
        SystemExit: always.
        TrainerError: from `make_agent`.
    """
    from trainer.launchers.elastic_agent import silence_elastic

    silence_elastic()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_processes)))
    os.environ[LAUNCHED] = str(os.getpid())
    # Replaces the agent's own handlers, which end everything 30 s after the second signal.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    sys.stdout.flush()
    sys.stderr.flush()
    agent = make_agent()
    forwarder = _SignalForwarder(agent)
    forwarder.install()
    code = 1
    try:
        failures = [failure.exitcode for failure in agent.run().failures.values()]
        code = _exit_code(list(agent.failed_ranks.values()) if failures and agent.failed_ranks else failures)
        agent.report_signals()
        if forwarder.interrupts > 1:
            code = 128 + signal.SIGINT
    finally:
        if code != 0:
            forwarder.send(signal.SIGKILL)  # what the processes may have left running
            agent.leave()
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    raise SystemExit(code)


def can_relaunch(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process cannot be run a second time by its command line; None if it can."""
    arguments = sys.orig_argv[1:]
    if hasattr(builtins, "__IPYTHON__") or "ipykernel" in sys.modules:
        return "it is a notebook or an IPython session"
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "it is an interactive session"
    if "PYTEST_CURRENT_TEST" in environ and "pytest" in sys.modules:
        return "it runs inside pytest"
    if multiprocessing.parent_process() is not None:
        return "it was itself started by multiprocessing"
    if threading.current_thread() is not threading.main_thread():
        return "this is not its main thread"
    if not sys.executable or not arguments or sys.argv[:1] in ([], [""], ["-"]):
        return "its program came from standard input, not from a file"
    script = sys.argv[0]
    if script not in ("-c", "-m") and not os.path.exists(script):
        return f"{script!r} is not found from the current directory {os.getcwd()!r}, which was changed meanwhile"
    return None


def die_with_parent() -> None:
    """Have this process killed when the launcher that started it dies, however it dies (Linux only).

    The agent starts each process in a session of its own, where nothing else would end it. Call this early. Does
    nothing in processes that our launcher did not start directly.
    """
    launcher = int(os.environ.get(LAUNCHED, "0"))
    if not launcher or not sys.platform.startswith("linux"):
        return
    if os.getppid() == launcher:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher and not _alive(launcher):
        os.kill(os.getpid(), signal.SIGKILL)  # the launcher died before this call


class _SignalForwarder:
    """Forwards the signals of the launcher to the processes that it has started."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.interrupts = 0

    def install(self) -> None:
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._agent.signalled = signal.Signals(number)
        if not self._pids():
            raise SystemExit(128 + number)
        if number == signal.SIGINT:
            self.interrupts += 1
        if self.interrupts > 1 or number == getattr(signal, "SIGQUIT", None):
            self.send(signal.SIGKILL)
        elif number == getattr(signal, "SIGHUP", None):
            self.send(signal.SIGTERM)
        else:
            self.send(signal.Signals(number))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process; SIGKILL also to their children."""
        for pid in self._pids():
            try:
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                else:
                    # Not to the group: data workers have to live until the step is finished.
                    os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def _pids(self) -> list[int]:
        return [worker.id for worker in self._agent.get_worker_group().workers if worker.id is not None]


def _local_agent(command: Sequence[str], num_processes: int, max_restarts: int) -> Agent:
    from trainer.launchers.elastic_agent import Agent

    rendezvous, store, port = _local_rendezvous()
    here = "127.0.0.1"
    return Agent(worker_spec(command, num_processes, max_restarts, rendezvous, here, (here, port)), store)


def worker_spec(
    command: Sequence[str],
    num_processes: int,
    max_restarts: int,
    rendezvous: RendezvousHandler,
    own_address: str,
    store_address: tuple[str, int],
) -> WorkerSpec:
    """Return the specification for torch's agent of the processes of this machine.

    Args:
        command: the arguments of Python.
        store_address: host and port of the store that the processes use.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    return WorkerSpec(
        role="trainer",
        local_world_size=num_processes,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        # The agent replaces ${local_rank} and $$ in the arguments; a user's dollar sign has to survive.
        args=tuple(argument.replace("$", "$$") for argument in command),
        max_restarts=max_restarts,
        monitor_interval=0.1,
        master_addr=store_address[0],
        master_port=store_address[1],
        local_addr=own_address,
    )


def _local_rendezvous() -> tuple[RendezvousHandler, Store, int]:
    """Open a store on a free port of this machine, in this process: it outlives every process that fails."""
    import torch.distributed.elastic.rendezvous.registry as registry
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    for attempt in range(5):
        port = free_port()
        parameters = RendezvousParameters("static", f"127.0.0.1:{port}", uuid.uuid4().hex, 1, 1, rank=0)
        handler = registry.get_rendezvous_handler(parameters)
        try:
            store: Any = handler.next_rendezvous().store  # opens the port now, and keeps it
            return handler, store.underlying_store, port
        except RuntimeError:
            # Another program took the port in between.
            if attempt == 4:
                raise
    raise AssertionError("unreachable")


def _exit_code(codes: list[int]) -> int:
    """Reduce the exit codes to one; those of processes that failed because of another count last."""

    def rank_of(code: int) -> int:
        # The agent ends the survivors with SIGTERM; a broken collective ends them with 1.
        return {-signal.SIGTERM: 2, 1: 1}.get(code, 0)

    if not codes:
        return 0
    code = min(codes, key=rank_of)
    return 128 - code if code < 0 else code


def usable_cores() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
