"""Several processes: joining them, and talk between them. Shared by the strategies that run one process per device."""

from __future__ import annotations

import atexit
import gc
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, Store

from trainer.distributed.environment import detect_environment
from trainer.distributed.rendezvous import join_store
from trainer.launchers.restarts import exit_barrier
from trainer.module import TrainModule
from trainer.precision import Precision
from trainer.strategy import Strategy

T = TypeVar("T")


class DistributedStrategy(Strategy):
    """One process per device, joined in a torch.distributed process group."""

    multi_process: ClassVar[bool] = True
    num_nodes: int = 1

    def __init__(self, timeout_seconds: float = 1800.0) -> None:
        self.timeout = timedelta(seconds=timeout_seconds)

    def setup_environment(self, device_type: str, precision: Precision) -> None:
        environment = detect_environment()
        self.rank, self.local_rank = environment.rank, environment.local_rank
        self.world_size, self.num_nodes = environment.world_size, environment.num_nodes
        if not dist.is_initialized():
            self._join(device_type)
        super().setup_environment(device_type, precision)

    def _join(self, device_type: str) -> None:
        """Create the process group; it lives until the process ends, so that fit, test and predict share it."""
        # CPU collectives are always there too: small data is gathered without touching the device's stream.
        backend = {"cuda": "cpu:gloo,cuda:nccl", "tpu": "cpu:gloo,tpu:tpu"}.get(device_type, "gloo")
        environment = detect_environment()
        environment.export()
        store = HashStore() if self.world_size == 1 else join_store(environment, self.timeout)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self.timeout)
        atexit.register(_leave)

    @property
    def store(self) -> Store | None:
        """The key-value store that all processes share; None for a single process."""
        if self.world_size == 1:
            return None
        # torch has no public way to reach the store of the default group.
        store: Store = dist.distributed_c10d._get_default_store()
        return store

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total

    def all_gather_object(self, value: T) -> list[T]:
        gathered: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: T) -> T:
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def synchronize_buffers(self) -> None:
        if self.world_size > 1:
            broadcast([buffer for buffer in self.module.buffers() if buffer.numel()])


class StepForward(nn.Module):
    """Makes a step method the `forward`, inside which DDP and FSDP prepare their communication."""

    def __init__(self, module: TrainModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any) -> Any:
        return getattr(self.module, step)(*args)


def broadcast(tensors: list[torch.Tensor]) -> None:
    """Overwrite tensors with rank 0's values."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(parameters: list[torch.nn.Parameter], world_size: int) -> None:
    """Replace each gradient by its mean over processes.

    A gradient that only some processes have counts as zero on the others; one that none has stays None.
    """
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
    used = [p for p, somewhere in zip(parameters, has_gradient.tolist(), strict=True) if somewhere]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= world_size
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def _leave() -> None:
    # A DDP wrapper that is still alive keeps gloo's thread running into the interpreter's end, which then may abort.
    gc.collect()
    if dist.is_initialized():
        exit_barrier(dist.distributed_c10d._get_default_store(), dist.get_world_size())
        dist.destroy_process_group()
