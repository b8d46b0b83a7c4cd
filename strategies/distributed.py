"""Join several processes, one per device; the base of their strategies."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from trainer.distributed.environment import Environment, detect_environment
from trainer.distributed.process_group import SingleProcess, TorchProcessGroup
from trainer.distributed.rendezvous import join_store
from trainer.launchers.restarts import exit_barrier
from trainer.module import TrainModule
from trainer.precision import NULL_CONTEXT, Precision
from trainer.strategy import Strategy


class DistributedStrategy(Strategy):
    """One process per device, joined in a torch.distributed process group."""

    multi_process: ClassVar[bool] = True

    def __init__(self, timeout_seconds: float = 1800.0) -> None:
        self.timeout = timedelta(seconds=timeout_seconds)

    def setup_environment(self, device_type: str, precision: Precision, device_ids: list[int] | None = None) -> None:
        here = detect_environment()
        if not dist.is_initialized():
            self._join(here, device_type)
        kind = TorchProcessGroup if here.world_size > 1 else SingleProcess
        self.processes = kind(here.rank, here.local_rank, here.world_size, here.num_nodes)
        super().setup_environment(device_type, precision, device_ids)

    def _join(self, here: Environment, device_type: str) -> None:
        """Create the process group; it lives until the process ends, so that fit, test and predict share it."""
        # CPU collectives are always there too: small data is gathered without touching the device's stream.
        own = "tpu" if device_type == "tpu" else dist.Backend.default_device_backend_map.get(device_type, "gloo")
        backend = "gloo" if own == "gloo" else f"cpu:gloo,{device_type}:{own}"
        here.export()
        store = HashStore() if here.world_size == 1 else join_store(here, self.timeout)
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world_size, timeout=self.timeout)
        atexit.register(_leave)


class StepForward(nn.Module):
    """Make a step method the `forward`, around which DDP, FSDP and DeepSpeed do their communication.

    Args:
        context: returns the context of each call of a step method.
    """

    def __init__(
        self, module: TrainModule, context: Callable[[], AbstractContextManager[Any]] = lambda: NULL_CONTEXT
    ) -> None:
        super().__init__()
        self.module = module
        self.context = context

    def forward(self, step: str, *args: Any) -> Any:
        with self.context():
            return getattr(self.module, step)(*args)


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
