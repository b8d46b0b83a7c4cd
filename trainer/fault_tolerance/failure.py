"""Print the traceback of the first failing process once; the others name the process that they follow."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from trainer.fault_tolerance.stacks import raised_in

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "failure/first"
_STORE_TIMEOUT_S = 5.0
_LOST_CONNECTION_GRACE_S = 2.0
"""Seconds for which a process that lost a connection waits for a report of the cause."""
_HOOKS_TIMEOUT_S = 30.0
"""Seconds that the hooks of a run that ends with an error may take."""
_EXIT_TIMEOUT_S = 5.0
_leaving, _left = threading.Event(), threading.Event()
_exit_is_limited = False
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Messages of gloo and NCCL for a lost process."""
_GONE = "gone"
SAME_CALLS = (
    "All processes have to make the same calls, at the same place: take them out of `if trainer.is_global_zero`, "
    "`if rank == 0`, and conditions that differ between the processes."
)
"""Advice in messages."""


@contextmanager
def exit_in_time(what: str) -> Iterator[None]:
    """End this process with exit code 1 if the block does not end in time.

    For user code after an error: a collective may be left that never ends, and whatever waits for the device then waits
    for ever.
    """
    ended = threading.Event()
    threading.Thread(
        target=_exit_unless, args=(ended, _HOOKS_TIMEOUT_S, what), name="exit-in-time", daemon=True
    ).start()
    try:
        yield
    finally:
        ended.set()


def limit_exit() -> None:
    """Limit the time that `leaving_process_group` may take, after an error of a run of several processes.

    Destroying a process group of NCCL waits for its outstanding collectives, which after an error may never end.
    """
    global _exit_is_limited
    if not _exit_is_limited:
        _exit_is_limited = True
        # Now, because a thread cannot be started while the interpreter ends.
        threading.Thread(target=_limit_leaving, name="limit-exit", daemon=True).start()


@contextmanager
def leaving_process_group() -> Iterator[None]:
    """Destroy the process group in this block, at the interpreter's end."""
    _leaving.set()
    yield
    _left.set()


def _limit_leaving() -> None:
    _leaving.wait()
    _exit_unless(_left, _EXIT_TIMEOUT_S, "the process group's destruction")


def _exit_unless(ended: threading.Event, seconds: float, what: str) -> None:
    if not ended.wait(seconds):
        write_error(f"{what} did not end within {seconds:.0f} s after an error: this process exits\n")
        os._exit(1)


def report_failure(store: Store | None, rank: int, world_size: int, error: BaseException) -> bool:
    """Print to stderr why this process ends, and limit its exit; call it first in the `except` block, then re-raise.

    Runs no collective, and waits at most two seconds, for the cause of a lost connection. With one process it prints
    nothing, since Python will, and neither for KeyboardInterrupt or SystemExit. With several, the first one to fail
    prints its traceback under "rank 1 of 2 failed:", the later ones one line. Python's own traceback of the same error
    is suppressed, so that each is printed once.

    Args:
        store: shared by the processes of this run (`StopCoordinator.store`), or None.
        rank, world_size: of this process.
        error: what was raised here.

    Returns:
        True if this process failed first, as far as can be known.
    """
    if world_size == 1:
        return True
    limit_exit()
    if not isinstance(error, Exception):
        return False
    first = _register_first_failure(store, rank, _LOST_CONNECTION_GRACE_S if lost_connection(error) else 0.0)
    if first == str(rank):
        text = f"rank {rank} of {world_size} failed:\n{''.join(traceback.format_exception(error))}"
    elif first is None:
        # The store is gone with the process that held it: most likely this failure is a consequence.
        text = (
            f"rank {rank} stops, too late to know whether another rank failed first: "
            f"{''.join(traceback.format_exception_only(error))}"
        )
    else:
        place = f", in {raised_in(error)}" if _GONE in first else ""
        text = f"rank {rank} stops because {_describe_failure(first)}{place}\n"
    write_error(text)
    _suppress_traceback(error)
    return first == str(rank)


def report_dead_process(store: Store, rank: int, world_size: int) -> None:
    """Report a process that died without reporting an error, unless another failed before; printed once."""
    claim = f"{rank} {_GONE}, says process {os.getpid()}"
    if store.compare_set(_KEY, "", claim).decode() == claim:
        write_error(
            f"rank {rank} of {world_size} is gone: it ended without reporting an error. Somebody killed it (the "
            "kernel does when memory runs out), it called os._exit or sys.exit, or C code aborted it: gloo does "
            "(EnforceNotMet) when the processes are in different collectives, or give tensors of different sizes.\n"
        )


def first_failure(store: Store) -> int | None:
    """Return the rank that failed first, or None. Does not wait."""
    return int(store.get(_KEY).split()[0]) if store.check([_KEY]) else None


def follow_failure(store: Store, rank: int) -> None:
    """Print that this process ends because another failed; for a process that cannot call `report_failure`."""
    write_error(f"rank {rank} stops because {_describe_failure(store.get(_KEY).decode())}\n")


def lost_connection(error: BaseException) -> bool:
    """Return True if `error` only says that the connection to another process is lost."""
    return any(text in str(error) for text in _LOST)


def write_error(text: str) -> None:
    """Write to stderr in one piece, so that the lines of several processes do not mix."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()


def _describe_failure(claim: str) -> str:
    return f"rank {claim.split()[0]} {'is gone' if _GONE in claim else 'failed'}"


def _register_first_failure(store: Store | None, rank: int, wait: float) -> str | None:
    """Register this failure unless one is registered; return the first one, or None if the store does not answer.

    `wait`: seconds to wait for another process to register first.
    """
    if store is None:
        return str(rank)
    answer: list[str] = []

    def ask() -> None:
        try:
            deadline = time.monotonic() + wait
            while wait and not store.check([_KEY]) and time.monotonic() < deadline:
                time.sleep(0.05)
            answer.append(store.compare_set(_KEY, "", str(rank)).decode())
        except Exception:
            # A problem with the store must not hide the error that is being reported.
            return

    # In a thread, because an answer from a machine that is gone could take minutes.
    thread = threading.Thread(target=ask, name="report-failure", daemon=True)
    thread.start()
    thread.join(_STORE_TIMEOUT_S)
    return answer[0] if answer else None


def _suppress_traceback(error: BaseException) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            previous(kind, value, trace)

    sys.excepthook = hook
