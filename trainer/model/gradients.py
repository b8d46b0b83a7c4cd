"""Norms of gradients, sparse gradients, and tensors that can have one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

_LOW = (torch.float16, torch.bfloat16)


def with_dense_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters, with a tensor in place of each that has a sparse gradient: its gradient is the values.

    The memory is shared, so that clipping it clips the sparse gradient, which torch's functions for clipping refuse.
    `nn.Embedding(sparse=True)` makes sparse gradients.
    """
    return [p if p.grad is None or not p.grad.is_sparse else _with_values_as_gradient(p) for p in parameters]


def _with_values_as_gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.coalesce()  # until then, a row occurs once for each use
    values = parameter.grad.values()
    instead = torch.empty_like(values, requires_grad=True)
    instead.grad = values
    return instead


def takes_gradient(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor of real or complex floating-point numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def is_sparse(layer: Any) -> bool:
    """Whether the gradient of a layer's weight is sparse."""
    return isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse


def sparse_weights(module: nn.Module) -> set[torch.Tensor]:
    """Return the weights of the layers whose gradients are sparse."""
    layers: list[Any] = [*filter(is_sparse, module.modules())]
    return {layer.weight for layer in layers}


def norm_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all elements of some tensors, on the device of the first one.

    Tensors of 16 bits are summed in float32: float16 ends at 65504, the square of 256, and a sum of squares in bfloat16
    stops growing.
    """
    low = [tensor for tensor in tensors if tensor.dtype in _LOW]
    if low:
        tensors = [*torch._foreach_norm(low, 2, torch.float32), *(one for one in tensors if one.dtype not in _LOW)]
    return nn.utils.get_total_norm(tensors)


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient, and of all together, by name, as Lightning does: on their device.

    For a sharded parameter it is the norm of this process's part.
    """
    order = float(norm_type)
    norms = {
        f"grad_{order}_norm{group_separator}{name}": one.grad.detach().norm(order)
        for name, parameter in module.named_parameters()
        for one in with_dense_gradients([parameter])
        if one.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack([*norms.values()]).norm(order)
    return norms
