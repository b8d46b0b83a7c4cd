"""Compare the first forward of blocks whose layers are split with one of full layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from trainer.errors import ConfigError
from trainer.model.blocks import class_of, without_caches
from trainer.strategies.fsdp.adapters import FullInputs
from trainer.strategies.fsdp.context import gather
from trainer.strategies.fsdp.first_batch import first_argument, tensors_in
from trainer.strategies.fsdp.plan import SharedByHeads
from trainer.strategies.fsdp.rehearsal import rehearsal, replaced_parameters

FULL_PRECISION, LOW_PRECISION, FLOAT8 = 1e-2, 0.15, 0.3
"""Differences by rounding stay below these, also where a router chooses another expert for a few tokens."""
Hooks = tuple[dict[int, Any], dict[int, Any]]
"""The hooks of a layer before and after its forward."""


class PlanCheck:
    """Compares the first forward of each block with one in which all its layers are full.

    A plan may fit all shapes and be wrong: where a fused layer is cut through its parts, where numbers go by the count
    of heads, or where a mean is taken of features of which each process has some.

    Args:
        module: before its layers are split.
        styles: those of its layers by name.
        group: the processes among which layers are split.
        tolerance: the share by which the two may differ, of what a block adds, or of its output in low precision.
    """

    def __init__(
        self, module: nn.Module, styles: Mapping[str, ParallelStyle], group: dist.ProcessGroup, tolerance: float
    ) -> None:
        self._group, self._tolerance, self._styles = group, tolerance, styles
        layers = {name: module.get_submodule(name) for name in styles}
        self._hooks = {name: _hooks_of(layer) for name, layer in layers.items()}
        """The hooks of each layer without those that split it."""

    def watch(self, blocks: Mapping[str, nn.Module]) -> None:
        """Compare blocks in their first forward, if their layers are split by the styles of `STYLES`."""
        for name, block in blocks.items():
            own = {layer.removeprefix(f"{name}."): layer for layer in self._styles if layer.startswith(f"{name}.")}
            split = {_splits_sequences(self._styles[layer]) for layer in own.values()}
            if own and name not in self._styles and None not in split:
                hooks = {inner: self._hooks[layer] for inner, layer in own.items()}
                block.register_forward_pre_hook(self._comparer(name, hooks, True in split), with_kwargs=True)

    def _comparer(self, name: str, hooks: Mapping[str, Hooks], split: bool) -> Any:
        waiting = [True]

        def compare(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if waiting and not torch.compiler.is_compiling():
                waiting.clear()
                self._compare(name, block, hooks, split, without_caches(args), without_caches(kwargs))

        return compare

    def _compare(
        self, name: str, block: nn.Module, hooks: Mapping[str, Hooks], split: bool, args: Any, kwargs: Any
    ) -> None:
        """Raise ConfigError if a block's output differs from that with full layers.

        Args:
            split: the block takes and returns this process's part of sequences, which full layers have full.
        """
        device = next(block.parameters()).device
        full_args, full_kwargs = self._with_full_sequences(args, kwargs) if split else (args, kwargs)
        try:
            layers = {block.get_submodule(inner): own for inner, own in hooks.items()}
            with rehearsal(block, device), _full_layers(block, layers):
                (expected, *_) = tensors_in(block.forward(*full_args, **full_kwargs))
            if split:
                expected = expected.chunk(dist.get_world_size(self._group), 1)[dist.get_rank(self._group)]
            with rehearsal(block, device):
                (found, *_) = map(_own, tensors_in(block.forward(*args, **kwargs)))
        except (RuntimeError, ValueError, TypeError):
            return  # The forward itself raises it, or the block works with parts of the features only.
        if found.shape != expected.shape:
            return
        wrong, size = (found.float() - expected.float()).norm(), expected.float().norm()
        read = next((one for one in map(_own, tensors_in((args, kwargs))) if one.shape == expected.shape), None)
        if self._tolerance <= FULL_PRECISION and read is not None:
            size = torch.maximum((expected - read).norm(), size / 100)  # what the block adds
        difference = wrong / size.clamp(min=1e-12)
        dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=self._group)
        if not difference <= self._tolerance:
            raise ConfigError(
                f"tensor_parallel={dist.get_world_size(self._group)}: with the layers that tensor_parallel_plan splits "
                f"{name} ({class_of(block).__name__}) does not compute the same: its outputs are wrong by "
                f"{float(difference):.1%}. Between a 'colwise' and a 'rowwise' layer each process has some of the "
                "features or heads, and what is computed there cannot depend on the others: a weight with several "
                "parts (a fused qkv, gate and up) is grouped by heads or several layers; norms, softmax and means over "
                "these features, and numbers that go by the count of heads, need layers that are not split."
                + (" Positions and lengths of the block's own are those of a part of the sequence." if split else "")
            )

    def _with_full_sequences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a block with the parts of sequences of all processes in the first one. Collective."""
        own = first_argument(args, kwargs).detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else gather(own, 1, self._group)
        return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): whole})


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _hooks_of(layer: nn.Module) -> Hooks:
    return dict(layer._forward_pre_hooks), dict(layer._forward_hooks)


def _splits_sequences(style: ParallelStyle) -> bool | None:
    """Whether a style takes or returns parts of sequences; None: something else, which is not compared."""
    full, part = (Replicate(),), (Shard(1),)
    if isinstance(style, ColwiseParallel):
        return style.input_layouts == part if style.input_layouts in (full, part) and style.use_local_output else None
    if isinstance(style, RowwiseParallel):
        return style.output_layouts == part if style.output_layouts in (full, part) and style.use_local_output else None
    if isinstance(style, SequenceParallel):
        return style.sequence_sharding[0].dim == 1
    return False if isinstance(style, (SharedByHeads, FullInputs)) else None


@contextmanager
def _full_layers(block: nn.Module, layers: Mapping[nn.Module, Hooks]) -> Iterator[None]:
    """Give layers of a block their full weights, and take away the hooks that split what they read and return."""
    planned = {id(p) for layer in layers for p in layer.parameters(recurse=False) if isinstance(p, DTensor)}
    with_plan = {layer: _hooks_of(layer) for layer in layers}

    def full(parameter: Any) -> nn.Parameter | None:
        return nn.Parameter(parameter.full_tensor(), requires_grad=False) if id(parameter) in planned else None

    def use(hooks: Mapping[nn.Module, Hooks]) -> None:
        for layer, (before, after) in hooks.items():
            for table, wanted in ((layer._forward_pre_hooks, before), (layer._forward_hooks, after)):
                table.clear()
                table.update(wanted)

    use(layers)
    try:
        with replaced_parameters(block, full):
            yield
    finally:
        use(with_plan)
