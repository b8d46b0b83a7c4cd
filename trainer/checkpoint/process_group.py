"""The group of processes that reads or writes one checkpoint, with the two collectives that this needs."""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from trainer.checkpoint.disk import WriteError
from trainer.distributed.encoding import from_bytes, to_bytes
from trainer.distributed.process_group import SingleProcess
from trainer.fault_tolerance.failure import first_failure

T = TypeVar("T")

_POLL_S = 0.01


class ProcessGroup(Protocol):
    """A group of processes, such as the `processes` of a strategy."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    def all_gather_object(self, value: T) -> list[T]:
        """Return every process's `value`, ordered by rank, on every process."""

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` on every process."""


SINGLE_PROCESS: ProcessGroup = SingleProcess()


class StoreProcessGroup:
    """Collectives over the key-value store, for background threads, which must not use the process group of training.

    Args:
        store: a connection that only this object uses.
        name: of the group, the same on all processes and never used before.
        timeout: seconds to wait for the other processes.
        sent: keys that this process has set in earlier writes of the same thread. All have read these when all have
            begun another exchange; then they are deleted from the store.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str, timeout: float, sent: list[str]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = store  # torch's stubs know only str values
        self._name = name
        self._timeout = timeout
        self._exchanges = 0
        self._sent = sent

    def all_gather_object(self, value: T) -> list[T]:
        """See `ProcessGroup`.

        Raises:
            WriteError: another process has failed, or does not answer.
        """
        self._exchanges += 1
        self._store.set(self._key(self.rank), to_bytes(value))
        values = [from_bytes(self._get(self._key(rank))) for rank in range(self.world_size)]
        for key in self._sent:
            self._store.delete_key(key)
        self._sent[:] = [self._key(self.rank)]
        return values

    def broadcast_object(self, value: T) -> T:
        """See `ProcessGroup`. Raises as `all_gather_object`."""
        self._exchanges += 1
        if self.rank == 0:
            self._store.set(self._key(0), to_bytes(value))
            self._sent.append(self._key(0))
            return value
        received: T = from_bytes(self._get(self._key(0)))
        return received

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._exchanges}/{rank}"

    def _get(self, key: str) -> bytes:
        end = time.monotonic() + self._timeout
        # Polled, because a failure of another process could not end a blocking wait.
        while not self._store.check([key]):
            if first_failure(self._store) is not None or time.monotonic() > end:
                raise WriteError("the checkpoint was not finished: another process failed or does not answer")
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))
