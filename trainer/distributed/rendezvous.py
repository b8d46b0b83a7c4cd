"""Join the processes of a run at a host and port, and say which ranks are missing or there twice."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.distributed.environment import Environment
from trainer.distributed.store import LOOPBACK, connect, is_own_address, open_store, store_at, use_loopback
from trainer.errors import ConfigError, TrainerError, format_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

log = logging.getLogger("trainer")

ATTEMPT = "TRAINER_ATTEMPT"
"""Environment variable: the attempt of the run that this process belongs to; the same in all processes."""
_MISSING_NOTICE_S = 30.0
_DUPLICATE_RANK_TIMEOUT_S = 1.0
"""Seconds within which the program at the port has to answer, or it does not belong to this run."""
_STORE_GRACE_S = 1.0
"""Seconds for which rank 0, which hosts the store, lets the other ranks read an error."""
_REFUSED = "trainer/refused"
"""Key in the store: why this run cannot begin."""
_PROCESS = uuid.uuid4().hex
"""Distinguishes processes of containers with the same host name and process ids."""


def join_store(environment: Environment, timeout: timedelta) -> Store:
    """Return the store of this attempt at the run; called by all its processes.

    It is the launcher's store if there is one; else rank 0 opens one at `master_addr:master_port`: on the loopback only
    if all processes are on this machine.

    Raises:
        ConfigError: two processes have the same rank, or they disagree about the world size; raised on all of them.
        TrainerError: the port is in use, the address cannot be reached, or some ranks do not come (names them).
    """
    from torch._C._distributed_c10d import PrefixStore

    host, port = environment.master_addr, environment.master_port
    rank, world_size = environment.rank, environment.world_size
    one_machine = environment.local_world_size == world_size
    if one_machine:
        use_loopback()
    names = f"MASTER_ADDR={host} MASTER_PORT={port}"
    # A launcher assigns the ranks itself, and its store outlives the processes: it has the keys of former attempts.
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if one_machine and not of_launcher and _is_here(host, port):
        host = LOOPBACK
    if rank == 0 and not of_launcher:
        store = _open_as_rank_0(host, port, names, world_size)
    else:
        store = connect(host, port, f"where the processes meet ({names})")
    store.set_timeout(timeout)
    if not of_launcher:
        _register_rank(store, rank, world_size)
    attempt = _wait_for_all_ranks(store, rank, world_size, timeout)
    os.environ[ATTEMPT] = attempt
    return PrefixStore(f"trainer/attempt{attempt}", store)


def attempt() -> str:
    """Return an id that the processes of this attempt share, and no other attempt has."""
    return os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _is_here(host: str, port: int) -> bool:
    """Whether a host is this machine; False for an unknown name, which a later call reports."""
    try:
        return is_own_address(host, port)
    except (OSError, UnicodeError):
        return False


def _open_as_rank_0(host: str, port: int, names: str, world_size: int) -> TCPStore:
    """Open the store; if another rank 0 of this run has the port, report that on both."""
    try:
        return open_store(host, port, names)
    except TrainerError as error:
        try:
            store = store_at(host, port, names, _DUPLICATE_RANK_TIMEOUT_S)
        except TrainerError:
            raise error from None
        if store.check([_process_key(0)]):
            if store.get(_process_key(0)).decode().endswith(f"/{_PROCESS}"):
                return store  # this process has opened it for a former process group
            _register_rank(store, 0, world_size)
        raise


def _register_rank(store: Store, rank: int, world_size: int) -> None:
    """Register this process; raise on all processes if its rank is taken, or the world sizes differ."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    known = store.compare_set(_process_key(rank), "", f"{me}/{_PROCESS}").decode()
    if known != f"{me}/{_PROCESS}":
        _refuse(
            store,
            rank,
            f"rank {rank} is there twice: {known.rpartition('/')[0]} and {me} both have RANK={rank}. Give each process "
            "another RANK, from 0 to WORLD_SIZE - 1. If they belong to two runs, give one of them another MASTER_PORT; "
            "if one was started again in place of the other, start all processes again.",
        )
    number, _, other = store.compare_set("trainer/world_size", "", f"{world_size} {rank}").decode().partition(" ")
    if int(number) != world_size:
        _refuse(
            store,
            rank,
            f"the processes do not agree how many they are: rank {rank} has WORLD_SIZE={world_size}, and rank {other} "
            f"has WORLD_SIZE={number}. Give all of them the same, the number of processes on all machines.",
        )


def _process_key(rank: int) -> str:
    return f"trainer/process/{rank}"


def _refuse(store: Store, rank: int, why: str) -> None:
    """Raise on this process, and on all that still wait; processes that have met continue."""
    if not store.check(["trainer/complete/1"]):
        store.set(_REFUSED, why)
    if rank == 0:
        time.sleep(_STORE_GRACE_S)
    raise ConfigError(why)


def _wait_for_all_ranks(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Wait until all ranks are there; return the number of this attempt.

    Each process asks under a new name, so that none reads an answer to a dead process of a former attempt. (torchrun's
    own count of restarts may differ between machines.)
    """
    if rank == 0:
        number = str(store.add("trainer/attempts", 1))
        _answer_all(store, number, world_size, timeout)
        store.set(f"trainer/complete/{number}", "1")
        return number
    name = uuid.uuid4().hex
    answer = f"trainer/answers/{name}"
    store.set(f"trainer/asks/{rank}", name)
    _wait(store, rank, lambda: store.check([answer]), timeout, lambda: _absent([0], world_size))
    number = store.get(answer).decode()
    store.set(f"trainer/came/{number}/{rank}", "1")
    # Wait for the others, too, so that an error about them is raised here as well.
    came = {other: f"trainer/came/{number}/{other}" for other in range(1, world_size)}

    def who() -> str:
        return _absent([other for other, key in came.items() if not store.check([key])], world_size)

    _wait(store, rank, lambda: store.check([f"trainer/complete/{number}"]), timeout, who)
    return number


def _answer_all(store: Store, number: str, world_size: int, timeout: timedelta) -> None:
    """Give every process the number of this attempt, until all have read it; called on rank 0."""
    missing = set(range(1, world_size))

    def all_here() -> bool:
        for rank in sorted(missing):
            if store.check([f"trainer/asks/{rank}"]):
                store.set(f"trainer/answers/{store.get(f'trainer/asks/{rank}').decode()}", number)
                if store.check([f"trainer/came/{number}/{rank}"]):
                    missing.discard(rank)
        return not missing

    _wait(store, 0, all_here, timeout, lambda: _absent(sorted(missing), world_size))


def _absent(ranks: list[int], world_size: int) -> str:
    return f"{format_ranks(ranks)} of {world_size} did not come"


def _wait(store: Store, rank: int, ready: Callable[[], bool], timeout: timedelta, who: Callable[[], str]) -> None:
    began = noticed = time.monotonic()
    while not ready():
        if store.check([_REFUSED]):
            _refuse(store, rank, store.get(_REFUSED).decode())
        now = time.monotonic()
        if now - began > timeout.total_seconds():
            why = (
                f"{who()} within {timeout.total_seconds():.0f} s (timeout_seconds of the strategy). Look at what they "
                "print, and start all processes again."
            )
            if rank == 0:  # which holds the store: the others read the reason before it ends
                store.set(_REFUSED, why)
                time.sleep(_STORE_GRACE_S)
            raise TrainerError(why)
        if now - noticed > _MISSING_NOTICE_S:
            noticed = now
            log.warning("waiting since %.0f s to begin: %s", now - began, who())
        time.sleep(0.01 if now - began < 1 else 0.1)
