"""Find out whether an optimizer treats all elements alike, as ZeRO needs, which steps flat shards of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.optimizers import optimizer_like
from trainer.seed import isolated_rng

_SHAPE, _CUT = (4, 6), 10
_SCALES = (1.0, 8.0, 1.0, 0.1, 4.0, 20.0)
"""Scales of the gradients, step by step: they differ, as some optimizers clip what is unlike the steps before."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return False if an update of an element depends on its tensor's shape, or on other elements.

    Optimizers of the same class and options train a small matrix, and its elements in flat parts by one optimizer each,
    which also have to read the same numbers: a comparison of the largest gradient with a limit, say, may decide alike
    here, and otherwise in a training. True as well if the class cannot be tried so: it needs a closure, or other
    arguments.
    """
    slope = torch.linspace(0.1, 3.0, _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE)
    start = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)) + slope
    try:
        full, numbers = _trained(optimizer, start, slope)
    except Exception:
        return True
    parts = zip(start.flatten().split(_CUT), slope.flatten().split(_CUT), strict=True)
    try:
        trained = [_trained(optimizer, *part) for part in parts]
    except Exception:
        return False
    in_parts, update = torch.cat([part for part, _ in trained]), (full.flatten() - start.flatten()).abs().max()
    alike = all(read == numbers for _, read in trained)
    return alike and bool((full.flatten() - in_parts).abs().max() <= 1e-3 * update)


class _NumbersRead(TorchDispatchMode):
    """Within the block, collects the numbers that are read of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(result)
        return result


def _trained(optimizer: Optimizer, start: torch.Tensor, slope: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """Return `start` after steps towards 0 by a new optimizer of the class and options of `optimizer`, and the numbers
    that its steps have read."""
    parameter, numbers = nn.Parameter(start.clone()), _NumbersRead()
    with isolated_rng():
        torch.default_generator.manual_seed(0)  # that of a GPU would not be restored
        fresh = optimizer_like(optimizer, [parameter])
        for scale in _SCALES:
            parameter.grad = scale * slope * parameter.detach()
            with numbers:
                fresh.step()
    return parameter.detach(), numbers.found
