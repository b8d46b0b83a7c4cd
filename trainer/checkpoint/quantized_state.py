"""States of torchao's optimizers of 8 and 4 bits: stored as the numbers that they stand for, in every layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


def in_full_precision(values: Any) -> Any:
    """Return the state of a parameter, at any depth, with its quantized tensors as float32."""
    return tree_map_only(torch.Tensor, _dequantized, values)


def _dequantized(tensor: torch.Tensor) -> torch.Tensor:
    local: Any = _local(tensor)
    if not _is_quantized(local):
        return tensor
    return local.dequantize() if local is tensor else _distributed_like(tensor, local.dequantize())


def quantize_again(optimizer: Optimizer) -> None:
    """Quantize the states that were loaded as float32, where the optimizer makes quantized ones."""
    new_buffer: Any = getattr(optimizer, "_new_buffer", None)
    if new_buffer is None or not type(optimizer).__module__.startswith("torchao."):
        return
    for parameter, values in optimizer.state.items():
        for key in _MOMENTS & values.keys():
            buffer = new_buffer(parameter, key == "exp_avg")
            if _is_quantized(_local(buffer)):
                _set(_local(buffer), _local(values[key]))
                values[key] = buffer


def _set(quantized: Any, values: torch.Tensor) -> None:
    """Set a quantized tensor to values; exactly, if they come from a checkpoint of the same layout.

    torchao would take the largest value of a block as its scale. That is not the scale of values that were quantized
    once, where the largest one is negative: the code for it stands for a little less.
    """
    quantized.copy_(values)
    qmap = getattr(quantized, "qmap", None)
    if qmap is None:
        return
    blocks = values.reshape(-1, quantized.block_size)
    scale = blocks.amax(1) / qmap[-1]
    if qmap[0] < 0:
        scale = torch.maximum(scale, blocks.amin(1) / qmap[0])
    scale = scale.clip(1e-12)
    middles = (qmap[1:] + qmap[:-1]) / 2
    codes = torch.bucketize(blocks / scale[:, None], middles)
    up, down = scale.new_tensor(torch.inf), scale.new_tensor(0.0)
    for nearby in (torch.nextafter(scale, up), torch.nextafter(scale, down)):
        exact, better = ((qmap[codes] * one[:, None] == blocks).sum(1) for one in (scale, nearby))
        scale = torch.where(better > exact, nearby, scale)
    flat = codes.flatten().to(torch.uint8)
    if len(qmap) == 16:  # two of 4 bits in a byte
        flat = flat[::2] << 4 | flat[1::2]
    quantized.codes.copy_(flat.view(quantized.codes.shape))
    quantized.scale.copy_(scale)


def _is_quantized(tensor: torch.Tensor) -> bool:
    return type(tensor).__module__.startswith("torchao.")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, if it is distributed."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _distributed_like(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a distributed tensor with another local part of the same shape."""
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    made: torch.Tensor = type(tensor).from_local(
        local, mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return made
