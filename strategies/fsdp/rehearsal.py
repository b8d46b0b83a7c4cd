"""Run the forward of a block without consequences, to compare it with another way to compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.seed import isolated_rng
from trainer.strategy import eval_mode


@contextmanager
def rehearsal(block: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a block in eval mode, without gradients; its buffers, attributes and random numbers are put back on exit.

    A little is added to all parameters, because a branch that begins with zeros would hide what it computes.
    """
    with torch.no_grad(), eval_mode(block), isolated_rng(device), _state_kept(block), _without_zeros(block):
        yield


def difference_of(found: torch.Tensor, expected: torch.Tensor, read: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of the difference of two outputs, as a share of that of `expected`, or of what it adds to `read`.

    What is not finite in `expected` counts as equal: where it comes from, others say. What is not finite in `found`
    only makes the difference infinite.
    """
    known = torch.isfinite(expected)
    found, expected = (torch.where(known, one, 0) for one in (found, expected))
    size = expected.norm()
    if read is not None:
        size = torch.maximum((expected - torch.where(known, read, 0)).norm(), size / 100)
    share: torch.Tensor = (found - expected).norm() / size.clamp(min=1e-12)
    return share.nan_to_num(nan=torch.inf, posinf=torch.inf)


@contextmanager
def _state_kept(block: nn.Module) -> Iterator[None]:
    kept = [(child, dict(child._buffers), dict(vars(child))) for child in block.modules()]
    for child, buffers, _ in kept:
        child._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for child, buffers, attributes in kept:
            child._buffers.update(buffers)
            now = vars(child)
            for name in [name for name in now if not name.startswith("_")]:  # the others are torch's
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]


@contextmanager
def _without_zeros(block: nn.Module) -> Iterator[None]:
    # FSDP2 gathers units within the block, such as experts, in their own forward: they would have it once, not twice.
    within = {id(p) for unit in block.modules() if unit is not block and _is_unit(unit) for p in unit.parameters()}
    larger = {
        id(p): nn.Parameter(p.detach() + 0.02, requires_grad=False)
        for p in block.parameters()
        if id(p) not in within and (p.is_floating_point() or p.is_complex())
    }
    with replaced_parameters(block, lambda parameter: larger.get(id(parameter))):
        yield


def _is_unit(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


@contextmanager
def replaced_parameters(block: nn.Module, choose: Callable[[nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Give a block other parameters for a while: those that `choose` returns, or the same where it returns None."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
    for owner in block.modules():
        for name, parameter in owner._parameters.items():
            other = None if parameter is None else choose(parameter)
            if parameter is not None and other is not None:
                replaced.append((owner._parameters, name, parameter, other))
    for parameters, name, _, other in replaced:
        parameters[name] = other
    try:
        yield
    finally:
        for parameters, name, parameter, other in replaced:
            # Not where FSDP2 has gathered a unit within the block: it goes by what is there.
            if parameters.get(name) is other:
                parameters[name] = parameter
