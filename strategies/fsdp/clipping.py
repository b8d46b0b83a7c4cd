"""Clip gradients that are split over different meshes, or over the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainer.model.gradients import norm_of


def clip_by_norm(
    parameters: Sequence[nn.Parameter],
    counted: Iterable[nn.Parameter],
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; return the norm before. Collective.

    An infinite `max_norm` leaves them unchanged. torch's `clip_grad_norm_` cannot add the norms of different meshes.

    Args:
        counted: the parameters whose gradients count on this process. A weight that two stages share counts once.
        stages: the group over whose processes the squares are added; None: all parameters are here.
    """
    squares = _squares(counted)
    device = next((p.grad.device for p in parameters if p.grad is not None), torch.device("cpu"))
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
    if stages is not None:
        dist.all_reduce(total, group=stages)
    total = total.sqrt()
    for group in by_mesh(parameters) if max_norm < math.inf else ():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _squares(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return squared norms that add up to the one of all gradients, the same bits on all processes that share them.

    Squares of gradients that are split in the same way are added up on each process, and then over the processes.
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor):
            alike.setdefault((None, ()), []).append(gradient)
            continue
        if any(placement.is_partial() for placement in gradient.placements):
            gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        alike.setdefault((gradient.device_mesh, gradient.placements), []).append(gradient.to_local())
    squares = []
    for (mesh, placements), gradients in alike.items():
        square = norm_of(gradients).square()
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return squares


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters with a gradient, in one list for each mesh that the gradients are on."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())
