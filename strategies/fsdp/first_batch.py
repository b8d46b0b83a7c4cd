"""Find what a stage of a pipeline computes from other stages' parameters, which are NaN here, in its first batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, first_of
from trainer.model.blocks import class_of


class FirstBatch:
    """Checks the numbers of a stage's first batch, and of the first one in training.

    Args:
        module: of which this process has a stage.
        stage: its number.
        elsewhere: names of the parameters of other stages.
    """

    def __init__(self, module: nn.Module, stage: int, elsewhere: set[str]) -> None:
        self._module, self._stage, self._elsewhere = module, stage, elsewhere
        self._checked = self._loss_checked = False
        """True after the first forward, and after the first forward of a training step."""

    def end_forward(self, training: bool) -> None:
        """Stop checking forwards; after one in training, stop checking losses, too."""
        self._checked = True
        self._loss_checked = self._loss_checked or training

    def block_checker(self, name: str) -> Callable[..., Any]:
        """Return a forward hook for a block.

        Raises:
            ConfigError: the block's output is not a tensor, or not finite.
        """

        def check(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._checked or torch.compiler.is_compiling():
                return
            if not isinstance(output, torch.Tensor):
                raise ConfigError(
                    f"pipeline_parallel: {name} ({class_of(block).__name__}) returns a {type(output).__name__}, and "
                    "what a stage sends is one tensor: have the block return it, or use another strategy."
                )
            if not torch.isfinite(output.detach()).all():
                raise self._depends(f"the output of {name} ({class_of(block).__name__})", output, (args, kwargs))

        return check

    def left_checker(self, name: str) -> Callable[..., Any]:
        """Return a forward hook for a block; see `refuse_left_tensors`."""

        def check(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self._loss_checked:
                refuse_left_tensors("pipeline_parallel", name, block, (args, kwargs))

        return check

    def _depends(self, what: str, output: torch.Tensor, inputs: Any = ()) -> ConfigError:
        names = self._stand_ins_in([output, *tensors_in(inputs)])
        because = f"it depends on {first_of(names)}" if names else "it depends on more than the block before"
        return ConfigError(
            f"pipeline_parallel: {what} is not finite in the first batch on stage {self._stage}: {because}, whose "
            "values another stage has. Between stages only the blocks' first argument travels: compute other inputs "
            "from the batch, in the block or without parameters; register what comes before the blocks before them "
            "in the module, and what comes after them after."
        )

    def _stand_ins_in(self, outputs: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of other stages' parameters from which the outputs were computed."""
        names = {id(p): name for name, p in self._module.named_parameters() if name in self._elsewhere}
        found: dict[str, None] = {}
        seen: set[Any] = set()
        waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in names:
                found[names[id(variable)]] = None
            waiting += [before for before, _ in node.next_functions if before is not None]
        return list(found)

    def check_loss(self, outputs: Any) -> None:
        """Raise ConfigError if the loss depends on other stages' parameters."""
        if self._loss_checked:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and not torch.isfinite(loss.detach()).all() and self._stand_ins_in([loss]):
            raise self._depends("the loss", loss)


def refuse_left_tensors(option: str, name: str, block: nn.Module, inputs: Any) -> None:
    """Raise ConfigError if a block keeps a tensor that it has computed from its inputs, such as a loss of its own.

    Only a block's output goes on to other processes, and is of full sequences: what else is made of the tensors that
    blocks keep would be wrong without a word.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    begins = {torch.autograd.graph.get_gradient_edge(one).node for one in tensors_in(inputs) if one.requires_grad}
    for path, child in block.named_modules() if begins else ():
        for attribute, value in vars(child).items():
            kept = [one for one in tensors_in(value) if one.grad_fn is not None]
            if attribute not in ("_parameters", "_buffers") and any(_comes_from(one.grad_fn, begins) for one in kept):
                place = ".".join(filter(None, (name, path, attribute)))
                raise ConfigError(
                    f"{option}: {place} is a tensor with a gradient that {name} ({class_of(block).__name__}) keeps, "
                    "and only what a block returns goes on to other processes: a loss that is computed from it would "
                    "be wrong. Keep it with detach() if it is only logged; or use another strategy."
                )


def _comes_from(node: Any, begins: set[Any]) -> bool:
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node in begins:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return False


def refuse_router_losses(option: str, module: nn.Module) -> None:
    """Raise ConfigError if a Hugging Face model adds a loss of its routers, which it collects from its blocks."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for name, child in module.named_modules():
        if isinstance(child, transformers.PreTrainedModel):
            if getattr(child.config.get_text_config(), "output_router_logits", False):
                raise _router_loss(option, name, "output_router_logits is True in the config of")
            child.register_forward_pre_hook(partial(_check_call, option, name), with_kwargs=True)


def _check_call(option: str, name: str, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("output_router_logits"):
        raise _router_loss(option, name, "output_router_logits=True in a call of")


def _router_loss(option: str, name: str, found: str) -> ConfigError:
    return ConfigError(
        f"{option}: {found} {name}, whose loss then has a part that is computed from the routers of all blocks for all "
        "tokens, and a process has some of them. Set it to False, or use tensor_parallel or expert_parallel."
    )


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """Return the tensors in any nesting of dicts, lists, tuples and the like."""
    leaves, _ = torch.utils._pytree.tree_flatten(nested)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
