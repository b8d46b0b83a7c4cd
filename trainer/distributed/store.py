"""Open torch's TCPStore on a port, or reach one; name within seconds what prevents it."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.errors import TrainerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
TIMEOUT = "TRAINER_CONNECT_SECONDS"
"""Environment variable: seconds to try to connect to a store that does not answer yet."""
_TIMEOUT_S = 60.0
_UNREACHABLE_TIMEOUT_S = 15.0
"""The same for a missing host, without a known name or a route."""
_NOTICE_S = 5.0
_HANDSHAKE_S = 10.0
_BUSY_TIMEOUT_S = 3.0
"""A run that has just ended may still hold its port."""


def open_store(host: str, port: int, names: str, wait: float = _BUSY_TIMEOUT_S) -> TCPStore:
    """Open a store on `port` of this machine, which the others know as `host`; `LOOPBACK`: on the loopback only.

    Args:
        names: the settings that gave host and port, for the error.
        wait: seconds to try while another program has the port.

    Raises:
        TrainerError: the port is in use, or `host` is unknown.
    """
    from torch._C._distributed_c10d import TCPStore

    find_host(host, port, names)
    handshake, deadline = timedelta(seconds=_HANDSHAKE_S), time.monotonic() + wait
    while True:
        try:
            if host == LOOPBACK:
                return loopback_store(port, handshake)
            return TCPStore(host, port, is_master=True, timeout=handshake, wait_for_workers=False, multi_tenant=True)
        except (RuntimeError, OSError) as error:  # torch's DistNetworkError is a RuntimeError
            problem = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else str(error)
            if "EADDRINUSE" not in problem or time.monotonic() > deadline:
                raise TrainerError(
                    f"port {port} of {socket.gethostname()} ({names}) cannot be opened: {_first_line(error)}. Where it "
                    f"is in use (`ss -ltnp 'sport = :{port}'` shows by which program) or reserved, give all processes "
                    f"another one, such as {free_port()}, which is free now."
                ) from None
            time.sleep(0.25)


def connect(host: str, port: int, what: str, wait: float | None = None) -> TCPStore:
    """Connect to the store that another process has opened at `host:port`.

    Args:
        what: its role, for messages: "where the processes meet (MASTER_ADDR=...)".
        wait: seconds to try while the port is still closed; None: TRAINER_CONNECT_SECONDS, or 60.

    Raises:
        TrainerError: it cannot be reached, or another program listens there.
    """
    wait = float(os.environ.get(TIMEOUT, _TIMEOUT_S)) if wait is None else wait

    def reach() -> None:
        _resolve(host, port)
        socket.create_connection((host, port), timeout=3.0).close()

    _retry(reach, wait, f"{host}:{port}, {what},")
    return store_at(host, port, what, 1.5 * _HANDSHAKE_S)


def find_host(host: str, port: int, names: str) -> None:
    """Raise TrainerError if the name `host` cannot be resolved for fifteen seconds."""
    _retry(lambda: _resolve(host, port), _UNREACHABLE_TIMEOUT_S, f"{host}:{port} ({names})")


def is_own_address(host: str, port: int) -> bool:
    """Return True if `host` is this machine."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.bind((address[0], 0))
            return True
    return False


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine as seen from `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own: str = probe.getsockname()[0]
        return own


def loopback_store(port: int = 0, timeout: timedelta = timedelta(seconds=60)) -> TCPStore:
    """Open a store that only processes of this machine can reach, by default on a free port.

    Raises:
        OSError: the port is in use, or may not be opened.
    """
    from torch._C._distributed_c10d import TCPStore

    # torch's own socket would listen on all interfaces.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(2048)
        port = listener.getsockname()[1]
        fd = os.dup(listener.fileno())
    return TCPStore(LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=fd)


def use_loopback() -> None:
    """Have gloo and NCCL listen on the loopback unless the user has chosen an interface; for runs on one machine."""
    names = [name for _, name in socket.if_nameindex()]
    interface = next((name for name in ("lo", "lo0") if name in names), None)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def store_at(host: str, port: int, what: str, wait: float) -> TCPStore:
    """Return the store that answers at `host:port`; raise TrainerError if another program does, or none in time."""
    from torch._C._distributed_c10d import TCPStore

    stores: list[TCPStore] = []
    errors: list[Exception] = []

    def try_it() -> None:
        try:
            stores.append(TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_HANDSHAKE_S)))
        except Exception as error:
            errors.append(error)

    # In a thread, because torch waits forever for an answer of a program with another protocol.
    thread = threading.Thread(target=try_it, name="connect", daemon=True)
    thread.start()
    thread.join(wait)
    if stores:
        return stores[0]
    reason = f": {_first_line(errors[0])}" if errors else ""
    raise TrainerError(
        f"{host}:{port}, {what}, is in use by something that is not torch's store{reason}. Give another port to all "
        "processes."
    )


def _retry(reach: Callable[[], None], wait: float, what: str) -> None:
    """Retry until there is no OSError; longer if the host answers but the port is still closed."""
    began, noticed = time.monotonic(), False
    while True:
        try:
            reach()
            return
        except OSError as error:
            absent, reason = not isinstance(error, ConnectionRefusedError), str(error)
        limit = min(wait, _UNREACHABLE_TIMEOUT_S) if absent and TIMEOUT not in os.environ else wait
        passed = time.monotonic() - began
        if passed >= limit:
            raise TrainerError(
                f"{what} cannot be reached: {reason} (tried for {limit:.0f} s). Look at the name or address, the "
                "network and the firewall: `nc -vz HOST PORT` from this machine. Start the process that opens the port "
                "(rank 0, or `trainer launch` on that machine), give the same port everywhere, or wait longer: "
                f"{TIMEOUT}=600."
            )
        if passed > _NOTICE_S and not noticed:
            noticed = True
            print(f"still trying to reach {what} {reason}", file=sys.stderr, flush=True)
        time.sleep(min(0.25, limit))


def _resolve(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
