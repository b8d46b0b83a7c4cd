"""Turn torch's distributed tensors into the shards that checkpoints hold, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from trainer.checkpoint.flat_slice import EMPTY_SLICE, FlatSlice, slice_of_box, slice_of_grid
from trainer.checkpoint.shards import Loadable, Shard, in_memory, materialize, read_slice
from trainer.distributed.sendable import sendable
from trainer.model.weights import check_fit, is_extra_state


def local_slice(tensor: DTensor) -> FlatSlice:
    """Return which elements of the full tensor this process holds.

    Raises:
        ValueError: they are not evenly spaced.
    """
    along = [_own_indices(tensor, dim) for dim in range(tensor.ndim)]
    local = tensor.to_local().shape
    if [len(indices) for indices in along] != list(local) and local.numel():
        raise ValueError(f"{tensor.placements} of a tensor of {tuple(tensor.shape)} are not understood")
    if any(len(indices) == 0 for indices in along):
        return EMPTY_SLICE
    if all(indices[-1] - indices[0] == len(indices) - 1 for indices in along):
        return slice_of_box(tensor.shape, [int(i[0]) for i in along], [len(i) for i in along])
    return slice_of_grid(tensor.shape, along)


def _own_indices(tensor: DTensor, dim: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the positions of the local elements along a dimension: of each part in turn, for packed weights."""
    indices = np.arange(tensor.shape[dim])
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for here, of, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        shard: Any = placement if placement.is_shard() or isinstance(placement, _StridedShard) else None
        if shard is not None and shard.dim % tensor.ndim == dim:
            packed = int(shard.split_factor) if isinstance(placement, _StridedShard) else 1
            parts = [_chunk(indices, number, packed) for number in range(packed)]
            indices = np.concatenate([_chunk(part, here, of) for part in parts])
    return indices


def _chunk(indices: Any, position: int, number: int) -> Any:
    """Return one of `number` parts as `torch.chunk` makes them: the last ones may be shorter, or empty."""
    size = -(-len(indices) // number)
    return indices[position * size : (position + 1) * size]


def shard_of(tensor: DTensor, writes: bool = True) -> Shard:
    """Return this process's shard; of replicas the first process along each dimension of the mesh writes.

    Args:
        writes: False: another process holds a copy, and writes it.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    replicas = [here for here, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()]
    extent = local_slice(tensor) if writes and not any(replicas) else EMPTY_SLICE
    return Shard(tensor.to_local().detach(), tuple(tensor.shape), extent)


def as_shards(value: Any, writes: Callable[[DTensor], bool], known: dict[int, Shard] | None = None) -> Any:
    """Return nested data with a `Shard` for each distributed tensor; the same tensor twice is the same shard.

    Args:
        writes: whether this process writes its part of a tensor, of which others may hold a copy.
    """
    known = {} if known is None else known
    if isinstance(value, DTensor):
        if id(value) not in known:
            known[id(value)] = shard_of(value, writes(value))
        return known[id(value)]
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: as_shards(entry, writes, known) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_shards(entry, writes, known) for entry in value)
    return value


def set_values(tensor: torch.Tensor, value: Loadable | Shard) -> None:
    """Set a tensor from a full one, of which only this process's shard is read if the tensor is distributed.

    Or from such a shard, as `shard_of` returns it.
    """
    local: torch.Tensor
    if isinstance(value, Shard):
        local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
        local.copy_(value.local)
    elif isinstance(tensor, DTensor):
        local = tensor.to_local().detach()
        local.copy_(read_slice(value, local_slice(tensor)).view(local.shape))
    else:
        tensor.copy_(materialize(value))


def absent(tensor: torch.Tensor) -> Shard:
    """Return the shard of a process that has nothing of a tensor, such as a parameter of another stage."""
    return Shard(torch.empty(0, dtype=tensor.dtype), tuple(tensor.shape), EMPTY_SLICE)


def full_shard(tensor: torch.Tensor, writes: bool) -> Shard:
    """Return a full tensor that one process writes."""
    extent = FlatSlice(0, tensor.numel()) if writes else EMPTY_SLICE
    return Shard(tensor.detach(), tuple(tensor.shape), extent)


def description(state: Any) -> Any:
    """Return an optimizer's state of one parameter with shapes and dtypes in place of shards; see `absent_like`."""
    if isinstance(state, Shard):
        return _Description(list(state.shape), state.local.dtype)
    return {key: description(value) for key, value in state.items()} if isinstance(state, dict) else state


def absent_like(described: Any) -> Any:
    """Return the state that was described, as shards without elements."""
    if isinstance(described, _Description):
        return Shard(torch.empty(0, dtype=described.dtype), tuple(described.shape), EMPTY_SLICE)
    if isinstance(described, dict):
        return {key: absent_like(value) for key, value in described.items()}
    return described


@sendable
class _Description(NamedTuple):
    """The shape and dtype of a tensor on another stage."""

    shape: list[int]
    dtype: torch.dtype


def load_sharded(
    module: nn.Module, state: Mapping[str, Loadable], strict: bool, elsewhere: Collection[str] = ()
) -> None:
    """Load weights and buffers by name, reading of distributed ones only this process's shard.

    Args:
        elsewhere: names of parameters that other processes have.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    own = module.state_dict(keep_vars=True)
    shapes = {name: None if is_extra_state(name) else getattr(value, "shape", None) for name, value in own.items()}
    check_fit(module, shapes, state, strict)
    rest = {}
    for name, value in state.items():
        target = own.get(name)
        if name in elsewhere:
            continue
        if isinstance(target, DTensor) or (isinstance(value, Shard) and isinstance(target, torch.Tensor)):
            set_values(target, value)
        elif name in own:
            rest[name] = in_memory(value)
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
