"""Launch on several machines: one launcher on each, joined at one host and port, under torch's elastic agent."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.distributed.store import address_towards, connect, find_host, is_own_address, open_store
from trainer.errors import TrainerError
from trainer.launchers.launcher import run_agents, worker_spec
from trainer.launchers.logs import Logs

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from trainer.launchers.elastic_agent import Agent

_TIMEOUTS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
_RUN = "trainer/run"
CONF = (*_TIMEOUTS, "keep_alive_interval", "keep_alive_max_attempt")
"""The names allowed in `--rdzv-conf`: torch's, with values in seconds (the last one is a count)."""


@dataclass(frozen=True)
class Machines:
    """The machines that take part, and their rendezvous."""

    min_nodes: int
    max_nodes: int
    """Start with this many, or, after waiting half a minute for more, with at least `min_nodes`."""
    host: str
    port: int
    node_rank: int | None = None
    """The number of this machine: 0 hosts the store, and ranks follow the numbers. None: by address."""
    run_id: str = "none"
    conf: Mapping[str, int] = field(default_factory=dict)
    """Values for the names of `CONF`."""

    def __str__(self) -> str:
        count = str(self.max_nodes) if self.min_nodes == self.max_nodes else f"{self.min_nodes} to {self.max_nodes}"
        return f"{count} machines to come to {self.host}:{self.port}"


def launch_on_machine(
    command: Sequence[str],
    num_processes: int,
    max_restarts: int,
    machines: Machines,
    logs: Logs = Logs(),  # noqa: B008
) -> NoReturn:
    """Run `command` (arguments of Python) in `num_processes` processes here, together with the other machines.

    See `launch_processes`. A machine whose launcher has died may rejoin while the others have restarts left, except
    the one that hosts the store.

    Raises:
        SystemExit: always.
        TrainerError: the machines could not join, or lost their connection.
    """
    from torch.distributed.elastic.rendezvous import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousStateError,
        RendezvousTimeoutError,
    )

    endpoint = f"{machines.host}:{machines.port}"
    # torch's second store would need a second open port, and would end with the machine that happens to have rank 0.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        run_agents(lambda: _agent(command, num_processes, max_restarts, machines, logs), num_processes)
    except RendezvousTimeoutError:
        seconds = machines.conf.get("join_timeout", 600)
        raise TrainerError(
            f"waited {seconds} s for {machines}. Start the same command on the others, or wait longer: "
            f"--rdzv-conf join_timeout={2 * seconds}."
        ) from None
    except RendezvousClosedError:
        raise TrainerError(f"the other machines at {endpoint} have ended this run: see their output.") from None
    except (RendezvousConnectionError, RendezvousStateError):
        raise TrainerError(
            f"lost {endpoint}, where the machines meet: the launcher there has ended, or the network is down."
        ) from None


def _agent(command: Sequence[str], num_processes: int, max_restarts: int, machines: Machines, logs: Logs) -> Agent:
    from trainer.launchers.elastic_agent import Agent

    store, holds_store = _store(machines, command)
    own = address_towards(machines.host, machines.port)
    # torch only sorts the machines by these addresses; it does not connect to them.
    name = own if machines.node_rank is None else f"{machines.node_rank:06d}"
    rendezvous = _rendezvous(machines, store, name)
    spec = worker_spec(command, num_processes, max_restarts, rendezvous, own, (machines.host, machines.port))
    sys.stderr.write(f"processes on this machine ({own}): {num_processes}; waiting for {machines}\n")
    sys.stderr.flush()
    return Agent(spec, store, holds_store, str(machines), logs)


def _store(machines: Machines, command: Sequence[str]) -> tuple[TCPStore, bool]:
    """Return the store of the rendezvous, and True if this process hosts it."""
    host, port, names = machines.host, machines.port, f"--rdzv {machines.host}:{machines.port}"
    find_host(host, port, names)
    here = is_own_address(host, port) if machines.node_rank is None else machines.node_rank == 0
    what, run = f"where the machines meet ({names})", f"{machines.run_id} {list(command)}"
    busy = None
    if here:
        try:
            store = open_store(host, port, names)
        except TrainerError as error:
            # Another launcher of this run on the same machine may have opened it first.
            if machines.node_rank is not None:
                raise
            busy = error
        else:
            store.set(_RUN, run)
            return store, True
    store = connect(host, port, what)
    if busy is not None and (not store.check([_RUN]) or store.get(_RUN).decode() != run):
        raise busy
    store.set_timeout(timedelta(seconds=60))
    return store, False


def _rendezvous(machines: Machines, store: TCPStore, name: str) -> RendezvousHandler:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    class Rendezvous(DynamicRendezvousHandler):
        @property
        def use_agent_store(self) -> bool:
            """Have the processes use the store of the rendezvous, which outlives every attempt."""
            return True

    conf: dict[str, Any] = dict(machines.conf)
    limits = {key: conf.pop(key, None) for key in _TIMEOUTS}
    timeout = RendezvousTimeout(
        **{key.removesuffix("_timeout"): timedelta(seconds=limits[key]) for key in _TIMEOUTS if limits[key] is not None}
    )
    backend = C10dRendezvousBackend(store, machines.run_id)
    handler: RendezvousHandler = Rendezvous.from_backend(
        machines.run_id, store, backend, machines.min_nodes, machines.max_nodes, name, timeout, **conf
    )
    return handler
