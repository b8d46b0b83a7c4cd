"""Compare the first forward of blocks whose layers are split with one of full layers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from trainer.errors import ConfigError, first_of
from trainer.model.blocks import class_of
from trainer.strategies.parallel.adapters import FullInputs
from trainer.strategies.parallel.context import gather
from trainer.strategies.parallel.one_reader import HOW_GRADIENTS
from trainer.strategies.parallel.plan import SharedByHeads
from trainer.strategies.parallel.verify import (
    OUTPUT,
    Inputs,
    Results,
    Verification,
    compare,
    filled,
    replaced_parameters,
    results_of,
)

log = logging.getLogger("trainer")

Hooks = list[tuple[dict[int, Any], dict[int, Any]]]
"""Tables of hooks of layers, each with what was in it at a moment."""


class PlanCheck:
    """Compares the first forward of each block with a forward of full layers.

    A plan may fit all shapes and be wrong: a fused layer may be cut through its parts, numbers may go by the count of
    heads, or a mean may be taken over split features.

    Args:
        module: before its layers are split.
        styles: the styles of its layers by name.
        group: the processes among which layers are split.
        verification: of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        styles: Mapping[str, ParallelStyle],
        group: dist.ProcessGroup,
        verification: Verification,
    ) -> None:
        self._module, self._group, self._styles = module, group, styles
        self._verification = verification
        self._hooks = {name: _hooks_of(module.get_submodule(name)) for name in styles}
        """The hooks of each layer without those that split it."""

    def watch(self, blocks: Mapping[str, nn.Module], here: Mapping[str, nn.Module]) -> None:
        """Compare modules in their first forward, if their layers are split by the styles of `STYLES`.

        Args:
            blocks: all blocks by name.
            here: the blocks of this process. Modules around a pair of layers outside of the blocks are compared, too.
        """
        for name, block in {**here, **self._around_pairs(blocks)}.items():
            own = [layer for layer in self._styles if layer.startswith(f"{name}.")]
            split = {_splits_sequences(self._styles[layer]) for layer in own}
            if own and name not in self._styles and None not in split:
                block.register_forward_pre_hook(partial(self._verify, name, own, True in split), with_kwargs=True)

    def _around_pairs(self, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the modules that compute with split features outside of the blocks; warn where there is none."""
        inside = tuple(f"{name}." for name in blocks)
        parts = [layer for layer, style in self._styles.items() if _returns_part(style)]
        around = {layer: self._module_of_pair(layer, blocks) for layer in parts if not layer.startswith(inside)}
        alone = [layer for layer, name in around.items() if not name]
        if alone:
            log.warning(
                "tensor_parallel: nothing compares what is computed between %s and the next layer with full layers. "
                "Put the two layers into a separate module, or compare the first losses with losses of one process",
                first_of(alone),
            )
        return {name: self._module.get_submodule(name) for name in around.values() if name}

    def _module_of_pair(self, layer: str, blocks: Iterable[str]) -> str:
        """Return the innermost module with a layer and the end of a pair, if it has no blocks; otherwise ""."""
        ends = [name for name, style in self._styles.items() if isinstance(style, RowwiseParallel)]
        name = layer.rpartition(".")[0]
        while name and not any(end.startswith(f"{name}.") for end in ends):
            name = name.rpartition(".")[0]
        return "" if any(block.startswith(f"{name}.") for block in blocks) else name

    def _verify(
        self, name: str, names: list[str], split: bool, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise ConfigError if a block does not compute the same as with full layers, in the first call of a kind.

        Args:
            names: of its layers that are split.
            split: the block takes and returns this process's part of sequences, which full layers have full.
        """
        if not self._verification.is_due("tensor_parallel", name, block, args, kwargs):
            return
        layers = [self._module.get_submodule(layer) for layer in names]
        hooks = [table for layer in names for table in self._hooks[layer]]
        parts, part = dist.get_world_size(self._group), dist.get_rank(self._group)

        def in_full(inputs: Inputs) -> Results:
            full = self._with_full_sequences(*inputs) if split else inputs
            with _full_layers(block, layers, hooks):
                results = results_of(block, full, block.forward, _trained(block), not split)
            if not split:
                return results
            # Each process has a part of the outputs, and of what else is made of tokens.
            outputs = {key: one for key, one in results.items() if key.startswith(OUTPUT)}
            return results | {key: one.chunk(parts, 1)[part] for key, one in outputs.items()}

        def by_plan(inputs: Inputs) -> Results:
            return results_of(block, inputs, block.forward, _trained(block), not split)

        difference = compare(name, block, (args, kwargs), in_full, by_plan, self._group)
        if difference:
            raise ConfigError(
                f"tensor_parallel={parts}: with the layers that tensor_parallel_plan splits {name} "
                f"({class_of(block).__name__}) does not compute the same: {difference}. Between a 'colwise' and a "
                "'rowwise' layer each process has some of the features or heads: give both of a pair, view heads as "
                "-1, and group a weight with several parts (a fused qkv, gate and up) by heads, or make several layers "
                "of it. Split no layers around norms, softmax and means over features, or numbers that go by the count "
                "of heads. With styles that split sequences, pass positions and lengths as arguments. Keep with "
                f"detach() what is only logged. For gradients: {HOW_GRADIENTS}"
            )

    def _with_full_sequences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a block with the parts of sequences of all processes in the first one. Collective."""
        own = (args[0] if args else next(iter(kwargs.values()))).detach()
        full = own.full_tensor() if isinstance(own, DTensor) else gather(own, 1, self._group)
        return ((full, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): full})


def _trained(block: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in block.named_parameters() if p.requires_grad}


def _hooks_of(layer: nn.Module) -> Hooks:
    return [(table, dict(table)) for table in (layer._forward_pre_hooks, layer._forward_hooks)]


def _returns_part(style: ParallelStyle) -> bool:
    """Whether a style's layer hands plain tensors to the next one that are parts of features."""
    return isinstance(style, ColwiseParallel) and style.use_local_output and style.output_layouts == (Shard(-1),)


def _splits_sequences(style: ParallelStyle) -> bool | None:
    """Whether a style takes or returns parts of sequences; None: something else, which is not compared."""
    full, part = (Replicate(),), (Shard(1),)
    if isinstance(style, (ColwiseParallel, RowwiseParallel)):
        outer = style.input_layouts if isinstance(style, ColwiseParallel) else style.output_layouts
        return outer == part if outer in (full, part) and style.use_local_output else None
    if isinstance(style, SequenceParallel):
        return style.sequence_sharding[0].dim == 1
    return False if isinstance(style, (SharedByHeads, FullInputs)) else None


@contextmanager
def _full_layers(block: nn.Module, layers: list[nn.Module], hooks: Hooks) -> Iterator[None]:
    """Give layers of a block their full weights, and these hooks, which split nothing."""
    planned = {id(p) for layer in layers for p in layer.parameters(recurse=False) if isinstance(p, DTensor)}

    def full(parameter: Any) -> Any:
        if id(parameter) not in planned:
            return parameter
        return nn.Parameter(parameter.full_tensor().detach(), requires_grad=parameter.requires_grad)

    with filled(hooks), replaced_parameters(block, full):
        yield
