"""Parameters that ZeRO 3 partitions: each process holds a slice of the flattened parameter, and none the full one."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.flat_slice import EMPTY_SLICE, FlatSlice
from trainer.checkpoint.shards import Loadable, Shard, read_slice
from trainer.model.init_device import InitDevice, initial_values, named_tensors


def is_zero3_partitioned(parameter: torch.Tensor) -> bool:
    """Whether the parameter is empty itself and this process holds a slice of it, in `ds_tensor`."""
    return hasattr(parameter, "ds_tensor")


def partitioned_parameters(module: nn.Module, recurse: bool = True) -> list[Any]:
    """Return the partitioned parameters of a module; `recurse`: and of its submodules."""
    return [parameter for parameter in module.parameters(recurse) if is_zero3_partitioned(parameter)]


def partition_extent(parameter: Any) -> FlatSlice:
    """Return which elements of a partitioned parameter its `ds_tensor` holds; what follows them there is padding."""
    ours = parameter.ds_tensor.ds_numel
    start = ours * dist.get_rank(parameter.ds_process_group)
    length = max(0, min(ours, parameter.ds_numel - start))
    return FlatSlice(start, length) if length else EMPTY_SLICE


def partition_shard(parameter: Any) -> Shard:
    """Return this process's slice of a partitioned parameter; 16-bit numbers in float32."""
    extent = partition_extent(parameter)
    own = in_float32(parameter.ds_tensor.detach()[: extent.length])
    return Shard(own, tuple(parameter.ds_shape), extent)


def local_values(tensor: torch.Tensor) -> torch.Tensor | Shard:
    """Return this process's slice of a partitioned parameter, and any other tensor in full."""
    return partition_shard(tensor) if is_zero3_partitioned(tensor) else tensor.detach()


def in_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of 16-bit numbers in float32, and any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def load_partition(parameter: Any, value: Loadable | Shard) -> None:
    """Set this process's slice of a partitioned parameter from that slice, or read the slice of a full tensor."""
    extent = partition_extent(parameter)
    with torch.no_grad():
        own = value.local if isinstance(value, Shard) else read_slice(value, extent)
        parameter.ds_tensor[: extent.length].copy_(own)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Give floating-point parameters another dtype, partitioned ones too, except for double precision."""
    tensors = [*module.parameters(), *(parameter.ds_tensor for parameter in partitioned_parameters(module))]
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype is not torch.float64:
            tensor.data = tensor.data.to(dtype)


def expose_shapes(module: nn.Module) -> None:
    """Give partitioned parameters their shapes, without memory, because `configure_optimizers` may read `p.ndim`."""
    for parameter in partitioned_parameters(module):
        parameter.data = parameter.data.new_empty(1).expand(parameter.ds_shape)


def restore_empty(module: nn.Module) -> None:
    """Undo `expose_shapes`: DeepSpeed expects partitioned parameters to be empty."""
    for parameter in partitioned_parameters(module):
        parameter.data = parameter.data.new_empty(0)


def partition_module(
    deepspeed: Any, config: Mapping[str, Any], module: nn.Module, init_device: InitDevice, loaded: Collection[str]
) -> None:
    """Partition the parameters, one after the other, with rank 0's values. Collective.

    DeepSpeed's own context around the construction partitions a layer as soon as it is built, and an outer layer that
    initializes it again then changes nothing.

    Args:
        loaded: names whose values come from a checkpoint later.
    """
    tensors, owners = named_tensors(module), list(module.modules())
    unset = ((name, tensors[name]) for name in loaded if name in tensors and init_device != "cpu")
    values = itertools.chain(initial_values(module, init_device, loaded), unset)
    partition = deepspeed.zero.Init(config_dict_or_path=dict(config))
    for name, value in values:
        tensor = tensors[name]
        value = torch.empty_like(value, device="cpu") if value.is_meta else value
        if not tensor.is_meta:
            tensor.data.copy_(value)
        else:
            tensors[name] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            for owner in owners:
                for key, held in [*owner._parameters.items(), *owner._buffers.items()]:
                    if held is tensor:
                        setattr(owner, key, tensors[name])
        if isinstance(tensor, nn.Parameter):
            partition._convert_to_zero_parameters([tensors[name]])
    partition._convert_to_zero_parameters(module.parameters())


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or the full shape of a partitioned parameter."""
    return tuple(tensor.ds_shape if is_zero3_partitioned(tensor) else tensor.shape)
