"""Gather the tensors of all processes, with their gradients if need be."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map


def gather_nested(data: Any, device: torch.device, group: dist.ProcessGroup | None, sync_grads: bool) -> Any:
    """Return nested `data` with each tensor and number replaced by those of all processes, in the order of ranks.

    Collective. Tensors have the same shape on all processes.

    Args:
        device: of numbers that become tensors.
        group: the processes; None: all.
        sync_grads: let gradients through; a process gets the sum of all processes' gradients of its part.
    """

    def gather(leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf, device=device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if sync_grads and leaf.is_floating_point():
            return _Gather.apply(leaf, group)
        return _gathered(leaf.detach(), group)

    return tree_map(gather, data)


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    own = tensor.contiguous().view(-1).view(torch.uint8)  # gloo knows few dtypes
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts).view(tensor.dtype).view(len(parts), *tensor.shape)


class _Gather(torch.autograd.Function):
    """The tensors of all processes, stacked."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
