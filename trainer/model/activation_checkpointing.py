"""Activation checkpointing: recompute the activations of blocks in the backward pass instead of storing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from trainer.arguments import raise_if_raising
from trainer.errors import ConfigError
from trainer.model.blocks import BlockPolicy, find_blocks, is_compiled, without_caches


def enable_activation_checkpointing(
    module: nn.Module, policy: BlockPolicy = "auto", around_graphs: bool = False
) -> dict[str, nn.Module]:
    """Store only the inputs of each block between forward and backward, and recompute the rest.

    Results, gradients, random numbers (dropout) and running statistics of norms are bit-identical to those without;
    names in `state_dict()` and `named_parameters()` stay. Works before and after the module is wrapped. Blocks that are
    checkpointed already stay as they are.

    Args:
        module: changed in place, until `disable_activation_checkpointing(module)`.
        policy: the choice of blocks, see `find_blocks`.
        around_graphs: if a block is compiled (`compile_block`), run its graph twice, instead of having the graph
            recompute: torch 2.13 cannot save what a graph with distributed tensors needs for that.

    Returns:
        The blocks by name.

    Raises:
        ConfigError: the policy matches nothing, or `around_graphs` and a graph of the user's own has a block in it.
            Raised later, in the second training forward of a block, if the block changes a buffer each time.
    """
    try:
        blocks = find_blocks(module, policy)
    except ConfigError as error:
        raise ConfigError(f"activation_checkpointing: {error}") from error.__cause__
    except Exception as error:
        raise_if_raising({"activation_checkpointing": policy}, "Trainer", error)
        raise
    if not blocks:
        raise ConfigError(
            f"activation checkpointing found no blocks in {type(module).__name__}: name their classes, not 'auto'."
        )
    if around_graphs:
        _refuse_compiled(module, blocks)
    for block in blocks.values():
        if not isinstance(vars(block).get("forward"), _Recomputed):
            block.forward = _Recomputed(block, around_graphs)
    return blocks


def _refuse_compiled(module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for modules that the user has compiled with checkpointed blocks in them."""
    chosen = set(map(id, blocks.values()))
    for name, child in module.named_modules():
        if is_compiled(child) and any(id(part) in chosen for part in child.modules()):
            raise ConfigError(
                f"{name or type(module).__name__} is compiled by your code, and torch cannot recompute activations "
                "within a graph that has split layers: leave the compilation to Trainer(compile={'blocks': 'auto'}), "
                "which recomputes around the graphs, or leave out activation_checkpointing."
            )


def compile_block(block: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile a module in place, with the options of torch.compile; with `around_graphs` what it recomputes alone."""
    forward = vars(block).get("forward")
    if isinstance(forward, _Recomputed) and forward.around_graphs:
        forward.compiled = torch.compile(forward.run, **options)
        block._compiled_call_impl = block._call_impl  # by which all see that it is compiled
    else:
        block.compile(**options)


def disable_activation_checkpointing(module: nn.Module) -> None:
    """Undo `enable_activation_checkpointing` everywhere in `module`."""
    for block in module.modules():
        forward = vars(block).get("forward")
        if isinstance(forward, _Recomputed):
            del block.forward
            if forward.replaced is not None:
                block.forward = forward.replaced


class _Recomputed:
    """The `forward` of a checkpointed block. Module hooks, such as those of FSDP and DDP, run once, outside of it.

    An object instead of a closure, so that a deep copy of the block calls the copy.
    """

    def __init__(self, block: nn.Module, around_graphs: bool) -> None:
        self.block = block
        self.replaced: Callable[..., Any] | None = vars(block).get("forward")
        self.forward: Callable[..., Any] = block.forward
        self.norms = [child for child in block.modules() if isinstance(child, _NormBase)]
        self.checked = self.changed_before = False
        self.around_graphs = around_graphs
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A copy of a compiled block is not compiled.
        run = self.compiled if self.compiled and self.block._compiled_call_impl else self.run
        if not torch.is_grad_enabled():
            return run(args, kwargs)
        args, kwargs = without_caches(args), without_caches(kwargs)
        # Only for norms, whose running statistics the second forward would change: torch.compile rejects such contexts.
        options: dict[str, Any] = {"context_fn": self._contexts} if self.norms else {}
        if self.checked or torch.compiler.is_compiling():
            return checkpoint(run, args, kwargs, use_reentrant=False, **options)
        before = self._buffer_versions()
        # A tuple and a dict of arguments, so that `checkpoint` takes none for its own option, and finds the devices of
        # all, to save the states of their generators.
        result = checkpoint(run, args, kwargs, use_reentrant=False, **options)
        changed = [name for name, version in self._buffer_versions().items() if before.get(name) != version]
        if changed and self.changed_before:
            raise ConfigError(
                f"activation checkpointing runs the forward of {type(self.block).__name__} twice, and it changes the "
                f"buffer {', '.join(map(repr, changed))} each time: the gradients would be wrong. Choose blocks that "
                "leave it out."
            )
        # A single change may be a table that is filled on first use.
        self.changed_before, self.checked = bool(changed), not changed
        return result

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the `forward` that the block had."""
        return self.forward(*args, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._own_statistics()

    @contextmanager
    def _own_statistics(self) -> Iterator[None]:
        """Give the second forward copies of the running statistics, which are dropped on exit."""
        kept = [dict(norm._buffers) for norm in self.norms]
        for norm in self.norms:
            norm._buffers.update({name: None if b is None else b.clone() for name, b in norm._buffers.items()})
        try:
            yield
        finally:
            for norm, buffers in zip(self.norms, kept, strict=True):
                norm._buffers.update(buffers)

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        """Return the id and version of each buffer outside of norms, by name."""
        own = {id(buffer) for norm in self.norms for buffer in norm.buffers(recurse=False)}
        buffers = self.block.named_buffers()
        return {name: (id(buffer), buffer._version) for name, buffer in buffers if id(buffer) not in own}
