"""Meeting at a host and port: told within seconds when that cannot be, and who has not come."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.distributed.environment import Environment
from trainer.errors import ConfigError, TrainerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

log = logging.getLogger("trainer")

ATTEMPT = "TRAINER_ATTEMPT"
"""Environment variable: which attempt of a run this process belongs to; the same in all of them."""
PATIENCE = "TRAINER_CONNECT_SECONDS"
"""Environment variable: how long to try where nobody answers yet."""
_PATIENCE_S = 60.0
_UNREACHABLE_PATIENCE_S = 15.0
"""The same for a host that is not there: its name is unknown, or no way leads to it."""
_NOTICE_S = 5.0
_HANDSHAKE_S = 10.0
_BUSY_PATIENCE_S = 3.0
"""A run that has just ended may still hold its port."""
_REFUSED = "trainer/refused"
"""In the store: why this run cannot begin."""
_DUPLICATE_RANK_TIMEOUT_S = 1.0
"""How long whoever holds the port may take to answer, before it counts as another program."""
_STORE_GRACE_S = 1.0
"""How long rank 0, whose end ends the store, lets the others read why."""
_MISSING_NOTICE_S = 30.0
_PROCESS = uuid.uuid4().hex
"""Tells this process apart where containers share name and process ids; its forks have it too, but other ids."""


def join_store(environment: Environment, timeout: timedelta) -> Store:
    """The store in which the processes of this attempt at the run meet; for all of them, at the same place.

    It is the launcher's where there is one; else rank 0 opens it at `master_addr:master_port`.

    Raises:
        ConfigError: two processes have the same rank, or they do not agree about the world size; on those that wait
            as well.
        TrainerError: the address is taken or cannot be reached, or some processes do not come; names them.
    """
    from torch._C._distributed_c10d import PrefixStore

    host, port, rank, world_size = (
        environment.master_addr,
        environment.master_port,
        environment.rank,
        environment.world_size,
    )
    names = f"MASTER_ADDR={host} MASTER_PORT={port}"
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not of_launcher:
        store = _open_as_rank_0(host, port, names, world_size)
    else:
        store = connect(host, port, f"where the processes meet ({names})")
    store.set_timeout(timeout)
    # A launcher numbers its processes itself, and its store outlives them: it remembers those of former attempts.
    if not of_launcher:
        _register_rank(store, rank, world_size)
    attempt = _wait_for_all_ranks(store, rank, world_size, timeout)
    os.environ[ATTEMPT] = attempt
    return PrefixStore(f"trainer/attempt{attempt}", store)


def attempt() -> str:
    """A text that the processes of this attempt have in common, and those of no other attempt."""
    return os.environ.get(ATTEMPT) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def patience() -> float:
    """Seconds to try a connection where nobody answers yet."""
    try:
        return float(os.environ.get(PATIENCE, _PATIENCE_S))
    except ValueError:
        raise TrainerError(f"{PATIENCE}={os.environ[PATIENCE]!r} is not a number of seconds.") from None


def free_port() -> int:
    """A port of this machine that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def open_store(host: str, port: int, names: str, wait: float = _BUSY_PATIENCE_S) -> TCPStore:
    """Listen on `port` of this machine, which the others know as `host`.

    Args:
        names: what the user gave, for the error.
        wait: seconds to try while another program has the port.

    Raises:
        TrainerError: the port is taken, or `host` means no machine.
    """
    from torch._C._distributed_c10d import TCPStore

    find_host(host, port, names)
    deadline = time.monotonic() + wait
    while True:
        try:
            return TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=_HANDSHAKE_S),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:  # torch's DistNetworkError
            if "EADDRINUSE" not in str(error) and "EACCES" not in str(error):
                raise TrainerError(f"{host}:{port} ({names}) cannot be opened: {_first_line(error)}") from None
            if time.monotonic() > deadline:
                raise TrainerError(_busy(port, names, "EACCES" in str(error))) from None
            time.sleep(0.25)


def connect(host: str, port: int, what: str, wait: float | None = None) -> TCPStore:
    """The store that another process holds at `host:port`.

    Args:
        what: what is there, for messages: "where the processes meet (MASTER_ADDR=...)".
        wait: seconds to try while nobody listens there yet; None: TRAINER_CONNECT_SECONDS, or 60.

    Raises:
        TrainerError: it cannot be reached, or something else listens there.
    """
    wait = patience() if wait is None else wait
    _until(lambda: _reach(host, port), wait, f"{host}:{port}, {what},")
    answer = _try_connect(host, port, 1.5 * _HANDSHAKE_S)
    if answer is not None and not isinstance(answer, Exception):
        return answer
    reason = "" if answer is None else f": {_first_line(answer)}"
    raise TrainerError(
        f"{host}:{port}, {what}, is in use by something that is not torch's store{reason}. Give another port to all "
        f"processes."
    )


def _try_connect(host: str, port: int, wait: float) -> TCPStore | Exception | None:
    """The store at `host:port`, why there is none, or None if nothing was said in so many seconds."""
    answer: list[TCPStore | Exception] = []

    def try_it() -> None:
        from torch._C._distributed_c10d import TCPStore

        try:
            answer.append(TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_HANDSHAKE_S)))
        except Exception as error:
            answer.append(error)

    # In a thread, because torch waits without end for an answer of a program that speaks something else.
    thread = threading.Thread(target=try_it, name="connect", daemon=True)
    thread.start()
    thread.join(wait)
    return answer[0] if answer else None


def _open_as_rank_0(host: str, port: int, names: str, world_size: int) -> TCPStore:
    """`open_store`; where another rank 0 of this run holds the port, both are told."""
    try:
        return open_store(host, port, names)
    except TrainerError:
        store = _try_connect(host, port, _DUPLICATE_RANK_TIMEOUT_S)
        if store is not None and not isinstance(store, Exception) and store.check([_process_key(0)]):
            _register_rank(store, 0, world_size)
        raise


def find_host(host: str, port: int, names: str) -> None:
    """See that `host` means a machine.

    Raises:
        TrainerError: it does not, for fifteen seconds.
    """
    _until(lambda: _resolve(host, port), _UNREACHABLE_PATIENCE_S, f"{host}:{port} ({names})")


def _until(reach: Callable[[], OSError | None], wait: float, what: str) -> None:
    """Try until there is no error; longer while the host is there, and only nobody listens yet."""
    began = time.monotonic()
    told = False
    while (error := reach()) is not None:
        absent = not isinstance(error, ConnectionRefusedError)
        limit = min(wait, _UNREACHABLE_PATIENCE_S) if absent and PATIENCE not in os.environ else wait
        passed = time.monotonic() - began
        if passed >= limit:
            raise TrainerError(
                f"{what} cannot be reached: {_reason(error)} (tried for {limit:.0f} s). {_advice(error)}"
            )
        if passed > _NOTICE_S and not told:
            told = True
            sys.stderr.write(f"still trying to reach {what} {_reason(error)}\n")
            sys.stderr.flush()
        time.sleep(min(0.25, limit))


def _resolve(host: str, port: int) -> OSError | None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return error
    except UnicodeError as error:  # a label that is empty or too long
        return socket.gaierror(socket.EAI_NONAME, str(error))
    return None


def _reach(host: str, port: int) -> OSError | None:
    unresolved = _resolve(host, port)
    if unresolved is not None:
        return unresolved
    try:
        socket.create_connection((host, port), timeout=3.0).close()
    except OSError as error:
        return error
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "there is no machine of this name"
    if isinstance(error, ConnectionRefusedError):
        return "the machine is there, but nobody listens on this port"
    if isinstance(error, TimeoutError):
        return "no answer"
    return os.strerror(error.errno) if error.errno else str(error)


def _advice(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "Look at the name (`getent hosts NAME` on this machine), or give the address in numbers."
    if isinstance(error, ConnectionRefusedError):
        return (
            "Start the process that opens it (rank 0, or `trainer launch` on that machine), give the same port "
            f"everywhere, or wait longer: {PATIENCE}=600."
        )
    return "Look at the address, the network and the firewall: `nc -vz HOST PORT` from this machine."


def _busy(port: int, names: str, forbidden: bool) -> str:
    who = "may not be opened by you" if forbidden else "is in use, by another run or another program"
    return (
        f"port {port} of {socket.gethostname()} ({names}) {who}. Give all processes another one, such as "
        f"{free_port()}, which is free now; `ss -ltnp 'sport = :{port}'` shows who has it."
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _register_rank(store: Store, rank: int, world_size: int) -> None:
    """Say who and how many we are; tell everybody, if another process has this rank or says another number."""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    known = store.compare_set(_process_key(rank), "", f"{me}/{_PROCESS}").decode()
    if known != f"{me}/{_PROCESS}":
        _refuse(
            store,
            rank,
            f"rank {rank} is there twice: {known.rpartition('/')[0]} and {me} both have RANK={rank}. Give each process "
            "a RANK of its own, from 0 to WORLD_SIZE - 1. If they are of two runs, give one of these another "
            "MASTER_PORT; if one was started again in place of the other, start all processes again.",
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
    """Raise on this process, and on all that still wait; those that have met go on."""
    if not store.check(["trainer/complete/1"]):
        store.set(_REFUSED, why)
    if rank == 0:
        time.sleep(_STORE_GRACE_S)
    raise ConfigError(why)


def _wait_for_all_ranks(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Number this attempt, and see that all have come.

    Each process asks under a name that nobody had before, so that none takes what was said to the dead processes of
    a former attempt. (torchrun's own count of restarts may differ between machines.)
    """
    if rank == 0:
        number = str(store.add("trainer/attempts", 1))
        _answer(store, number, world_size, timeout)
        store.set(f"trainer/complete/{number}", "1")
        return number
    name = uuid.uuid4().hex
    store.set(f"trainer/asks/{rank}", name)
    key = f"trainer/answers/{name}"
    _wait(store, rank, lambda: store.check([key]), timeout, lambda: "rank 0 has not come")
    number = store.get(key).decode()
    store.set(f"trainer/came/{number}/{rank}", "1")
    # So that whatever is found out about the others is told here, too.
    complete = f"trainer/complete/{number}"
    _wait(
        store, rank, lambda: store.check([complete]), timeout, lambda: "some ranks, which rank 0 names, have not come"
    )
    return number


def _answer(store: Store, number: str, world_size: int, timeout: timedelta) -> None:
    missing, answered = set(range(1, world_size)), dict[int, str]()

    def all_here() -> bool:
        for rank in sorted(missing):
            if store.check([f"trainer/asks/{rank}"]):
                name = store.get(f"trainer/asks/{rank}").decode()
                if answered.get(rank) != name:
                    store.set(f"trainer/answers/{name}", number)
                    answered[rank] = name
                if store.check([f"trainer/came/{number}/{rank}"]):
                    missing.discard(rank)
        return not missing

    _wait(store, 0, all_here, timeout, lambda: f"{_ranks(missing)} of {world_size} have not come")


def _wait(store: Store, rank: int, ready: Callable[[], bool], timeout: timedelta, who: Callable[[], str]) -> None:
    began = told = time.monotonic()
    while not ready():
        if store.check([_REFUSED]):
            _refuse(store, rank, store.get(_REFUSED).decode())
        now = time.monotonic()
        if now - began > timeout.total_seconds():
            raise TrainerError(f"{who()} within {timeout.total_seconds():.0f} s (timeout_seconds of the strategy).")
        if now - told > _MISSING_NOTICE_S:
            told = now
            log.warning("waiting since %.0f s to begin: %s", now - began, who())
        time.sleep(0.01 if now - began < 1 else 0.1)


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if len(ranks) > 8 else ''}"


def is_own_address(host: str, port: int) -> bool:
    """Whether `host` is this machine."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL):
                    raise
            else:
                return True
    return False


def address_towards(host: str, port: int) -> str:
    """The address with which this machine is seen from `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own
