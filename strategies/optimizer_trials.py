"""Find out by trying an optimizer whether it treats all elements alike, as ZeRO needs, or each parameter alone."""

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
    start, slope = _trial()
    try:
        (full,), numbers = _trained(optimizer, [start], [slope])
    except Exception:
        return True
    parts = zip(start.flatten().split(_CUT), slope.flatten().split(_CUT), strict=True)
    try:
        trained = [_trained(optimizer, [one], [steepness]) for one, steepness in parts]
    except Exception:
        return False
    in_parts, update = torch.cat([part for (part,), _ in trained]), (full.flatten() - start.flatten()).abs().max()
    alike = all(read == numbers for _, read in trained)
    return alike and bool((full.flatten() - in_parts).abs().max() <= 1e-3 * update)


def mixes_parameters(optimizer: Optimizer) -> bool:
    """Return True if the update of a parameter depends on other parameters, as by the norm of all gradients.

    Two parameters are trained by one optimizer, and by one each. False as well if the class cannot be tried so.
    """
    start, slope = _trial()
    starts, slopes = [*start.split(2)], [*slope.split(2)]
    try:
        together, _ = _trained(optimizer, starts, slopes)
        alone = [_trained(optimizer, [one], [steepness])[0][0] for one, steepness in zip(starts, slopes, strict=True)]
    except Exception:
        return False
    update = (torch.cat(alone) - start).abs().max()
    return not bool((torch.cat(together) - torch.cat(alone)).abs().max() <= 1e-3 * update)


def _trial() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix, and by how much its elements' gradients grow with them."""
    slope = torch.linspace(0.1, 3.0, _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE)
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)) + slope, slope


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


def _trained(
    optimizer: Optimizer, starts: list[torch.Tensor], slopes: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the values after steps towards 0 by one new optimizer of the class and options of `optimizer`, and the
    numbers that its steps have read."""
    parameters, numbers = [nn.Parameter(start.clone()) for start in starts], _NumbersRead()
    with isolated_rng():
        torch.default_generator.manual_seed(0)  # a GPU's generator would not be restored
        fresh = optimizer_like(optimizer, parameters)
        for scale in _SCALES:
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.grad = scale * slope * parameter.detach()
            with numbers:
                fresh.step()
    return [parameter.detach() for parameter in parameters], numbers.found
