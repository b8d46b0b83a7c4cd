"""Turn torch's distributed tensors into the shards that checkpoints hold, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.checkpoint.shards import EMPTY_SLICE, FlatSlice, Loadable, Shard, materialize, read_slice, slice_of_box
from trainer.model.weights import check_fit


def local_slice(tensor: DTensor) -> FlatSlice:
    """Return which elements of the full tensor this process holds."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice_of_box(tensor.shape, offset, shape)


def shard_of(tensor: DTensor) -> Shard:
    """Return this process's shard; of replicas the first process along each dimension of the mesh writes."""
    if any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    replicas = [here for here, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()]
    extent = local_slice(tensor) if not any(replicas) else EMPTY_SLICE
    return Shard(tensor.to_local().detach(), tuple(tensor.shape), extent)


def as_shards(value: Any, known: dict[int, Shard] | None = None) -> Any:
    """Return nested data with a `Shard` for each distributed tensor; the same tensor twice is the same shard."""
    known = {} if known is None else known
    if isinstance(value, DTensor):
        if id(value) not in known:
            known[id(value)] = shard_of(value)
        return known[id(value)]
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: as_shards(entry, known) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_shards(entry, known) for entry in value)
    return value


def set_values(tensor: torch.Tensor, value: Loadable) -> None:
    """Set a tensor from a full one, of which only this process's shard is read if the tensor is distributed."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local().detach()
        local.copy_(read_slice(value, local_slice(tensor)).view(local.shape))
    else:
        tensor.copy_(materialize(value))


def load_sharded(module: nn.Module, state: Mapping[str, Loadable], strict: bool) -> None:
    """Load weights and buffers by name, reading of distributed ones only this process's shard.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    own = module.state_dict(keep_vars=True)
    check_fit(module, {name: getattr(value, "shape", None) for name, value in own.items()}, state, strict)
    rest = {}
    for name, value in state.items():
        target = own.get(name)
        if isinstance(target, DTensor):
            set_values(target, value)
        elif name in own:
            rest[name] = materialize(value) if isinstance(target, torch.Tensor) else value
    module.load_state_dict(rest, strict=False)


def part_as_dtensor(value: Loadable, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of an optimizer's state, sharded as its parameter is where it has the parameter's shape."""
    if not isinstance(like, DTensor) or tuple(value.shape) != tuple(like.shape):
        return materialize(value)
    local = like.to_local()
    part = read_slice(value, local_slice(like)).view(local.shape).to(local.device)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
