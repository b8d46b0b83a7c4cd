"""The processes of a run, and how they exchange values: alone, or through torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

T = TypeVar("T")


class SingleProcess:
    """One process: it has nobody to talk to. `TorchProcessGroup` says the same for several."""

    def __init__(self, rank: int = 0, local_rank: int = 0, world_size: int = 1, num_nodes: int = 1) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.num_nodes = num_nodes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    @property
    def store(self) -> Store | None:
        """The key-value store that all processes share; None for a single process."""
        return None

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, on its device and without reading it on the host."""
        return value

    def all_gather_object(self, value: T) -> list[T]:
        """Return every process's `value` (small, picklable data), in the order of ranks, on every process."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` on every process."""
        return value

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's values."""

    def barrier(self) -> None:
        """Wait until every process is here."""


class TorchProcessGroup(SingleProcess):
    """The default process group of torch.distributed, which has been joined."""

    @property
    def store(self) -> Store | None:
        # torch has no public way to reach the store of the default group.
        store: Store = dist.distributed_c10d._get_default_store()
        return store

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def all_gather_object(self, value: T) -> list[T]:
        gathered: list[Any] = [value] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def barrier(self) -> None:
        dist.barrier()
