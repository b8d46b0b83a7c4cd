"""Tensor parallelism: divide layers over processes as a plan of name patterns says."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.errors import ConfigError, did_you_mean, first_of, raise_problems
from trainer.model.weights import AbsentParameter
from trainer.strategies.fsdp.experts import EXPERT_STYLES, takes_routing

Style = str | ParallelStyle | None
"""A word of `STYLES` or "experts", an object of torch, or None: replicated."""

Plan = Mapping[str, Style]
"""Names of submodules, or patterns of them with `*`, `?` and `[...]`, and how to divide them: see `STYLES`."""


def _rowwise(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    return RowwiseParallel()


STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": lambda module: ColwiseParallel(),
    "rowwise": _rowwise,
    "colwise_gather_output": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda module: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda module: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda module: RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda module: SequenceParallel(sequence_dim=2, use_local_output=True),
    "sequence_parallel": lambda module: SequenceParallel(),
    "colwise_from_sequence": lambda module: ColwiseParallel(input_layouts=Shard(1)),
    "rowwise_to_sequence": lambda module: RowwiseParallel(output_layouts=Shard(1)),
    "embedding_to_sequence": lambda module: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "colwise_loss_parallel": lambda module: ColwiseParallel(use_local_output=False),
}
"""The styles of torch (torch.distributed.tensor.parallel) by the words of Hugging Face's plans.

"colwise" splits the outputs of a layer, "rowwise" its inputs (of an embedding the vocabulary); between a colwise and a
rowwise layer each process has its part. "colwise_gather_output" (also "colwise_rep") gathers the outputs,
"rowwise_split_input" ("rowwise_rep") splits full inputs. "replicated_with_grad_allreduce" is for weights of each head
that heads share, such as Qwen3's `q_norm`.

Sequence parallelism, which splits the activations between the layers along the sequence (dimension 1):
"embedding_to_sequence", "sequence_parallel" for norms, "colwise_from_sequence", "rowwise_to_sequence".
"colwise_loss_parallel": the head, with logits that stay sharded for `cross_entropy`.
"""

_OTHER_WORDS = {
    "ep_router": "'experts' for the module of the experts",
    "grouped_gemm": "'experts' for the module of the experts",
    "packed_colwise": "separate layers for what is packed into one weight",
    "packed_rowwise": "separate layers for what is packed into one weight",
    "local_colwise": "'colwise'",
    "local_rowwise": "'rowwise'",
}
"""Words of Hugging Face's plans that are not supported -> what to use instead."""


def find_plan(module: nn.Module) -> dict[str, Style]:
    """Return the `tensor_parallel_plan` of the module, with that of each Hugging Face model in it; the module's counts.

    Raises:
        ConfigError: there is none, or it is no plan.
    """
    own = getattr(module, "tensor_parallel_plan", None) or {}
    if not isinstance(own, Mapping) or not all(isinstance(style, Style) for style in own.values()):
        raise ConfigError(
            f"{type(module).__name__}.tensor_parallel_plan: give a dict of name patterns and styles, such as "
            '{"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}.'
        )
    plan = {**dict(_plans_of_models(module)), **own}
    if not plan:
        raise ConfigError(
            f"{type(module).__name__} has no tensor_parallel_plan, and no Hugging Face model with a "
            'plan. Add one: tensor_parallel_plan = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}.'
        )
    return plan


def _plans_of_models(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the plans of the outermost Hugging Face models, by names from the root, without what they do not have."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    names, inside = [name for name, _ in module.named_modules()], set()
    for prefix, model in module.named_modules():
        if not isinstance(model, transformers.PreTrainedModel) or id(model) in inside:
            continue
        inside |= {id(child) for child in model.modules()}
        for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
            full = f"{prefix}.{pattern}".removeprefix(".")
            if style not in EXPERT_STYLES and any(fnmatchcase(name, full) for name in names):
                yield full, style
        config = model.config.get_text_config()
        for plan in (config.base_model_tp_plan, config.base_model_ep_plan):
            for pattern, style in (plan or {}).items():
                full = f"{prefix}*{pattern}"  # of the base model, whose place in this one differs
                matches = [name for name in names if fnmatchcase(name, full)]
                if style in EXPERT_STYLES and matches and takes_routing(module.get_submodule(matches[0])):
                    yield full, style


def resolve_plan(module: nn.Module, plan: Plan, parts: int) -> dict[str, ParallelStyle]:
    """Return the style of each submodule that the plan names; of several patterns the last one counts.

    Args:
        parts: the number of processes among which layers are split.

    Raises:
        ConfigError: a pattern matches nothing, a style is unknown, or a layer cannot be split by `parts`.
    """
    names = dict(module.named_modules())
    problems: list[str] = []
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        matches = [name for name in names if name and fnmatchcase(name, pattern)]
        if not matches:
            problems.append(
                f"tensor_parallel_plan: nothing matches {pattern!r}.{did_you_mean(pattern, filter(None, names))}"
            )
        if style in EXPERT_STYLES:
            continue
        if isinstance(style, str) and style not in STYLES:
            advice = did_you_mean(style, [*STYLES, "experts"], _OTHER_WORDS)
            problems.append(
                f"tensor_parallel_plan: {style!r} for {pattern!r} is no style.{advice} Styles: {', '.join(STYLES)}, "
                "experts, or one of torch.distributed.tensor.parallel."
            )
            continue
        for name in matches:
            found.pop(name, None)
            if style is not None:
                found[name] = STYLES[style](names[name]) if isinstance(style, str) else style
    raise_problems(problems, type(module).__name__)
    raise_problems([*_indivisible(names, found, parts), *_heads(module, parts)], type(module).__name__)
    return found


def _indivisible(names: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], parts: int) -> list[str]:
    problems = []
    for name, style in styles.items():
        weight = getattr(names[name], "weight", None)
        if weight is None or weight.dim() != 2 or not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            continue
        embedding = isinstance(names[name], nn.Embedding)
        if embedding:
            continue  # a vocabulary may be split unevenly
        size, what = (weight.shape[0], "outputs") if isinstance(style, ColwiseParallel) else (weight.shape[1], "inputs")
        if size % parts and not _is_gathered(style):
            problems.append(
                f"tensor_parallel={parts} does not divide the {size} {what} of {name}: choose a number that divides "
                "them, or leave the layer out of the plan."
            )
    return problems


def _is_gathered(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and any(isinstance(one, Replicate) for one in style.output_layouts)


def _heads(module: nn.Module, parts: int) -> list[str]:
    """Return a problem for each Hugging Face model whose heads cannot be split."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    models = [child for child in module.modules() if isinstance(child, transformers.PreTrainedModel)]
    heads = {
        (name, getattr(model.config, name, None) or parts)
        for model in models
        for name in ("num_attention_heads", "num_key_value_heads")
    }
    return [
        f"tensor_parallel={parts} does not divide the {number} {name} of the model."
        for name, number in sorted(heads)
        if number % parts
    ]


def apply_plan(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Divide the layers; weights that are tied stay tied.

    Raises:
        ConfigError: tied weights would be split in different ways.
    """
    ties = _tied_weights(module)
    here = {name: style for name, style in styles.items() if is_here(module.get_submodule(name))}
    shared = _SharedInput(mesh)
    for name, style in here.items():
        if isinstance(style, ColwiseParallel) and style.input_layouts == (Replicate(),):
            # Before the hook of the style, which takes a distributed tensor as it is.
            module.get_submodule(name).register_forward_pre_hook(shared.distribute)
    # Without sending anything: all processes have the values, or get them later.
    parallelize_module(module, mesh, here, src_data_rank=None)
    for (owner, name), *others in ties:
        kept = owner._parameters[name]
        for other, other_name in others:
            other_weight = other._parameters[other_name]
            if getattr(other_weight, "placements", None) != getattr(kept, "placements", None):
                raise ConfigError(
                    f"tensor_parallel_plan: {type(owner).__name__}.{name} and {type(other).__name__}.{other_name} are "
                    "one weight, and are split differently: give both layers styles that split it alike (an "
                    "embedding 'rowwise' and a head 'colwise'), or none."
                )
            other._parameters[other_name] = kept


class _SharedInput:
    """Has layers that read the same tensor, such as q, k and v, sum its gradients over the processes once.

    torch's styles make a distributed tensor for each layer, and so an all-reduce in each one's backward.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._last: tuple[weakref.ref[torch.Tensor], DTensor] | None = None

    def __deepcopy__(self, memo: object) -> _SharedInput:
        return _SharedInput(self._mesh)

    def distribute(self, layer: nn.Module, args: tuple[Any, ...]) -> Any:
        """Return the arguments of a layer with its input as a distributed tensor, the same for the next layers."""
        local = args[0] if args else None
        if not isinstance(local, torch.Tensor) or isinstance(local, DTensor) or not local.requires_grad:
            return None
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return None
        if self._last is None or self._last[0]() is not local:
            made = DTensor.from_local(local, self._mesh, (Replicate(),), run_check=False)
            made.register_hook(self._forget)
            self._last = weakref.ref(local), made
        return (self._last[1], *args[1:])

    def _forget(self, gradient: torch.Tensor) -> None:
        self._last = None


def is_here(layer: nn.Module) -> bool:
    """Whether this process has the weights of a layer, which may be on another stage of a pipeline."""
    parameters = list(layer.parameters())
    return not parameters or not all(isinstance(p, AbsentParameter) for p in parameters)


def _tied_weights(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that has several."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return [found for found in places.values() if len(found) > 1]


def describe_plan(module: nn.Module, styles: Mapping[str, ParallelStyle], experts: Collection[str] = ()) -> str:
    """Return which layers are split, and which layers with weights are replicated."""
    replicated = [
        name or "parameters of the module itself"
        for name, child in module.named_modules()
        if name not in styles and name not in experts and next(child.parameters(recurse=False), None) is not None
    ]
    split = [f"{len(styles)} layers"] if styles else []
    split += [f"the experts of {first_of(list(experts))}"] if experts else []
    return f"split by the plan: {' and '.join(split)}; replicated: {first_of(replicated, 5) if replicated else 'none'}"


class FirstStepErrors:
    """A context for steps that says, until one has succeeded, what an error of torch has to do with the plan."""

    def __init__(self, parts: int) -> None:
        self._parts, self._succeeded = parts, False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not self._succeeded and not isinstance(error, torch.OutOfMemoryError):
            raise ConfigError(
                f"tensor_parallel={self._parts}: the first step fails with the layers split by tensor_parallel_plan: "
                f"{str(error).splitlines()[0]}. Between a 'colwise' and a 'rowwise' layer each process has a part of "
                "the features: give both of a pair, view heads as -1, and have at least one head of queries and keys "
                "for each process. If it fails without tensor_parallel as well, the plan is not the cause."
            ) from error
        self._succeeded = self._succeeded or error is None


def needs_loss_parallel(styles: Mapping[str, ParallelStyle]) -> bool:
    """Whether a layer's outputs stay sharded, for a loss that torch's `loss_parallel` computes from them."""
    return any(isinstance(style, ColwiseParallel) and not style.use_local_output for style in styles.values())
