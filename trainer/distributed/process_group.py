"""Exchange values between the processes of a run, through torch.distributed; or within a single process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainer.distributed.encoding import MAX_BYTES, from_bytes, to_bytes
from trainer.errors import TrainerError

T = TypeVar("T")

_LOG = logging.getLogger("trainer")
_SILENT = logging.Logger("trainer")  # not registered, so that no configuration of logging enables it
_SILENT.disabled = True


class SingleProcess:
    """The process group of a single process, whose collectives return at once; see `TorchProcessGroup` for several."""

    def __init__(self, rank: int = 0, local_rank: int = 0, world_size: int = 1, num_nodes: int = 1) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.world_size = world_size
        self.num_nodes = num_nodes
        self.reader_of = tuple(range(world_size))
        """The number of the reader of each rank: processes with the same number hold parts of one model, and read the
        same samples."""
        self.reporters = tuple(range(world_size))
        """The rank that reports for each reader: its losses, logged values and predictions count."""
        self.mesh: Any = None
        """The `DeviceMesh` of the processes, under a strategy that has one."""
        self.begun = 0
        """Number of collectives begun so far; equal on processes at the same point of the run."""
        self.wait_for_all: Callable[[str], None] = _no_others
        """Waits, during a run, until all processes call it with the same text; raises ConfigError if they do not."""

    @property
    def log(self) -> logging.Logger:
        """The logger "trainer" on rank 0; on other processes a logger that drops all messages."""
        return _LOG if self.rank == 0 else _SILENT

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    @property
    def reader(self) -> int:
        """The number of this process among those that read different samples; see `readers`."""
        return self.reader_of[self.rank]

    @property
    def readers(self) -> int:
        """Number of processes, or of groups of processes with one model, that read different samples."""
        return len(self.reporters)

    @property
    def reports(self) -> bool:
        """Whether the losses, logged values and predictions of this process count."""
        return self.rank in self.reporters

    @property
    def store(self) -> Store | None:
        """The key-value store that all processes share; None for a single process."""
        return None

    def sum_over_readers(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the readers, as `sum` does."""
        return value

    def gather_reports(self, value: T) -> list[T]:
        """Return the values of the processes that report in the order of readers, on every process."""
        values = self.all_gather_object(value)
        return [values[rank] for rank in self.reporters]

    def broadcast_over_readers(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with the values of reader 0, of its process that holds the same part of the model."""

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, on its device and without reading it on the host.

        Whole numbers and booleans are added as int64, as by `torch.sum`.
        """
        return value if value.is_floating_point() or value.is_complex() else value.long()

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks, on every process.

        Args:
            value: data of this process; see `encoding.to_bytes` for the types.
        """
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's `value` on every process."""
        return value

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite tensors with rank 0's values."""

    def barrier(self) -> None:
        """Wait until every process is here."""


def _no_others(call: str) -> None:
    """Wait for nobody."""


class TorchProcessGroup(SingleProcess):
    """The default process group of torch.distributed, which has been joined."""

    _among_readers: dist.ProcessGroup | None = None
    """The processes that hold the same part of the model for the readers; None: all."""

    def set_readers(self, reader_of: Sequence[int], reporters: Sequence[int], among_readers: dist.ProcessGroup) -> None:
        """Have groups of processes read as one.

        Args:
            reader_of, reporters: see the attributes.
            among_readers: the group of this process and its counterparts of the other readers, in the order of readers.
        """
        self.reader_of, self.reporters = tuple(reader_of), tuple(reporters)
        self._among_readers = among_readers

    @property
    def store(self) -> Store | None:
        # torch has no public way to reach the store of the default group.
        store: Store = dist.distributed_c10d._get_default_store()
        return store

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        self.begun += 1
        total = super().sum(value).clone()
        dist.all_reduce(total)
        return total

    def all_gather_object(self, value: T) -> list[T]:
        self.begun += 1
        # The device is named, because modules are built under another default device.
        own = _message(value)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([own.numel()], device="cpu"))
        numbers = [_checked_size(size) for size in sizes]
        parts = [torch.empty(max(numbers), dtype=torch.uint8, device="cpu") for _ in numbers]
        dist.all_gather(parts, torch.nn.functional.pad(own, (0, max(numbers) - own.numel())))
        messages = [part[:number] for part, number in zip(parts, numbers, strict=True)]
        _require_one_call(messages)
        return [from_bytes(message.numpy().data[_CALLER_BYTES:]) for message in messages]

    def broadcast_object(self, value: T) -> T:
        self.begun += 1
        own = torch.frombuffer(bytearray(to_bytes(value if self.rank == 0 else None)), dtype=torch.uint8)
        size = torch.tensor([own.numel()], device="cpu")
        dist.broadcast(size, src=0)
        received = own if self.rank == 0 else torch.empty(_checked_size(size), dtype=torch.uint8, device="cpu")
        dist.broadcast(received, src=0)
        decoded: T = from_bytes(received.numpy().data)
        return value if self.rank == 0 else decoded

    def sum_over_readers(self, value: torch.Tensor) -> torch.Tensor:
        self.begun += 1
        total = value.clone()
        dist.all_reduce(total, group=self._among_readers)
        return total

    def broadcast_over_readers(self, tensors: Iterable[torch.Tensor]) -> None:
        self.begun += 1
        for tensor in tensors:
            broadcast_into(tensor, self._among_readers)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        self.begun += 1
        for tensor in tensors:
            broadcast_into(tensor)

    def barrier(self) -> None:
        self.begun += 1
        dist.barrier()


def broadcast_into(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite a tensor of any dtype and layout with the values of a group's first process; None: of rank 0.

    Of a distributed or quantized tensor this is done with the tensors that it consists of, on this process.
    """
    if is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in (one for one in parts if isinstance(one, torch.Tensor)):  # a distributed tensor names its mesh, too
            broadcast_into(part, group)
        return
    own = tensor.detach()
    for dim, stride in enumerate(own.stride()):
        if stride == 0:  # of `expand`: one element in several places
            own = own.narrow(dim, 0, min(1, own.shape[dim]))
    if own.numel() and dist.get_world_size(group) > 1:
        # As bytes: gloo knows few dtypes. The message is a tensor's memory from its first element on, without gaps.
        dense = own.contiguous()
        dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)
        if dense.data_ptr() != own.data_ptr():
            own.copy_(dense)


def _checked_size(size: torch.Tensor) -> int:
    number = int(size)
    if not 0 < number <= MAX_BYTES:
        raise TrainerError(f"another process announces a message of {number} bytes: it is not of this run")
    return number


_CALLER_BYTES = 96
"""Length of the name of the calling function, which begins a message."""


def _message(value: Any) -> torch.Tensor:
    """Return a value as bytes, behind the name of the function that exchanges it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_name == "<lambda>"):
        frame = frame.f_back
    caller = f"{frame.f_code.co_name} of {Path(frame.f_code.co_filename).name}".encode()[:_CALLER_BYTES]
    return torch.frombuffer(bytearray(caller.ljust(_CALLER_BYTES, b"\0") + to_bytes(value)), dtype=torch.uint8)


def _require_one_call(messages: list[torch.Tensor]) -> None:
    """Raise TrainerError if the messages of all ranks come from different functions."""
    first, *others = map(_caller_of, messages)
    rank = next((rank for rank, caller in enumerate(others, 1) if caller != first), None)
    if rank is not None:
        raise TrainerError(
            f"rank 0 is in {first}, and rank {rank} in {others[rank - 1]}: the processes do not make the same calls. "
            "All have to make them at the same place, also calls of torch.distributed: take them out of "
            "`if trainer.is_global_zero`, `if rank == 0`, and conditions that differ between the processes."
        )


def _caller_of(message: torch.Tensor) -> str:
    caller = bytes(message[:_CALLER_BYTES].numpy()).rstrip(b"\0").decode(errors="replace")
    return caller if caller.isprintable() and " of " in caller else "a call that is not the trainer's"
