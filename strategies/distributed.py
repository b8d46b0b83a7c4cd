"""Join several processes, one per device; the base of their strategies."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim import Optimizer

from trainer.arguments import PositiveFloat
from trainer.distributed.environment import Environment, detect_environment
from trainer.distributed.process_group import SingleProcess, TorchProcessGroup
from trainer.distributed.rendezvous import join_store
from trainer.errors import ConfigError
from trainer.fault_tolerance import flight_recorder
from trainer.fault_tolerance.collective_check import record_end
from trainer.fault_tolerance.failure import leaving_process_group
from trainer.launchers.restarts import exit_barrier
from trainer.module import TrainModule
from trainer.precision import NULL_CONTEXT, Precision
from trainer.seed import derive_seed, isolated_rng, seed_generators
from trainer.strategy import Strategy


class DistributedStrategy(Strategy):
    """One process per device, joined in a torch.distributed process group."""

    multi_process: ClassVar[bool] = True

    def __init__(self, timeout_seconds: PositiveFloat = 1800.0) -> None:
        self.timeout = timedelta(seconds=timeout_seconds)

    def setup_environment(self, device_type: str, precision: Precision, device_ids: list[int] | None = None) -> None:
        here = detect_environment()
        if dist.is_initialized() and device_type == "cuda":
            check_backends(here.world_size)
        if not dist.is_initialized():
            self._join(here, device_type)
        kind = TorchProcessGroup if here.world_size > 1 else SingleProcess
        self.processes = kind(here.rank, here.local_rank, here.world_size, here.num_nodes)
        super().setup_environment(device_type, precision, device_ids)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> None:
        if not getattr(optimizer, "bf16_stochastic_round", False):
            super().step(optimizer, closure, **options)
            return
        # torchao's optimizers round at random: by the same numbers everywhere, so that replicas keep equal bits.
        steps = int(next((state["step"] for state in optimizer.state.values()), 0))
        with isolated_rng(self.device):
            seed_generators(derive_seed("rounding", steps))
            super().step(optimizer, closure, **options)

    def _join(self, here: Environment, device_type: str) -> None:
        """Create the process group; it lives until the process ends, so that fit, test and predict share it."""
        # CPU collectives are always there too: small data is gathered without touching the device's stream.
        own = "tpu" if device_type == "tpu" else dist.Backend.default_device_backend_map.get(device_type, "gloo")
        backend = "gloo" if own == "gloo" else f"cpu:gloo,{device_type}:{own}"
        here.export()
        flight_recorder.switch_on()
        store = HashStore() if here.world_size == 1 else join_store(here, self.timeout)
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world_size, timeout=self.timeout)
        atexit.register(_leave, here.rank)


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


_BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def average_gradients(
    parameters: list[torch.nn.Parameter], world_size: int, sparse: Collection[torch.Tensor] = ()
) -> None:
    """Replace each gradient by its mean over processes, on the device and without reading it.

    A gradient with a graph (`create_graph=True`) keeps it: the mean of what the processes differentiate by their own
    graphs is the derivative of the mean.

    A gradient that only some processes have counts as zero on the others; one that none has stays None. Only a process
    that lacks gradients has to read which ones the others have.

    Args:
        sparse: the parameters with sparse gradients.
    """
    if not parameters:
        return
    present = torch.ones(len(parameters), device=parameters[0].device)
    lacking = [number for number, parameter in enumerate(parameters) if parameter.grad is None]
    for number in lacking:
        present[number] = 0
        parameters[number].grad = torch.zeros_like(parameters[number])
    flags = dist.all_reduce(present, async_op=True)
    for parameter in (p for p in parameters if p in sparse):
        assert parameter.grad is not None
        gradient = parameter.grad if parameter.grad.is_sparse else parameter.grad.to_sparse(1)
        parameter.grad = gradient.coalesce()
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    dense: list[Any] = [p.grad for p in parameters if p not in sparse]
    for gradients in _buckets(dense):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= world_size
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))
    flags.wait()
    if lacking:
        somewhere = present.tolist()
        for number in lacking:
            if not somewhere[number]:
                parameters[number].grad = None


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients, of one dtype and device at a time, in lists of about `_BUCKET_BYTES`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for of_kind in kinds.values():
        bucket, size = [], 0
        for gradient in of_kind:
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def check_backends(world_size: int) -> None:
    """Check that the existing process group has a backend for the GPUs, and one for the CPU.

    Raises:
        ConfigError: one is missing. A group of one process is destroyed instead, and made again.
    """
    backends = dist.get_backend_config()
    if "cuda:nccl" in backends and "cpu:gloo" in backends:
        return
    if world_size == 1:
        dist.destroy_process_group()
        return
    raise ConfigError(
        f"the process group of this program has the backends {backends}, and a run on GPUs needs cpu:gloo,cuda:nccl: "
        "leave init_process_group to the trainer, or call init_process_group('cpu:gloo,cuda:nccl')."
    )


def _leave(rank: int) -> None:
    # A DDP wrapper that is still alive keeps gloo's thread running into the interpreter's end, which then may abort.
    gc.collect()
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        exit_barrier(store, dist.get_world_size())
        with suppress(RuntimeError):  # the process that hosts the store has left first
            record_end(store, rank)
        with leaving_process_group():
            dist.destroy_process_group()
