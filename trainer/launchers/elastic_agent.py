"""The launcher's elastic agent: decide which failures restart the processes, and how long the others have to end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from trainer.launchers.logs import Logs
from trainer.launchers.restarts import BEGUN, STOPPED

_SHUTDOWN_TIMEOUT_S = 8
"""Seconds that the other processes have to end after one has failed."""
_STOP_TIMEOUT_S = 30
"""The same after an agreed stop, when everything is saved and only the end of the script remains."""
_STORE_TIMEOUT_S = _STOP_TIMEOUT_S + 10
"""Seconds for which the machine that hosts the store waits for the others when all end with an error."""
_NOTICE_S = 10.0


class LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of a single machine, which waits for no other one.

    Args:
        run_id: value of TORCHELASTIC_RUN_ID in the processes.
        address: of this machine.
        store: what the processes find at `address`, as their MASTER_ADDR and MASTER_PORT; it outlives every attempt.
    """

    def __init__(self, run_id: str, address: str, store: TCPStore) -> None:
        super().__init__(address, store.port, rank=0, world_size=1, run_id=run_id, timeout=0)
        self._of_agent = HashStore()

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the rank of this machine, the only one."""
        return RendezvousInfo(self._of_agent, 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


class Agent(LocalElasticAgent):
    """torch's agent for the processes of one machine.

    Args:
        spec: see torch.
        store: shared by the agents of all machines and by all processes; outlives every attempt.
        holds_store: True if the store ends with this process.
        machines: description of the machines to wait for; empty for a single machine.
        logs: where the output of the processes goes.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        store: Store,
        holds_store: bool = False,
        machines: str = "",
        logs: Logs = Logs(),  # noqa: B008
    ) -> None:
        folder = os.devnull if logs == Logs() else logs.log_dir
        ways, shown = (Std.from_str(logs.redirects), Std.from_str(logs.tee)), logs.local_ranks_filter
        outputs = DefaultLogsSpecs(folder, *ways, None if shown is None else set(shown))
        super().__init__(spec, outputs)
        if folder != os.devnull:
            _print_message(f"the output of the processes: {outputs.root_log_dir}")
        self._stops = store
        self._holds_store = holds_store
        self._machines = machines
        self.signalled: signal.Signals | None = None
        """The latest signal that the launcher received: nothing is restarted after one."""
        self.starting = False
        """True while processes are started; some may run before their numbers are known."""
        self.failed_ranks: dict[int, int] = {}
        """Exit codes by rank of the processes that failed first, without those ended because of them."""
        self._errors: dict[int, str] = {}
        """The files by rank of what processes write to their standard error; empty for the terminal."""

    def report_failures(self) -> None:
        """Print which processes were killed by a signal, and so report nothing, or report into a file or to nobody."""
        for rank, code in sorted(self.failed_ranks.items()):
            errors = self._errors[rank]
            if self.signalled is not None or code == -signal.SIGTERM or (code > 0 and not errors):
                continue
            how = f"failed with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
            _print_message(f"rank {rank} {how}{errors and f'; its errors: {errors}'}")

    def training_began(self) -> bool:
        """Return True if a fit has begun in the latest attempt."""
        return self._recorded(BEGUN)

    def leave(self) -> None:
        """Keep the machine that hosts the store alive until the others have ended; called after an error."""
        group, deadline = self.get_worker_group(), time.monotonic() + _STORE_TIMEOUT_S
        if group.store is None or not self._machines:
            return
        with suppress(RuntimeError):  # the store is gone already
            left = group.store.add("trainer/left", 1)
            while self._holds_store and left < group.group_world_size and time.monotonic() < deadline:
                time.sleep(0.1)
                left = group.store.add("trainer/left", 0)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        notice = threading.Timer(_NOTICE_S, _print_message, [f"waiting for {self._machines}"])
        notice.daemon = True
        if self._machines:
            notice.start()
        try:
            super()._rendezvous(worker_group)
        finally:
            notice.cancel()
        if worker_group.group_rank == 0:
            # An elastic restart ends the former processes with SIGTERM, on which they stop by agreement.
            self._stops.delete_key(STOPPED)
            self._stops.delete_key(BEGUN)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ours = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self.starting = True
        started: dict[int, Any] = super()._start_workers(worker_group)
        # torch 2.9 installs signal handlers here, and has no variable yet to prevent it.
        for number, handler in ours.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)
        close = context.close

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
            if not self.failed_ranks:
                ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
                codes = {ranks[local]: handler.proc.poll() for local, handler in context.subprocess_handlers.items()}
                self.failed_ranks = {rank: code for rank, code in codes.items() if code}
                self._errors = {ranks[local]: file for local, file in context.stderrs.items()}
            close(death_sig, _STOP_TIMEOUT_S if self._stopped() else _SHUTDOWN_TIMEOUT_S)
            if self.failed_ranks:
                for handler in context.subprocess_handlers.values():
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(handler.proc.pid, signal.SIGKILL)  # what a failed process may have left running

        context.close = close_soon  # type: ignore[method-assign]
        self.failed_ranks = {}
        self.starting = False
        if self.signalled is not None:  # the signal came while no process was running, or while they were started
            context.close(self.signalled)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            if self.signalled is not None or self._stopped():
                self._remaining_restarts = 0
            elif self._remaining_restarts > 0:
                self.report_failures()
                total = worker_group.spec.max_restarts
                _print_message(f"starting all processes again ({total - self._remaining_restarts + 1} of {total})")
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state == WorkerState.HEALTHY:
            _print_message("a machine has joined or rejoined: starting all processes again")
        super()._restart_workers(worker_group)

    def _stopped(self) -> bool:
        """Return True if the processes have recorded that they stop by agreement."""
        return self._recorded(STOPPED)

    def _recorded(self, key: str) -> bool:
        try:
            return bool(self._stops.check([key]))
        except RuntimeError:  # the store was on another machine, and is gone
            return False


def silence_elastic() -> None:
    """Hide the agent's own log lines, which would bury the errors of the processes. LOGLEVEL=INFO shows them."""
    if "LOGLEVEL" not in os.environ:
        elastic = logging.getLogger("torch.distributed.elastic")
        elastic.addHandler(logging.NullHandler())
        elastic.propagate = False


def _print_message(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
