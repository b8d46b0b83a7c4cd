"""SideOutputs: bring what a block gives to others beside its output, in its arguments and in losses that it keeps.

FSDP2 calls a block with copies of lists, dicts and dataclasses, so that what the block writes into them would be lost.
And it gathers weights for a backward that begins at an output: that of a loss which the block keeps would find them
freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.model.blocks import class_of
from trainer.strategies.fsdp.reachable import containers, content, fill, same_content, tensors_in


class SideOutputs:
    """Brings what a block writes into its arguments to its caller, and begins the backward of what it keeps.

    Args:
        name: of the block.
        block: before it is sharded, and after a forward hook that copies its output.
        split: the options by which other processes have other blocks or tokens, for which nothing can be brought.
        shared: objects that other blocks of a pipeline know, too.
    """

    def __init__(self, name: str, block: nn.Module, split: str = "", shared: Sequence[Any] = ()) -> None:
        self._name, self._split, self._shared = name, split, shared
        self._callers: list[Any] = []
        """The containers among the arguments of the call in progress, as the block's caller has them."""
        self._before: list[tuple[Any, dict[Any, Any]]] = []
        """Those that the block itself has got, and what was in them."""
        self._keeps: list[tuple[dict[str, Any], str]] | None = None
        """The attributes in which the block keeps tensors with a gradient; None before its first training step."""
        self._output: tuple[Any] | None = None
        block.register_forward_hook(self._add_to_output, with_kwargs=True)

    def wrap(self, block: nn.Module) -> None:
        """Add the hooks around those of FSDP2."""
        block.register_forward_pre_hook(self._of_caller, with_kwargs=True, prepend=True)
        block.register_forward_pre_hook(self._of_block, with_kwargs=True)
        block.register_forward_hook(self._take_from_output)

    def _of_caller(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._callers = [*containers((args, kwargs)), *self._shared]

    def _of_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            own = [*containers((args, kwargs)), *self._shared] if self._callers else []
            self._before = [(one, content(one)) for one in own]

    def _add_to_output(self, block: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the output with the other tensors from which a backward may begin, for the hook of FSDP2."""
        if torch.compiler.is_compiling():
            return None
        self._output = None
        written = self._bring_to_caller(block)
        if not torch.is_grad_enabled():
            return None
        if self._keeps is None:
            attributes = [(vars(child), name) for child in block.modules() for name in vars(child)]
            self._keeps = [(owner, name) for owner, name in attributes if _is_kept(name, owner[name])]
        if not written and not self._keeps:
            return None
        kept = [owner.get(name) for owner, name in self._keeps]
        if not any(one.requires_grad for one in tensors_in((written, kept))):
            return None
        self._output = (output,)
        return output, written, kept

    def _take_from_output(self, block: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        of_block, self._output = self._output, None
        return None if of_block is None else output[0]

    def _bring_to_caller(self, block: nn.Module) -> list[Any]:
        """Write what the block has written into the containers of its caller, and return it.

        Raises:
            ConfigError: other processes need it.
        """
        written: list[Any] = []
        for theirs, (own, before) in zip(self._callers, self._before, strict=True):
            after = content(own)
            if same_content(after, before):
                continue
            if self._split:
                raise ConfigError(
                    f"{self._split}: {self._name} ({class_of(block).__name__}) writes into a {type(own).__name__} "
                    "that others read, too, and only what a block returns goes on to other processes. Return it, or "
                    "compute it outside of the blocks; or use another strategy."
                )
            written += [one for key, one in after.items() if one is not before.get(key, before)]
            if own is not theirs:
                of_caller = content(theirs)
                same = {id(one): of_caller[key] for key, one in before.items() if key in of_caller}
                fill(theirs, {key: same.get(id(one), one) for key, one in after.items()})
        self._callers, self._before = [], []
        return written


def _is_kept(name: str, value: Any) -> bool:
    return name[0] != "_" and any(one.grad_fn is not None for one in tensors_in(value))
