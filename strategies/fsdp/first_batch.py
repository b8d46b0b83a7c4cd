"""Find what a stage of a pipeline computes from other stages' parameters, which are NaN here, in its first batch."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, first_of
from trainer.model.blocks import class_of, without_caches
from trainer.model.reachable import global_containers, nodes_behind, objects_behind, places, tensors_in
from trainer.strategies.fsdp.rehearsal import rehearsal


class FirstBatch:
    """Checks the numbers of a stage's first batch, and of the first one in training.

    Args:
        module: of which this process has a stage.
        stage: its number.
        elsewhere: names of the parameters of other stages.
        blocks: names of all blocks.
    """

    def __init__(self, module: nn.Module, stage: int, elsewhere: set[str], blocks: Iterable[str]) -> None:
        self._module, self._stage, self._elsewhere = module, stage, elsewhere
        within = tuple(f"{name}." for name in blocks)
        self._around = [n for n, _ in module.named_parameters() if n in elsewhere and not n.startswith(within)]
        """Names of those that are outside of the blocks."""
        self._checked = self._has_trained = False
        """True after the first forward, and the first of a training step."""
        self._passed = torch.full((), torch.nan, device="cpu", requires_grad=True)
        """The outputs of blocks of earlier stages."""
        self._passed.register_hook(self._refuse_gradient)

    def end_forward(self) -> None:
        """Stop checking forwards."""
        self._checked = True

    def passer(self) -> Callable[..., Any]:
        """Return the forward of a block of an earlier stage: its input, as NaN, to find what else depends on it.

        In a later step its gradient is refused. The input is no NaN by itself where the weights before the blocks are
        tied to others of this stage.
        """

        def pass_by(*args: Any, **kwargs: Any) -> Any:
            hidden = first_argument(args, kwargs)
            if not (isinstance(hidden, torch.Tensor) and (hidden.is_floating_point() or hidden.is_complex())):
                return hidden
            return hidden + self._passed.to(hidden.device, hidden.dtype)

        return pass_by

    def _refuse_gradient(self, gradient: torch.Tensor) -> None:
        raise ConfigError(
            f"pipeline_parallel: in this step stage {self._stage} computes from the output of a block of an earlier "
            "stage, which it does not have: between stages only the blocks' first argument travels. Compute what comes "
            "after the blocks from the last one's output; or use another strategy."
        )

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

    def _depends(self, what: str, output: torch.Tensor, inputs: Any = ()) -> ConfigError:
        names = self._stand_ins_in([output, *tensors_in(inputs)])
        if names:
            because = f"it depends on {first_of(names)}, whose values another stage has"
        else:  # not in the graph, or there is none in validation
            others = f" ({first_of(self._around)})" if self._around else ""
            because = f"the batch or the block has made it so, or it depends on what another stage has{others}"
        return ConfigError(
            f"pipeline_parallel: {what} is not finite in the first batch on stage {self._stage}: {because}. "
            "Between stages only the blocks' first argument travels: compute other inputs from the batch, in the block "
            "or without parameters; register what comes before the blocks before them in the module, and what comes "
            "after them after. In a model of somebody else, register it again, before fit: `last = decoder.norm; "
            "del decoder.norm; decoder.norm = last`."
        )

    def _stand_ins_in(self, outputs: Sequence[torch.Tensor]) -> list[str]:
        """Return the names of other stages' parameters from which the outputs were computed."""
        names = {id(p): name for name, p in self._module.named_parameters() if name in self._elsewhere}
        names[id(self._passed)] = "the outputs of blocks of earlier stages"
        nodes = nodes_behind(output.grad_fn for output in outputs)
        variables = (id(getattr(node, "variable", None)) for node in nodes)
        return list(dict.fromkeys(names[one] for one in variables if one in names))

    def check_loss(self, outputs: Any) -> None:
        """Raise ConfigError if the loss of the first training step depends on other stages' parameters."""
        if self._has_trained:
            return
        self._has_trained = True
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and not torch.isfinite(loss.detach()).all() and self._stand_ins_in([loss]):
            raise self._depends("the loss", loss)


def left_checker(option: str, name: str, *in_training: Callable[..., None]) -> Callable[..., None]:
    """Return a forward hook that checks what a block keeps once in training (`in_training`, too) and evaluation."""
    checks = {True: refuse_left_tensors, False: refuse_left_in_evaluation}

    def check(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        trains = block.training
        if trains in checks and torch.is_grad_enabled() >= trains and not torch.compiler.is_compiling():
            checks.pop(trains)(option, name, block, (args, kwargs))
            for refuse in in_training if trains else ():
                refuse(name, block, (args, kwargs), output)

    return check


def refuse_left_tensors(option: str, name: str, block: nn.Module, inputs: Any) -> None:
    """Raise ConfigError if a block keeps a tensor that it has computed from its inputs, such as a loss of its own.

    Only a block's output goes on to other processes, and is of full sequences: what else is made of the tensors that
    blocks keep would be wrong without a word.
    """
    trained = [one for one in (*tensors_in(inputs), *block.parameters()) if one.requires_grad]
    begins = {torch.autograd.graph.get_gradient_edge(one).node for one in trained}
    seen: set[int] = set()
    for place, value in (*places(name, block, inputs), *global_containers(block)):
        tensors = [one for one in objects_behind(value, seen) if isinstance(one, torch.Tensor)]
        if not begins.isdisjoint(nodes_behind(one.grad_fn for one in tensors)):
            raise ConfigError(
                f"{option}: {place} is a tensor with a gradient that {name} ({class_of(block).__name__}) keeps, "
                "and only what a block returns goes on to other processes: what is computed from it, such as a "
                "loss, would be wrong. Keep it with detach() if it is only logged; or use another strategy."
            )


def refuse_left_in_evaluation(
    option: str, name: str, block: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    """Call a block's forward once more, with gradients, and raise ConfigError for what it keeps in evaluation."""
    leaves, structure = torch.utils._pytree.tree_flatten(tuple(map(without_caches, inputs)))
    tensors = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.requires_grad_(True)
    args, kwargs = torch.utils._pytree.tree_unflatten(tensors, structure)
    with rehearsal(block, tensors_in(inputs)[0].device, inputs=inputs), torch.enable_grad():
        try:
            block.forward(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            return  # it has no gradients, or runs once for its inputs only
        refuse_left_tensors(option, name, block, (args, kwargs))


def refuse_outer_checkpoint(option: str, name: str, block: nn.Module) -> None:
    """Raise ConfigError if a block that is being called is within `torch.utils.checkpoint`.

    The backward would call it once more by itself, when what was around it in the forward has gone.
    """
    if any(frame.f_code is _CHECKPOINT for frame, _ in traceback.walk_stack(None)):
        raise ConfigError(
            f"{option}: {name} ({class_of(block).__name__}) is called by torch.utils.checkpoint, whose backward would "
            'call it out of turn: call the block itself, and give Trainer(activation_checkpointing="auto").'
        )


_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the argument of a block that the block before has returned."""
    return args[0] if args else next(iter(kwargs.values()))


_COLLECTED = {
    "output_router_logits": "whose loss then has a part that is computed from the routers of all blocks",
    "output_hidden_states": "which then returns what goes into all blocks",
    "output_attentions": "which then returns the attention of all blocks",
}
"""Settings by which Hugging Face models collect something from their blocks -> the fault where these are split."""


def refuse_collecting(option: str, module: nn.Module) -> None:
    """Raise ConfigError if a Hugging Face model collects something from all its blocks; have its calls refuse it."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    for name, child in module.named_modules():
        if isinstance(child, transformers.PreTrainedModel):
            for setting in _COLLECTED:
                if getattr(child.config.get_text_config(), setting, False):
                    raise _collects(option, name, setting, f"{setting} is True in the config of")
            child.register_forward_pre_hook(partial(_check_call, option, name), with_kwargs=True)
            if hasattr(child, "generate"):
                child.generate = partial(_refuse_generate, option, name)


def _check_call(option: str, name: str, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    for setting in _COLLECTED:
        if kwargs.get(setting):
            raise _collects(option, name, setting, f"{setting}=True in a call of")


def _collects(option: str, name: str, setting: str, found: str) -> ConfigError:
    return ConfigError(
        f"{option}: {found} {name}, {_COLLECTED[setting]} for all tokens, and a process has some of them. Set it to "
        "False, or use tensor_parallel or expert_parallel."
    )


def _refuse_generate(option: str, name: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"{option}: {name}.generate() computes one token after the other from what all blocks keep of those before, "
        "and a process has some of the blocks or tokens. Generate from a checkpoint on one device or with "
        "tensor_parallel (trainer checkpoint export writes a folder for from_pretrained); here compute losses or "
        "logits of given tokens."
    )
