"""Activation checkpointing: recompute the activations of blocks in the backward pass instead of storing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError
from trainer.model.blocks import BlockPolicy, find_blocks, without_caches
from trainer.model.reachable import Held


def enable_activation_checkpointing(
    module: nn.Module, policy: BlockPolicy = "auto", around_graphs: bool = False
) -> dict[str, nn.Module]:
    """Store only the inputs of each block between forward and backward, and recompute the rest.

    Results, gradients, torch's random numbers (dropout), and what blocks count, keep and change beside their output are
    bit-identical to those without; names in `state_dict()` and `named_parameters()` stay. Works before and after the
    module is wrapped. Blocks that are checkpointed already stay unchanged.

    Args:
        module: changed in place, until `disable_activation_checkpointing(module)`.
        policy: the choice of blocks, see `find_blocks`.
        around_graphs: if a block is compiled (`compile_block`), run its graph twice, instead of having the graph
            recompute: torch 2.13 cannot save what a graph with distributed tensors needs for that. Blocks with buffers
            run twice in any case.

    Returns:
        The blocks by name.

    Raises:
        ConfigError: the policy matches nothing. Raised later, in a backward, if an argument of a block, or a large
            buffer, was changed in place.
    """
    blocks = find_blocks(module, policy)
    if not blocks:
        raise ConfigError(
            f"activation checkpointing found no blocks in {type(module).__name__}: name their classes, not 'auto'."
        )
    for block in blocks.values():
        if not isinstance(vars(block).get("forward"), _Recomputed):
            block.forward = _Recomputed(block, around_graphs or _has_tensors(block))
    return blocks


def _has_tensors(block: nn.Module) -> bool:
    """Whether a block has buffers and the like, which a graph that recomputes would find changed by its forward."""
    values = (value for child in block.modules() for value in (*child._buffers.values(), *vars(child).values()))
    return any(isinstance(value, torch.Tensor) for value in values)


def compile_block(block: nn.Module, options: Mapping[str, Any]) -> list[nn.Module]:
    """Compile a module in place, with the options of torch.compile; of blocks with `around_graphs`, only the forward.

    Returns:
        The module, and blocks in it that are compiled separately.
    """
    forwards = {child: vars(child).get("forward") for child in block.modules()}
    apart = {child: one for child, one in forwards.items() if isinstance(one, _Recomputed) and one.around_graphs}
    for child, forward in apart.items():
        forward.compiled = torch.compile(forward.run, **options)
        child._compiled_call_impl = child._call_impl  # marks it as compiled
    if block not in apart:
        block.compile(**options)
    return [block, *apart]


def disable_activation_checkpointing(module: nn.Module) -> None:
    """Undo `enable_activation_checkpointing` everywhere in `module`."""
    for block in module.modules():
        forward = vars(block).get("forward")
        if isinstance(forward, _Recomputed):
            del block.forward
            if forward.replaced is not None:
                block.forward = forward.replaced


class _Recomputed:
    """The `forward` of a checkpointed block. Module hooks, such as FSDP's and DDP's, run once, outside of it.

    An object instead of a closure, so that a deep copy of the block calls the copy.
    """

    def __init__(self, block: nn.Module, around_graphs: bool) -> None:
        self.block = block
        self.replaced: Callable[..., Any] | None = vars(block).get("forward")
        self.forward: Callable[..., Any] = block.forward
        self.around_graphs = around_graphs
        self.checkpoint = torch.compiler.disable(checkpoint) if around_graphs else checkpoint
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(args, kwargs)
        # A tuple and a dict of arguments, so that `checkpoint` takes none for its own option, and finds the devices of
        # all, to save the states of their generators.
        before: list[Held] = []
        arguments = without_caches(args), without_caches(kwargs), before
        return self.checkpoint(self._run_or_repeat, *arguments, use_reentrant=False)

    def _run_or_repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any], before: list[Held]) -> Any:
        """Call the forward; in the backward once more, with what it found the first time, and without a trace."""
        if torch.compiler.is_compiling():  # a graph that changes more than tensors is not made
            return self._run(args, kwargs)
        if not before:
            before.append(Held(self.block, (args, kwargs)))
            return self._run(args, kwargs)
        with before[0].put_back():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A copy of a compiled block is not compiled.
        run = self.compiled if self.compiled and self.block._compiled_call_impl else self.run
        return run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the `forward` that the block had."""
        return self.forward(*args, **kwargs)
