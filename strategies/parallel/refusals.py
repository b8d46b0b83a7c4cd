"""Find what cannot be split over processes in modules and configs alone, before the first step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.errors import ConfigError, raise_problems
from trainer.model.blocks import class_of
from trainer.strategies.fsdp.mesh import ModelSplit

HOW = (
    "Blocks mix tokens by torch.nn.functional.scaled_dot_product_attention only, so that each process may have some of "
    "the tokens"
)


def without_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate what a backward calls, to raise ConfigError with `create_graph=True`.

    The collectives of a model that is split over processes leave no graph, so that second gradients would be wrong.
    """

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise ConfigError(
                "create_graph=True through layers or sequences that are split over processes (tensor_parallel, "
                "context_parallel, expert_parallel), whose gradients have no graph: second gradients, as of a gradient "
                "penalty, would be wrong. Use 'ddp', or 'fsdp' without these options."
            )
        return backward(*args)

    return checked


def refuse_unsplittable(module: nn.Module, blocks: Mapping[str, nn.Module], layout: ModelSplit) -> None:
    """Raise ConfigError for all blocks that cannot be stages of a pipeline, or compute parts of sequences."""
    problems: list[str] = []
    if layout.pipeline > 1:
        problems += _repeated_blocks(module, blocks)
    if layout.context > 1:
        problems += _mixing_layers(blocks)
    raise_problems(problems, type(module).__name__)


def _repeated_blocks(module: nn.Module, blocks: Mapping[str, nn.Module]) -> list[str]:
    names: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        names.setdefault(id(child), []).append(name)
    parents = {name.rpartition(".")[0] for name in blocks}
    problems = []
    for block in blocks.values():
        places = [name for name in names[id(block)] if name.rpartition(".")[0] in parents]
        if len(places) > 1:
            problems.append(
                f"pipeline_parallel: {' and '.join(places[:2])} are one block, and a pipeline runs each block once for "
                "a batch: give each place a block of its own, or use another strategy."
            )
    return problems


def _mixing_layers(blocks: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each class of layers that mixes tokens in a way of its own, wherever it is used."""
    known: set[type] = set()
    for name, block in blocks.items():
        for path, layer in block.named_modules():
            what = _mixes(layer)
            if what and class_of(layer) not in known:
                known.add(class_of(layer))
                place = ".".join(filter(None, (name, path)))
                yield f"context_parallel: {place} is of class {class_of(layer).__name__}, {what}. {HOW}."


def _mixes(layer: nn.Module) -> str:
    if class_of(layer) is nn.MultiheadAttention:
        return "whose attention is code of its own"
    if isinstance(layer, nn.RNNBase):
        return "whose output depends on the tokens before"
    if isinstance(layer, _NormBase):
        return "whose statistics are those of all tokens"
    return ""


_COLLECTED = {
    "output_router_logits": "whose loss then has a part that is computed from the routers of all blocks",
    "output_hidden_states": "which then returns what goes into all blocks",
    "output_attentions": "which then returns the attention of all blocks",
}
"""Settings by which Hugging Face models collect something from their blocks -> the fault where these are split."""


def hugging_face_models(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and modules of Hugging Face models, the outer ones first."""
    transformers = sys.modules.get("transformers")
    named = [] if transformers is None else module.named_modules()
    return [(name, child) for name, child in named if isinstance(child, transformers.PreTrainedModel)]  # type: ignore[union-attr]


def refuse_collecting(option: str, module: nn.Module) -> None:
    """Have the Hugging Face models in a module refuse to collect something from all their blocks, and to generate."""
    for name, child in hugging_face_models(module):
        child.register_forward_pre_hook(partial(_check_call, option, name), with_kwargs=True)
        if hasattr(child, "generate"):
            child.generate = partial(_refuse_generate, option, name)


def _check_call(option: str, name: str, model: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    config = model.config.get_text_config()
    for setting, fault in _COLLECTED.items():
        if kwargs.get(setting, getattr(config, setting, False)):
            raise ConfigError(
                f"{option}: {setting}=True in a call or the config of {name}, {fault} for all tokens, and a process "
                "has some of them. Set it to False, or use tensor_parallel or expert_parallel."
            )


def _refuse_generate(option: str, name: str, *args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        f"{option}: {name}.generate() computes one token after the other from what all blocks keep of those before, "
        "and a process has some of the blocks or tokens. Generate from a checkpoint on one device or with "
        "tensor_parallel (trainer checkpoint export writes a folder for from_pretrained); here compute losses or "
        "logits of given tokens."
    )
