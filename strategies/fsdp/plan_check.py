"""Compare the first forward of blocks whose layers are split with one of full layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError, first_of, printable
from trainer.model.blocks import class_of, without_caches
from trainer.model.reachable import containers, content, tensors_in
from trainer.strategies.fsdp.adapters import FullInputs
from trainer.strategies.fsdp.context import gather, of_first
from trainer.strategies.fsdp.first_batch import first_argument, refuse_outer_checkpoint
from trainer.strategies.fsdp.plan import HOW_GRADIENTS, SharedByHeads
from trainer.strategies.fsdp.rehearsal import Difference, Reference, replaced_parameters, way_of

log = logging.getLogger("trainer")

OUTPUT = "its output"
"""The words for the first tensor that a block returns."""
GRADIENT = "the gradient of "
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
    """

    def __init__(self, module: nn.Module, styles: Mapping[str, ParallelStyle], group: dist.ProcessGroup) -> None:
        self._module, self._group, self._styles = module, group, styles
        layers = {name: module.get_submodule(name) for name in styles}
        self._hooks = {name: _hooks_of(layer) for name, layer in layers.items()}
        """The hooks of each layer without those that split it."""
        self.compared = set[tuple[Any, ...]]()
        """The ways of blocks, see `way_of`, that have been compared; one with gradients is one without, too."""

    def watch(self, blocks: Mapping[str, nn.Module], here: Mapping[str, nn.Module]) -> None:
        """Compare modules in their first forward, if their layers are split by the styles of `STYLES`.

        Args:
            blocks: all blocks by name.
            here: those of this process. Compared too are modules around a pair of layers outside of the blocks.
        """
        for name, block in {**here, **self._around_pairs(blocks)}.items():
            own = {layer.removeprefix(f"{name}."): layer for layer in self._styles if layer.startswith(f"{name}.")}
            split = {_splits_sequences(self._styles[layer]) for layer in own.values()}
            if own and name not in self._styles and None not in split:
                hooks = {inner: self._hooks[layer] for inner, layer in own.items()}
                block.register_forward_pre_hook(self._comparer(name, hooks, True in split), with_kwargs=True)

    def _around_pairs(self, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the modules that compute with split features outside of the blocks; warn where there is none."""
        outside = [layer for layer in self._styles if not layer.startswith(tuple(f"{name}." for name in blocks))]
        leaves = [layer for layer in outside if _returns_part(self._styles[layer])]
        ends = [layer for layer in outside if isinstance(self._styles[layer], RowwiseParallel)]
        found: dict[str, nn.Module] = {}
        alone = []
        for layer in leaves:
            around = layer.rpartition(".")[0]
            while around and not any(end.startswith(f"{around}.") for end in ends):
                around = around.rpartition(".")[0]
            if around and not any(name.startswith(f"{around}.") for name in blocks):
                found[around] = self._module.get_submodule(around)
            else:
                alone.append(layer)
        if alone:
            log.warning(
                "tensor_parallel: what is computed between %s and the next layer is in no module without others, so "
                "that nothing compares it with full layers: put the two into a module, or compare the first losses "
                "with those of one process",
                first_of(alone),
            )
        return found

    def _comparer(self, name: str, hooks: Mapping[str, Hooks], split: bool) -> Any:
        def compare(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling() and (way := way_of(name, block, args, kwargs)) not in self.compared:
                self.compared.update((way, (False, *way[1:])))
                refuse_outer_checkpoint("tensor_parallel", name, block)
                self._compare(name, block, hooks, split, without_caches(args), without_caches(kwargs))

        return compare

    def _compare(
        self, name: str, block: nn.Module, hooks: Mapping[str, Hooks], split: bool, args: Any, kwargs: Any
    ) -> None:
        """Raise ConfigError if a block's output differs from that with full layers, or in training its gradients do.

        Other outputs, and what the block keeps, count in training, if something is computed from them.

        Args:
            split: the block takes and returns this process's part of sequences, which full layers have full.
        """
        device = next(block.parameters()).device
        full_args, full_kwargs = self._with_full_sequences(args, kwargs) if split else (args, kwargs)
        layers = {block.get_submodule(inner): own for inner, own in hooks.items()}
        parts = dist.get_world_size(self._group)

        def in_full(cast: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
            with _full_layers(block, layers):
                results = _computed(block, cast((full_args, full_kwargs)), not split)
            if OUTPUT in results:
                results[OUTPUT] = of_first(results[OUTPUT], self._group)
            if split and OUTPUT in results:
                results[OUTPUT] = results[OUTPUT].chunk(parts, 1)[dist.get_rank(self._group)]
            return results

        def by_plan(cast: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
            return _computed(block, cast((args, kwargs)), not split)

        try:
            trains, inputs = torch.is_grad_enabled(), (args, kwargs)
            found = Reference(block, device, in_full, gradients=trains, inputs=inputs).compare(by_plan)
        except ConfigError:
            raise
        except (RuntimeError, ValueError, TypeError) as cause:
            # The forward itself raises it, too, or the block works with parts of the features only.
            log.warning(
                "tensor_parallel: %s cannot be computed with full layers (%s), and nothing compares its plan: write "
                "view(..., -1, head_size) in place of a process's number of heads, or compare the first losses with "
                "those of one process",
                name,
                printable(str(cause).partition("\n")[0]),
            )
            return
        if OUTPUT not in found:
            return
        output, of_gradients = found.pop(OUTPUT), [result for result in found if result.startswith(GRADIENT)]
        gradients = {result: found.pop(result) for result in of_gradients}
        worst, gradient = _worst(found), _worst(gradients)
        same = [*map(torch.zeros_like, output)]
        differences = torch.stack([*output, *gradients.get(gradient, same), *found.get(worst, same)])
        dist.all_reduce(differences, op=dist.ReduceOp.MAX, group=self._group)
        output, of_gradient, other = (Difference(*two) for two in differences.view(3, 2))
        wrong = f"{name} ({class_of(block).__name__}) does not compute the same:"
        if output.of_rounding > 1:
            raise self._error(f"{wrong} its outputs are {output.describe()}", split)
        if of_gradient.of_rounding > 1:
            raise ConfigError(
                f"tensor_parallel={parts}: with the layers that tensor_parallel_plan splits {wrong} "
                f"{gradient or 'a gradient'} is {of_gradient.describe()}. {HOW_GRADIENTS}"
            )
        if other.of_rounding > 1:
            error = self._error(f"{wrong} {worst} is {other.describe()} (only logged: detach() it)", split)
            block.register_forward_hook(self._refuser(worst, error), with_kwargs=True)

    def _refuser(self, name: str, error: ConfigError) -> Any:
        """Return a forward hook that raises `error` if a loss may be computed from a result of `_results`."""

        def refuse(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            result = _results(block, output, (args, kwargs)).get(name)
            if result is not None and result.requires_grad:
                raise error

        return refuse

    def _error(self, words: str, split: bool) -> ConfigError:
        return ConfigError(
            f"tensor_parallel={dist.get_world_size(self._group)}: with the layers that tensor_parallel_plan splits "
            f"{words}. Between a 'colwise' and a 'rowwise' layer each process has some of the features or heads, and "
            "what is computed there cannot depend on the others: a weight with several parts (a fused qkv, gate and "
            "up) is grouped by heads or several layers; norms, softmax and means over these features, and numbers that "
            "go by the count of heads, need layers that are not split."
            + (" Positions and lengths of the block's own are those of a part of the sequence." if split else "")
        )

    def _with_full_sequences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a block with the parts of sequences of all processes in the first one. Collective."""
        own = first_argument(args, kwargs).detach()
        whole = own.full_tensor() if isinstance(own, DTensor) else gather(own, 1, self._group)
        return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): whole})


def _worst(found: Mapping[str, Difference]) -> str:
    return max(found, key=lambda result: float(found[result].of_rounding), default="")


def _computed(block: nn.Module, arguments: tuple[Any, Any], of_arguments: bool) -> dict[str, torch.Tensor]:
    """Return `_results` of a call, with gradients of a sum of the output if they are enabled. Collective."""
    leaves: dict[str, torch.Tensor] = {name: p for name, p in block.named_parameters() if p.requires_grad}

    def as_leaf(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not one.requires_grad:
            return one
        leaf = one.detach().requires_grad_(of_arguments and torch.is_grad_enabled())
        if leaf.requires_grad:
            leaves[f"argument {len(leaves) - parameters + 1}"] = leaf
        return leaf.clone()  # which can be changed in place

    parameters = len(leaves)
    args, kwargs = map_leaves(arguments, as_leaf)
    results = _results(block, block.forward(*args, **kwargs), (args, kwargs))
    if OUTPUT not in results or not results[OUTPUT].requires_grad:
        return results
    output = results[OUTPUT]
    weights = torch.cos(torch.arange(output.shape[-1:].numel(), device=output.device))
    of_leaves = torch.autograd.grad((output * weights).sum(), [*leaves.values()], materialize_grads=True)
    found = {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in zip(leaves, of_leaves, strict=True)
    }
    least = 1e-5 * max(float(one.norm()) for one in found.values())
    # Gradients that should be 0, as of a bias of keys, are rounding errors, which may differ.
    return results | {f"{GRADIENT}{name}": one for name, one in found.items() if float(one.norm()) > least}


def _results(block: nn.Module, output: Any, arguments: tuple[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the numbers that a block has returned, written into its arguments, or keeps, by words for them."""
    first, *others = map(_own, tensors_in(output))
    written = map(_own, tensors_in([[*content(one).values()] for one in containers(arguments)]))
    found = {OUTPUT: first, **{f"its output {number}": other for number, other in enumerate(others, start=2)}}
    found |= {f"tensor {number} in lists and dicts that it gets": one for number, one in enumerate(written, start=1)}
    for path, child in block.named_modules():
        for attribute, value in vars(child).items():
            if attribute not in ("_parameters", "_buffers"):
                kept = [_own(one) for one in tensors_in(value)]
                found.update({f"what it keeps in {path + '.' if path else ''}{attribute}": one for one in kept[:1]})
    return {name: one if one.dtype == torch.float32 else one.float() for name, one in found.items() if _is_real(one)}


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type != "meta"


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _hooks_of(layer: nn.Module) -> Hooks:
    return dict(layer._forward_pre_hooks), dict(layer._forward_hooks)


def _returns_part(style: ParallelStyle) -> bool:
    """Whether a style's layer hands plain tensors to the next one that are parts of features."""
    return isinstance(style, ColwiseParallel) and style.use_local_output and style.output_layouts == (Shard(-1),)


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
        full = parameter.full_tensor() if id(parameter) in planned else None
        return None if full is None else nn.Parameter(full.detach(), requires_grad=parameter.requires_grad)

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
