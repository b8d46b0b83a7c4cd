"""Find out whether an optimizer treats all elements alike, as ZeRO needs, which steps flat shards of the parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.optimizers import optimizer_like
from trainer.seed import isolated_rng

_SHAPE, _CUT = (4, 6), 10
_SCALES = (1.0, 8.0, 1.0, 0.1, 4.0, 20.0)
"""Scales of the gradients, step by step: they differ, as some optimizers clip what is unlike the steps before."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return False if an update of an element depends on its tensor's shape, or on other elements.

    Optimizers of the same class and options train a small matrix, and its elements in two flat parts by one optimizer
    each. True as well if the class cannot be tried so: it needs a closure, or other arguments.
    """
    slope = torch.linspace(0.1, 3.0, _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE)
    start = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)) + slope
    try:
        full = _trained(optimizer, start, slope).flatten()
    except Exception:
        return True
    parts = zip(start.flatten().split(_CUT), slope.flatten().split(_CUT), strict=True)
    try:
        in_parts = torch.cat([_trained(optimizer, *part) for part in parts])
    except Exception:
        return False
    update = (full - start.flatten()).abs().max()
    return bool((full - in_parts).abs().max() <= 1e-3 * update)


def _trained(optimizer: Optimizer, start: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Return `start` after steps towards 0 by a new optimizer of the class and options of `optimizer`."""
    parameter = nn.Parameter(start.clone())
    with isolated_rng():
        torch.default_generator.manual_seed(0)  # that of a GPU would not be restored
        fresh = optimizer_like(optimizer, [parameter])
        for scale in _SCALES:
            parameter.grad = scale * slope * parameter.detach()
            fresh.step()
    return parameter.detach()
