"""Explain a collective that failed because another process has come to the end of its program."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, format_ranks
from trainer.fault_tolerance.failure import SAME_CALLS, lost_connection, write_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def record_end(store: Store, rank: int) -> None:
    """Record that this program has come to its end without an error; before its connections are closed."""
    if not hasattr(sys, "last_value"):  # which Python sets when an error ends the program
        store.set(_key(rank), "1")


def has_ended(store: Any, rank: int) -> bool:
    """Whether the program of another process has come to its end without an error."""
    return bool(store.check([_key(rank)]))


def explain_lost_connection(
    error: BaseException, store: Store | None, rank: int, world_size: int
) -> ConfigError | None:
    """Return an error, whose cause is `error`, that names the processes whose programs have ended; None if none has.

    Torch says "Connection closed by peer", as of a process that crashed.
    """
    if store is None or not lost_connection(error):
        return None
    try:
        ended = [other for other in range(world_size) if store.check([_key(other)])]
    except RuntimeError:  # the process that hosts the store has ended
        return None
    if not ended:
        return None
    explained = ConfigError(
        f"rank {rank} waits for all processes, in the call that the traceback shows, and {format_ranks(ended)} "
        f"{'has' if len(ended) == 1 else 'have'} come to the end of the program. {SAME_CALLS}"
    )
    explained.__cause__ = error
    return explained


def explain_uncaught_errors(store: Store, rank: int, world_size: int) -> None:
    """Print such an explanation below the traceback of an error that ends this program, from now on."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous(kind, value, trace)
        explained = explain_lost_connection(value, store, rank, world_size)
        if explained is not None:
            write_error(f"{explained}\n")

    sys.excepthook = hook


def _key(rank: int) -> str:
    return f"trainer/ended/{rank}"
