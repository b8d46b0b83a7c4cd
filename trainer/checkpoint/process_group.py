"""The processes that write one checkpoint together, and how they talk: through the strategy, or through the store."""

from __future__ import annotations

import pickle
import time
from typing import Any, ClassVar, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from trainer.checkpoint.disk import WriteError
from trainer.fault_tolerance.failure import first_failure

T = TypeVar("T")

_POLL_S = 0.01


class ProcessGroup(Protocol):
    """What writing and reading together needs; a `Strategy` has it."""

    @property
    def rank(self) -> int:
        """Of this process."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    def gather_objects(self, value: T) -> list[T]:
        """Every process's `value`, in the order of ranks, on every process."""

    def broadcast_object(self, value: T) -> T:
        """Rank 0's `value` on every process."""


class _Alone:
    """A single process."""

    rank: ClassVar[int] = 0
    world_size: ClassVar[int] = 1

    def gather_objects(self, value: T) -> list[T]:
        return [value]

    def broadcast_object(self, value: T) -> T:
        return value


SINGLE_PROCESS: ProcessGroup = _Alone()


class StorePeers:
    """Talk through the key-value store, for threads beside the training, which must not use its process group.

    Args:
        store: shared by the processes; used by this object only.
        name: of the conversation, the same on all processes and never used before.
        timeout: seconds to wait for the others.
    """

    def __init__(self, store: Store, rank: int, world_size: int, name: str, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store: Any = store  # torch's stubs know only text as a value
        self._name = name
        self._timeout = timeout
        self._exchanges = 0

    def gather_objects(self, value: T) -> list[T]:
        """As `ProcessGroup`.

        Raises:
            WriteError: another process has failed, or does not answer.
        """
        self._exchanges += 1
        self._store.set(self._key(self.rank), pickle.dumps(value))
        return [pickle.loads(self._get(self._key(rank))) for rank in range(self.world_size)]

    def broadcast_object(self, value: T) -> T:
        """As `gather_objects`, of rank 0 only."""
        self._exchanges += 1
        if self.rank == 0:
            self._store.set(self._key(0), pickle.dumps(value))
            return value
        received: T = pickle.loads(self._get(self._key(0)))
        return received

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._exchanges}/{rank}"

    def _get(self, key: str) -> bytes:
        end = time.monotonic() + self._timeout
        # Asked again and again, because a wait in the store could not be ended by a failure elsewhere.
        while not self._store.check([key]):
            if first_failure(self._store) is not None or time.monotonic() > end:
                raise WriteError("the checkpoint was not finished: another process failed or does not answer")
            time.sleep(_POLL_S)
        return bytes(self._store.get(key))
