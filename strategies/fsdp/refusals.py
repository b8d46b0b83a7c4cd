"""Find what cannot be split over processes in modules and configs alone, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
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
