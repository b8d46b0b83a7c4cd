"""Start the processes of one machine: the same command line once per device, under torch's elastic agent."""

from __future__ import annotations

import builtins
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from trainer.distributed.store import LOOPBACK, loopback_store
from trainer.distributed.tpu import share_chips
from trainer.errors import ConfigError
from trainer.fault_tolerance.signals import EXIT_RETRY, install_handler, keep_exit_code
from trainer.fault_tolerance.third_sigterm import DUMP_SIGNAL, SIGTERMS
from trainer.launchers.logs import Logs
from trainer.launchers.restarts import LAUNCHED

if TYPE_CHECKING:  # torch's elastic agent is imported only by the process that launches others
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from trainer.launchers.elastic_agent import Agent

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KILL_AFTER_S = 10.0
"""Seconds that the processes have to end themselves after the third SIGTERM, with their stacks."""


def launch_processes(num_processes: int, max_restarts: int = 0, device_type: str = "cpu") -> NoReturn:
    """Run this command line in `num_processes` new processes, wait for them, and exit as they did.

    The processes get torchrun's environment variables, and inherit the output of this one. SIGINT, SIGTERM, SIGUSR1 and
    SIGHUP (as SIGTERM) are passed on, so that they stop together; the second SIGINT kills them, and so does the third
    SIGTERM those that have not ended themselves. When one of them fails, the others have eight seconds to end; then all
    are restarted, at most `max_restarts` times, but not after a signal nor after an agreed stop
    (`restart_safe_exit_code`).

    Raises:
        SystemExit: always, with 0 or the exit code of the process that failed first (128 + n if signal n killed it);
            130 after the second SIGINT, or after one that came before training and before that failure.
        ConfigError: this process cannot be run a second time.
    """
    why_not = can_relaunch()
    if why_not is not None:
        raise ConfigError(
            f"devices={num_processes} with max_restarts={max_restarts} starts this program again, which is not "
            f"possible: {why_not}. Run the code as a script, or, in a notebook, as a function by "
            f"trainer.launch(function, devices={num_processes})."
        )
    if device_type == "tpu":
        share_chips(num_processes)
    launch_command(sys.orig_argv[1:], num_processes, max_restarts)


def open_closed_streams() -> None:
    """Open the standard streams that a shell or a daemon has closed (`>&-`): Python has None in their place."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def launch_command(
    command: Sequence[str],
    num_processes: int,
    max_restarts: int = 0,
    logs: Logs = Logs(),  # noqa: B008
) -> NoReturn:
    """Run `command`, the arguments of Python, as `launch_processes` runs this process."""
    run_agents(lambda: _local_agent(command, num_processes, max_restarts, logs), num_processes)


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
    open_closed_streams()
    sys.stdout.flush()
    sys.stderr.flush()
    agent = make_agent()
    forwarder = _SignalForwarder(agent)
    forwarder.install()
    code = 1
    try:
        failures = [failure.exitcode for failure in agent.run().failures.values()]
        code = _exit_code(list(agent.failed_ranks.values()) if failures and agent.failed_ranks else failures)
        agent.report_failures()
        if forwarder.ended_by is not None:
            code = 128 + forwarder.ended_by
        elif code != 0 and forwarder.interrupted and not agent.training_began():
            code = 128 + signal.SIGINT
    finally:
        keep_exit_code()
        if code != 0:
            forwarder.send(signal.SIGKILL)  # what the processes may have left running
            agent.leave()
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    raise SystemExit(code)


def can_relaunch(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process cannot be run a second time by its command line; None if it can."""
    arguments = sys.orig_argv[1:]
    if hasattr(builtins, "__IPYTHON__") or hasattr(sys, "ps1") or sys.flags.interactive:
        return "it is a notebook or an interactive session"
    if "PYTEST_CURRENT_TEST" in environ and "pytest" in sys.modules:
        return "it runs inside pytest"
    if multiprocessing.parent_process() is not None:
        return "it was itself started by multiprocessing"
    if threading.current_thread() is not threading.main_thread():
        return "this is not its main thread"
    kind, program = program_of(arguments)
    if not sys.executable or kind == "-":
        return "its program came from standard input, not from a file"
    if kind == "script" and not os.path.isfile(program) and not os.path.isdir(program):  # a pipe is empty by now
        return f"its program came from {program!r}, which is not a file in the current directory {os.getcwd()!r}"
    return None


def program_of(arguments: Sequence[str]) -> tuple[str, str]:
    """Return what Python runs with these arguments: "-" (standard input), "-c", "-m" or "script", and its text or name.

    Does not read `sys.argv`, which programs may change.
    """
    left = iter(arguments)
    for word in left:
        if not word.startswith("-"):
            return "script", word
        for position, letter in enumerate("" if word.startswith("--") else word[1:], start=2):
            value = word[position:]  # of an option that takes one; else it is the next word
            if letter in "cm":
                return f"-{letter}", value or next(left, "")
            if letter in "WX":
                if not value:
                    next(left, None)
                break
        if word == "-":
            break
    return "-", ""


def die_with_parent() -> None:
    """Have this process killed when the launcher that started it dies, however it dies (Linux only).

    The agent starts each process in a separate session, where nothing else would end it. Call this early. Does
    nothing in processes that our launcher did not start directly.
    """
    launcher = int(os.environ.get(LAUNCHED, "0"))
    if not launcher or not sys.platform.startswith("linux"):
        return
    if os.getppid() == launcher:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher and not os.path.exists(f"/proc/{launcher}"):
        os.kill(os.getpid(), signal.SIGKILL)  # the launcher died before this call


class _SignalForwarder:
    """Forwards the signals of the launcher to the processes that it has started."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._received: Counter[int] = Counter()
        self.ended_by: signal.Signals | None = None
        """The signal that killed processes that did not stop."""
        self.interrupted = False
        """True after a SIGINT that came before any failure: processes that Python still starts then end with 1."""

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            install_handler(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._agent.signalled = signal.Signals(number)
        self._received[number] += 1
        self.interrupted |= number == signal.SIGINT and not self._agent.failed_ranks
        if self._agent.starting:
            return  # the agent ends the processes when it knows all of them
        if not self._pids():
            raise SystemExit(EXIT_RETRY if number == signal.SIGUSR1 else 128 + number)
        if self._received[signal.SIGINT] > 1 or number == signal.SIGQUIT:
            self.ended_by = signal.SIGINT if number == signal.SIGINT else self.ended_by
            self.send(signal.SIGKILL)
        elif number == signal.SIGTERM and self._received[number] == SIGTERMS:
            self.ended_by = signal.SIGTERM
            self.send(signal.SIGTERM)
            kill = threading.Timer(_KILL_AFTER_S, self._kill_with_stacks)
            kill.daemon = True
            kill.start()
        elif number == signal.SIGHUP:
            self.send(signal.SIGTERM)
        else:
            self.send(signal.Signals(number))

    def _kill_with_stacks(self) -> None:
        if DUMP_SIGNAL:
            self.send(DUMP_SIGNAL)
            time.sleep(1.0)
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to every process; SIGKILL also to their children."""
        for pid in self._pids():
            with suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                else:
                    # Not to the group: data workers have to live until the step is finished.
                    os.kill(pid, number)

    def _pids(self) -> list[int]:
        return [worker.id for worker in self._agent.get_worker_group().workers if worker.id is not None]


def _local_agent(command: Sequence[str], num_processes: int, max_restarts: int, logs: Logs) -> Agent:
    from trainer.launchers.elastic_agent import Agent, LocalRendezvous

    # Hosted by this process: it outlives every process that fails.
    store = loopback_store()
    rendezvous = LocalRendezvous(uuid.uuid4().hex, LOOPBACK, store)
    spec = worker_spec(command, num_processes, max_restarts, rendezvous, LOOPBACK, (LOOPBACK, store.port))
    return Agent(spec, store, logs=logs)


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


def _exit_code(codes: list[int]) -> int:
    """Reduce the exit codes to one; codes of processes that failed because of another process count last.

    If SIGUSR1 killed a process before it had installed its handler, the code is 75, as if it had handled the signal.
    """
    codes = [EXIT_RETRY if code == -signal.SIGUSR1 else code for code in codes]

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
