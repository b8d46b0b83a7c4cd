"""SideOutputs: bring what a block gives to others beside its output, in its arguments and in losses that it keeps.

FSDP2 calls a block with copies of lists, dicts and dataclasses, so that what the block writes into them would be lost.
And it gathers weights for a backward that begins at an output: the backward of a loss that the block keeps would find
them freed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from trainer.model.reachable import (
    OF_TORCH,
    containers,
    content,
    fill,
    keep_attributes_of,
    objects,
    same_content,
    tensors_of,
)


class SideOutputs:
    """Brings what a block writes into its arguments to its caller, and begins the backward of what it keeps.

    Args:
        block: before it is sharded, and after a forward hook that copies its output.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._callers: list[Any] = []
        """The containers among the arguments of the call in progress, as the block's caller has them."""
        self._before: list[tuple[Any, dict[Any, Any]]] = []
        """The containers that the block itself gets, each with its content before the call."""
        self._objects: list[Any] = []
        """Other objects among the arguments."""
        self._held: set[int] = set()
        """The ids of the tensors in them."""
        self._output: tuple[Any] | None = None
        self._structure: Any = None
        """Of the arguments of the call in progress, where FSDP2 has got them as a flat list."""
        # Like FSDP2's own hooks, these are not compiled within a compiled call.
        block.register_forward_pre_hook(torch.compiler.disable(self._unflatten), with_kwargs=True, prepend=True)
        block.register_forward_hook(torch.compiler.disable(self._add_to_output), with_kwargs=True)

    def wrap(self) -> None:
        """Add the hooks around FSDP2's own."""
        block, outside = self._block, torch.compiler.disable
        block.register_forward_pre_hook(outside(self._of_caller), with_kwargs=True, prepend=True)
        block.register_forward_pre_hook(outside(self._of_block), with_kwargs=True)
        block.register_forward_hook(outside(self._take_from_output))

    def _of_caller(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        self._objects = objects((args, kwargs))
        self._callers = containers((args, kwargs))
        self._held = {id(one) for held in self._objects for one in tensors_of(held)}
        if not any(isinstance(one, defaultdict) for one in self._callers):
            return None
        # FSDP2 copies a dict by its class, which is given the function for missing entries first.
        leaves, self._structure = torch.utils._pytree.tree_flatten((args, kwargs))
        return tuple(leaves), {}

    def _unflatten(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        structure, self._structure = self._structure, None
        return None if structure is None else torch.utils._pytree.tree_unflatten(args, structure)

    def _of_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        own = containers((args, kwargs)) if self._callers else []
        for theirs, one in zip(self._callers, own, strict=True):
            if one is not theirs:
                keep_attributes_of(theirs, one)
        self._before = [(one, content(one)) for one in own]

    def _add_to_output(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the output with all other tensors that a backward may begin at, for the hook of FSDP2."""
        self._output = None
        written = self._bring_to_caller()
        if not torch.is_grad_enabled():
            return None
        left = [one for one in tensors_of(written) if one.grad_fn is not None]
        left += [one for held in self._objects for one in tensors_of(held) if id(one) not in self._held]
        left += self._kept(block)
        if not left:
            return None
        self._output = (output,)
        return output, left

    def _take_from_output(self, block: nn.Module, args: Any, output: Any) -> Any:
        of_block, self._output = self._output, None
        return None if of_block is None else output[0]

    def _kept(self, block: nn.Module) -> list[torch.Tensor]:
        """Return the tensors with a gradient in attributes of the block's parts."""
        owners = [vars(child) for child in block.modules()]
        values = (value for owner in owners for name, value in owner.items() if name not in OF_TORCH)
        return [one for value in values for one in tensors_of(value) if one.grad_fn is not None]

    def _bring_to_caller(self) -> list[Any]:
        """Write what the block has written into the containers of its caller, and return it."""
        written: list[Any] = []
        for theirs, (own, before) in zip(self._callers, self._before, strict=True):
            after = content(own)
            if same_content(after, before):
                continue
            written += [one for key, one in after.items() if one is not before.get(key, before)]
            if own is not theirs:
                of_caller = content(theirs)
                same = {id(one): of_caller[key] for key, one in before.items() if key in of_caller}
                fill(theirs, {key: same.get(id(one), one) for key, one in after.items()})
                keep_attributes_of(own, theirs)
        self._callers, self._before = [], []
        return written
