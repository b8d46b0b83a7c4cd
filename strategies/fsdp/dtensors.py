"""Turn torch's distributed tensors into the shards that checkpoints hold, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as DimensionShard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map, tree_map_only

from trainer.checkpoint.flat_slice import EMPTY_SLICE, FlatSlice, slice_of_grid
from trainer.checkpoint.shards import Loadable, Shard, materialize, read_slice
from trainer.distributed.sendable import sendable
from trainer.model.weights import AbsentParameter
from trainer.strategy import Values


def read_full_numbers() -> None:
    """Have a read of a distributed tensor's number, as by `.item()`, return the full tensor's; it is collective.

    torch returns the number of this process's part. Only the reading becomes slower, and no code is left out:
    hooks, steps of optimizers and their hooks, and tensors that torch itself turns into numbers (`alpha=norm`).
    """
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _full_number


def _full_number(op_call: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    tensor = args[0].to(args[0].device_mesh.device_type)  # of weights that are offloaded to the CPU
    return op_call(tensor.full_tensor())


def local_slice(tensor: DTensor) -> FlatSlice:
    """Return which elements of the full tensor this process holds.

    Raises:
        ValueError: they are not evenly spaced.
    """
    along = [_own_indices(tensor, dim) for dim in range(tensor.ndim)]
    local = tensor.to_local().shape
    if [len(indices) for indices in along] != list(local) and local.numel():
        raise ValueError(f"{tensor.placements} of a tensor of {tuple(tensor.shape)} are not understood")
    return slice_of_grid(tensor.shape, along)


def _own_indices(tensor: DTensor, dim: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the positions of the local elements along a dimension: of each part in turn, for packed weights."""
    indices = np.arange(tensor.shape[dim])
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for here, of, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, (DimensionShard, _StridedShard)) and placement.dim % tensor.ndim == dim:
            packed = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
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


def as_shards(value: Any, writes: Callable[[DTensor], bool], known: dict[int, Shard]) -> Any:
    """Return nested data with a `Shard` for each distributed tensor; the same tensor twice is the same shard.

    Args:
        writes: whether this process writes its part of a tensor; other processes may hold copies.
        known: the shards so far, by the `id` of their tensors.
    """

    def as_shard(tensor: torch.Tensor) -> torch.Tensor | Shard:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        if id(tensor) not in known:
            known[id(tensor)] = shard_of(tensor, writes(tensor))
        return known[id(tensor)]

    return tree_map_only(torch.Tensor, as_shard, value)


def set_values(tensor: torch.Tensor, value: Loadable | Shard) -> None:
    """Set a tensor from a full one, or from this process's shard as `shard_of` returns it.

    For a distributed tensor only this process's shard of the full one is read.
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


class ShardedValues(Values):
    """Sets distributed tensors; skips parameters that other processes hold."""

    def shape_of_part(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        return tuple(tensor.shape) if isinstance(tensor, (DTensor, AbsentParameter)) else None

    def set(self, tensor: torch.Tensor, value: Loadable | Shard) -> None:
        if not isinstance(tensor, AbsentParameter):
            with torch.no_grad():
                set_values(tensor, value)


def absent(tensor: torch.Tensor) -> Shard:
    """Return the shard of a process that has nothing of a tensor, such as a parameter of another stage."""
    return Shard(torch.empty(0, dtype=tensor.dtype), tuple(tensor.shape), EMPTY_SLICE)


def full_shard(tensor: torch.Tensor, writes: bool) -> Shard:
    """Return a full tensor that one process writes."""
    extent = FlatSlice(0, tensor.numel()) if writes else EMPTY_SLICE
    return Shard(tensor.detach(), tuple(tensor.shape), extent)


def description(state: Any) -> Any:
    """Return an optimizer's state of one parameter with shapes and dtypes in place of shards; see `absent_like`."""
    return tree_map_only(Shard, lambda shard: _Description(list(shard.shape), shard.local.dtype), state)


def absent_like(described: Any) -> Any:
    """Return the state that was described, as shards without elements."""

    def absent_one(one: Any) -> Any:
        known = isinstance(one, _Description)
        return Shard(torch.empty(0, dtype=one.dtype), tuple(one.shape), EMPTY_SLICE) if known else one

    return tree_map(absent_one, described, is_leaf=lambda one: isinstance(one, _Description))


@sendable
class _Description(NamedTuple):
    """The shape and dtype of a tensor on another stage."""

    shape: list[int]
    dtype: torch.dtype


def part_as_dtensor(like: torch.Tensor, value: Loadable) -> torch.Tensor:
    """Return a tensor of an optimizer's state, sharded as its parameter is where it has the parameter's shape."""
    if not isinstance(like, DTensor) or tuple(value.shape) != tuple(like.shape):
        return materialize(value)
    local = like.to_local()
    part = read_slice(value, local_slice(like)).view(local.shape).to(local.device)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
