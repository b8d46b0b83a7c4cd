"""Meeting: what all processes have to call is told, where only some of them do, instead of waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from trainer.errors import ConfigError
from trainer.fault_tolerance.failure import first_failure

_ASKED = "meeting/asked"
_ASK_AFTER_S = 1.0


class CollectiveCheck:
    """Before a collective that users may call: do all processes come, and for the same?

    A process that waits asks in the store how far the others are, and a thread of theirs answers. One that has begun a
    later window of training has passed the place without calling.

    Args:
        store: shared by the processes of this run (`StopCoordinator.store`).
        rank, world_size: of this process.
        passed: gives how many windows this process has begun; more when it is leaving.
    """

    def __init__(self, store: Store, rank: int, world_size: int, passed: Callable[[], int]) -> None:
        self._store: Any = store  # torch's stubs do not know all methods
        self._rank, self._world_size = rank, world_size
        self._passed = passed
        self._number = 0

    def meet(self, what: str) -> None:
        """Return when all processes are here for `what`. From the main thread only.

        Raises:
            ConfigError: another process has gone on without, or is in another call. RuntimeError: another has failed.
        """
        self._number += 1
        self._store.set(self._key(self._rank), what)
        if self._number > 2:
            # Everybody has left the one before the last.
            self._store.delete_key(f"meeting/{self._number - 2}/{self._rank}")
        begun, pause = time.monotonic(), 0.001
        for rank in range(self._world_size):
            while not self._store.check([self._key(rank)]):
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
                if time.monotonic() - begun > _ASK_AFTER_S:
                    self._ask(what)
            other = self._store.get(self._key(rank)).decode()
            if other != what:
                raise ConfigError(
                    f"rank {self._rank} calls {what}, and rank {rank} calls {other}: the processes do not do the same. "
                    "Look for code that depends on the rank, or on data or time that differ between them."
                )

    def answer(self, store: Store) -> None:
        """From a thread with a store of its own: if somebody asks, say how far this process is."""
        if store.check([_ASKED]):
            store.set(self._answer_key(self._rank), str(self._passed()))

    def _ask(self, what: str) -> None:
        self._store.set(_ASKED, "1")
        if first_failure(self._store) is not None:
            raise RuntimeError(f"{what} was not finished, because another process failed")
        for rank in range(self._world_size):
            if self._store.check([self._answer_key(rank)]) and not self._store.check([self._key(rank)]):
                windows = int(self._store.get(self._answer_key(rank)))
                if windows > self._passed():
                    raise ConfigError(
                        f"rank {self._rank} calls {what}, and rank {rank} has gone on without. All processes have to "
                        "call it, at the same place: take it out of `if trainer.is_global_zero`, `if rank == 0`, and "
                        "conditions that differ between the processes."
                    )

    def _key(self, rank: int) -> str:
        return f"meeting/{self._number}/{rank}"

    def _answer_key(self, rank: int) -> str:
        return f"meeting/answer/{rank}"
