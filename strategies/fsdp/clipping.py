"""Clip gradients that are divided over different meshes, or over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def clip_by_norm(
    parameters: Collection[nn.Parameter],
    max_norm: float,
    counted: Iterable[nn.Parameter] | None = None,
    stages: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; return the norm before. Collective.

    torch's `clip_grad_norm_` cannot add the norms of different meshes.

    Args:
        counted: the parameters whose gradients count here; None: all. A weight that two stages share counts once.
        stages: the group over whose processes the squares are added; None: all parameters are here.
    """
    squares = [norm.square() for norm in _norms(parameters if counted is None else counted)]
    device = next((p.grad.device for p in parameters if p.grad is not None), torch.device("cpu"))
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if stages is not None:
        dist.all_reduce(total, group=stages)
    total = total.sqrt()
    for group in by_mesh(parameters):
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _norms(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    norms = []
    for group in by_mesh(parameters):
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return norms


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters with a gradient, in one list for each mesh that the gradients are on."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())
