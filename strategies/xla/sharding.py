"""Shard tensors over the devices of one SPMD process, and copy them back to the host in full."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

Spec = tuple[str | None, ...]
"""The axis of the mesh over which each dimension of a tensor is sharded; None: not sharded."""

AXIS = "fsdp"
"""Name of the mesh's only axis, along which all devices lie."""


class SpmdMesh:
    """All devices of this process, in a row. Made when SPMD is on; imports torch_xla."""

    def __init__(self) -> None:
        import numpy as np
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.spmd as spmd
        import torch_xla.runtime as xr

        self._xm, self._spmd, self._binding = xm, spmd, torch_xla._XLAC
        self.devices: int = xr.global_runtime_device_count()
        self.kind: str = xr.device_type() or "unknown"
        """"CPU", "TPU", ..."""
        self.device: torch.device = torch_xla.device()
        self.mesh: Any = spmd.Mesh(np.arange(self.devices), (self.devices,), (AXIS,))

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send a tensor of a batch from the host to the devices, sharded by its first dimension."""
        if tensor.device.type != "cpu":
            return tensor.to(self.device)
        sharding = self._spmd.ShardingSpec(self.mesh, _by_rows(tensor)) if tensor.dim() else None
        (sent,) = self._xm.send_cpu_data_to_device([tensor], self.device, sharding)
        return sent  # type: ignore[no-any-return]

    def place(self, tensor: torch.Tensor, spec: Spec) -> None:
        """Shard a tensor on the devices by the spec. Every sharding gives the same results."""
        if self.is_sharded(tensor):
            self._spmd.clear_sharding(tensor)
        # A replicated tensor is marked, too: a program depends on whether it was.
        self._spmd.mark_sharding(tensor, self.mesh, spec)

    def shard_rows(self, tensor: torch.Tensor) -> None:
        """Shard a recorded result, such as activations, by its first dimension."""
        if tensor.dim():
            self._spmd.mark_sharding(tensor, self.mesh, _by_rows(tensor))

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether each device holds only a part of the tensor."""
        return "devices=" in self._binding._get_xla_sharding_spec(tensor)

    def spec_of_weight(self, tensor: torch.Tensor) -> Spec:
        """Return how FSDPv2 shards a weight: by its largest dimension; one that is too small for that is replicated."""
        spec: list[str | None] = [None] * tensor.dim()
        if tensor.dim() and max(tensor.shape) >= self.devices:
            spec[tensor.shape.index(max(tensor.shape))] = AXIS
        return tuple(spec)

    def materialize(self, tensors: list[torch.Tensor]) -> None:
        """Wait until these tensors have their values. Unlike a step's end, it leaves the random numbers unchanged."""
        if tensors:
            self._xm.unlazy(tensors)
            self._xm.wait_device_ops()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a full copy on the CPU. A sharded tensor has to be materialized."""
        tensor = tensor.detach()
        if tensor.device.type != "xla" or not self.is_sharded(tensor):
            return tensor.cpu()
        # tensor.cpu() would compile a graph that puts the parts together, every time.
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard in self._spmd.xla_sharding.wrap_as_sharded_tensor(tensor).local_shards:
            # Devices beyond a dimension's end have padding only, and the last one before it has some.
            lengths = [len(range(*part.indices(size))) for part, size in zip(shard.indices, tensor.shape, strict=True)]
            full[tuple(shard.indices)] = shard.data[tuple(slice(length) for length in lengths)]
        return full


def _by_rows(tensor: torch.Tensor) -> Spec:
    return (AXIS, *[None] * (tensor.dim() - 1))


def copied_to_host(values: Any, mesh: SpmdMesh) -> Any:
    """Copy the tensors in nested dicts and lists to the CPU. One tensor in several places stays one."""
    tensors = {id(one): one for one in tree_leaves(values) if isinstance(one, torch.Tensor)}
    mesh.materialize([tensor for tensor in tensors.values() if tensor.device.type == "xla"])
    copies = {key: mesh.to_host(tensor) for key, tensor in tensors.items()}
    return tree_map_only(torch.Tensor, lambda tensor: copies[id(tensor)], values)


def to_device_preserving_ties(module: nn.Module, device: torch.device) -> None:
    """Call `module.to(device)` such that one parameter or buffer in several places stays one.

    Moving to a device of another kind makes new parameters, one for each place.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((table, name))
    module.to(device)
    for (first, name), *others in places.values():
        for table, other in others:
            table[other] = first[name]
