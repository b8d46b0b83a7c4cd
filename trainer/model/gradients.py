"""Norms of gradients."""

from __future__ import annotations

import torch
from torch import nn


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient, and of all together, by name, as Lightning does: on their device.

    Of a sharded parameter it is the norm of this process's part.
    """
    order = float(norm_type)
    norms = {
        f"grad_{order}_norm{group_separator}{name}": parameter.grad.detach().norm(order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack([*norms.values()]).norm(order)
    return norms
