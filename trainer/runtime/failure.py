"""The first failing process prints its traceback, once; the others say whom they follow."""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_KEY = "failure/first"
_PATIENCE_S = 5.0


def report_failure(store: Store | None, rank: int, world_size: int, error: BaseException) -> bool:
    """Print why this process ends, to stderr; call it first of all in the `except`, then raise on.

    Runs no collective and waits for nobody. With one process it prints nothing: Python itself will. With several,
    the first to come here prints its traceback under "rank 1 of 2 failed:", the later ones one line. Python's own
    traceback of the same error is left out afterwards, so that each is printed once.

    Args:
        store: shared by the processes of this run (`StopSwitch.store`), or None.
        rank, world_size: of this process.
        error: what was raised here.

    Returns:
        Whether this process was the first, as far as can be known.
    """
    if world_size == 1:
        return True
    first = _claim(store, rank)
    if first == rank:
        text = f"rank {rank} of {world_size} failed:\n{''.join(traceback.format_exception(error))}"
    elif first is None:
        # The store is gone, with the process that held it: most likely this failure is a consequence.
        text = (
            f"rank {rank} stops, too late to know whether another rank failed first: "
            f"{''.join(traceback.format_exception_only(error))}"
        )
    else:
        text = f"rank {rank} stops because rank {first} failed\n"
    sys.stdout.flush()
    # One write: lines of several processes would mix otherwise.
    sys.stderr.write(text)
    sys.stderr.flush()
    _print_no_more(error)
    return first == rank


def first_failure(store: Store) -> int | None:
    """The rank that failed first, or None while all is well. Does not wait."""
    return int(store.get(_KEY)) if store.check([_KEY]) else None


def _claim(store: Store | None, rank: int) -> int | None:
    """The first rank to come here; None if the store does not answer."""
    if store is None:
        return rank
    answer: list[int] = []

    def ask() -> None:
        try:
            answer.append(int(store.compare_set(_KEY, "", str(rank))))
        except Exception:
            # Whatever is wrong with the store must not hide the error that is being reported.
            return

    # In a thread, because an answer from a machine that is gone could take minutes.
    thread = threading.Thread(target=ask, name="report-failure", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return answer[0] if answer else None


def _print_no_more(error: BaseException) -> None:
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            previous(kind, value, trace)

    sys.excepthook = hook
