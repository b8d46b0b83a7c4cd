"""Find what a stage of a pipeline computes from other stages' parameters, which are NaN here, in its first batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        """Check no more forwards, or no more losses."""
        self._checked = True
        self._loss_checked = self._loss_checked or training

    def block_checker(self, name: str) -> Callable[..., Any]:
        """Return a forward hook for a block.

        Raises:
            ConfigError: the block's output is no tensor, or not finite.
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

    def _depends(self, what: str, output: torch.Tensor, inputs: Any = ()) -> ConfigError:
        names = self._stand_ins_in([output, *_tensors(inputs)])
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


def _tensors(nested: Any) -> list[torch.Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(nested)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
