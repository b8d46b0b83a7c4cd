"""Patch modules for XLA: recomputed blocks, barriers between backward passes, batch norm's variance."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from trainer.errors import ConfigError
from trainer.seed import derive_seed

Undo = Callable[[], None]


def recompute(block: nn.Module) -> Undo:
    """Have a block recompute its activations in the backward pass, with torch_xla's own function; returns the undo.

    torch's function does not support the device. torch_xla's restores the seed from the beginning of the step, not of
    this block, so dropout would draw other numbers when it recomputes: here each call has its own seed.
    """
    import torch_xla.core.xla_model as xm
    from torch_xla.utils.checkpoint import checkpoint

    forward = block.forward
    norms = [norm for norm in block.modules() if isinstance(norm, _NormBase) and norm.track_running_stats]

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if kwargs:
            raise ConfigError(
                "activation_checkpointing: torch_xla recomputes a block from its positional arguments, and "
                f"{type(block).__name__} was called with {', '.join(kwargs)}=: pass them by position."
            )
        if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            return forward(*args)  # torch_xla's function would give the block's weights no gradient.
        seed = advance_seed()

        def seeded(self: nn.Module, *inputs: Any) -> Any:
            xm.set_rng_state(seed)
            second = torch.is_grad_enabled()
            for norm in norms:
                norm.track_running_stats = not second  # The statistics of a batch count once.
            try:
                return forward(*inputs)
            finally:
                for norm in norms:
                    norm.track_running_stats = True

        # A method of the block: then its weights are kept apart from the first pass's weights, too.
        outputs = checkpoint(MethodType(seeded, block), *args, preserve_rng_state=False)
        advance_seed()
        return outputs

    block.forward = recomputed

    def undo() -> None:
        del block.forward

    return undo


def advance_seed() -> int:
    """Advance the seed of the devices' random numbers to one derived from it, and return it."""
    import torch_xla.core.xla_model as xm

    seed = derive_seed(xm.get_rng_state(), "next")
    xm.set_rng_state(seed)
    return seed


def barrier_after_backward(block: nn.Module) -> Undo:
    """Keep XLA from merging the backward passes of all blocks, with all their gradients.

    torch_xla's `apply_backward_optimization_barrier` does so by a hook on the module, which a block whose inputs need
    no gradient, or that works in place, cannot have.
    """
    import torch_xla.core.xla_model as xm

    def barrier(gradient: torch.Tensor) -> None:
        xm.optimization_barrier_([gradient, *(p.grad for p in block.parameters() if p.grad is not None)])

    def before_forward(module: nn.Module, args: Any) -> None:
        for value in args:
            if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
                value.register_hook(barrier)
                return

    return block.register_forward_pre_hook(before_forward).remove


def unbiased_running_variance(module: nn.Module) -> list[Undo]:
    """Let batch norm keep the unbiased variance, as torch does; torch_xla's own keeps the biased one.

    Not with `momentum=None`, where the share of the new value is a number on the device.
    """
    undo: list[Undo] = []
    for norm in module.modules():
        if isinstance(norm, _BatchNorm) and norm.running_var is not None and norm.momentum is not None:
            undo += _corrected(norm, norm.momentum)
    return undo


def _corrected(norm: _BatchNorm, momentum: float) -> list[Undo]:
    before: list[torch.Tensor] = []

    def remember(module: nn.Module, args: Any) -> None:
        before.clear()
        if norm.training and norm.track_running_stats and norm.running_var is not None:
            before.append(norm.running_var.clone())

    def correct(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if before:
            assert norm.running_var is not None
            values = output.numel() // output.shape[1]
            kept = before.pop() * (1 - momentum)
            # `.data`: the backward pass has saved the buffer, though it makes no use of its values in training.
            norm.running_var.data.sub_(kept).mul_(values / max(1, values - 1)).add_(kept)

    return [norm.register_forward_pre_hook(remember).remove, norm.register_forward_hook(correct).remove]
