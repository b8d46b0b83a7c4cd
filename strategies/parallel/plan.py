"""Tensor parallelism: split layers over processes as a plan of name patterns says."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from trainer.checkpoint.saved_names import outermost_models
from trainer.errors import ConfigError, did_you_mean, first_of, raise_problems
from trainer.model.full_parameters import ParameterSlot, slots_of
from trainer.model.weights import AbsentParameter
from trainer.strategies.parallel.adapters import styles_within, wrapped_layers
from trainer.strategies.parallel.experts import EXPERT_STYLES, add_up_gradients, takes_routing
from trainer.strategies.parallel.one_reader import differences_among, local_part
from trainer.strategies.parallel.refusals import hugging_face_models, without_graph

Style = str | ParallelStyle | None
"""A word of `STYLES` or "experts", an object of torch, or None: replicated."""

Plan = Mapping[str, Style]
"""Names of submodules, or patterns of them with `*`, `?` and `[...]`, and how to split them: see `STYLES`."""


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
    "shared_by_heads": lambda module: SharedByHeads(),
    "sequence_parallel": lambda module: SequenceParallel(),
    "colwise_from_sequence": lambda module: ColwiseParallel(input_layouts=Shard(1)),
    "rowwise_to_sequence": lambda module: RowwiseParallel(output_layouts=Shard(1)),
    "embedding_to_sequence": lambda module: RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "colwise_loss_parallel": lambda module: ColwiseParallel(use_local_output=False),
}
"""The styles of torch (torch.distributed.tensor.parallel) by the words of Hugging Face's plans.

"colwise" splits the outputs of a layer, "rowwise" its inputs (of an embedding the vocabulary); between a colwise and a
rowwise layer each process has its part. "colwise_gather_output" (also "colwise_rep") gathers the outputs,
"rowwise_split_input" ("rowwise_rep") splits full inputs. "replicated_with_grad_allreduce" is for weights that act on
split heads or features, such as Qwen3's `q_norm`, "shared_by_heads" for a layer whose full outputs the split heads
read, such as the one key of multi-query attention.

Sequence parallelism, which splits the activations between the layers along the sequence (dimension 1):
"embedding_to_sequence", "sequence_parallel" for norms, "colwise_from_sequence", "rowwise_to_sequence".
"colwise_loss_parallel": the head, with logits that stay sharded for `cross_entropy`.
"""


class SharedByHeads(ParallelStyle):
    """Replicate a layer whose outputs are read by the heads of all processes: the gradients of the outputs are added.

    Args:
        features: the number of last features that heads read; None: all. The first ones go through a split layer, which
            returns their full gradient.
    """

    def __init__(self, features: int | None = None) -> None:
        super().__init__()
        self.features = features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()
        unknown = [True]

        def refuse_full(gradient: torch.Tensor) -> None:
            if unknown and bool(gradient.any()) and torch.isfinite(gradient).all():
                if float(differences_among([gradient], group)) == 0:
                    raise ConfigError(
                        f"tensor_parallel={dist.get_world_size(group)}: 'shared_by_heads' adds up the gradients of a "
                        f"layer of {gradient.shape[-1]} outputs that are the same on all processes, so no split heads "
                        "read them: leave the layer out of the tensor_parallel_plan."
                    )
                unknown.clear()

        def add_up(layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            read = output if self.features is None else output[..., -self.features :]
            read = add_up_gradients(read, group)
            if unknown and read.requires_grad:
                read.register_hook(refuse_full)
            return read if self.features is None else torch.cat([output[..., : -self.features], read], -1)

        module.register_forward_hook(add_up)
        return module


def find_plan(module: nn.Module) -> dict[str, Style]:
    """Return the plans of the Hugging Face models in a module, overridden by the module's `tensor_parallel_plan`.

    Raises:
        ConfigError: there is no plan, or `tensor_parallel_plan` is not a plan.
    """
    own = getattr(module, "tensor_parallel_plan", None) or {}
    is_plan = isinstance(own, Mapping) and all(isinstance(style, Style) for style in own.values())
    plan = {**dict(_plans_of_models(module)), **own} if is_plan else {}
    if not plan:
        raise ConfigError(
            f"{type(module).__name__} has no tensor_parallel_plan, a dict of name patterns and styles, and no Hugging "
            "Face model with a plan. Add one, such as "
            'tensor_parallel_plan = {"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"}.'
        )
    return plan


def _plans_of_models(module: nn.Module) -> Iterator[tuple[str, Style]]:
    """Yield the plans of the outermost Hugging Face models, by names from the root, without what they do not have."""
    names = [name for name, _ in module.named_modules()]
    for prefix, model in outermost_models(module).items():
        config = model.config.get_text_config()
        for pattern, style in (getattr(model, "tp_plan", None) or {}).items():
            full = f"{prefix}{pattern}"
            if style not in EXPERT_STYLES and fnmatch.filter(names, full):
                yield full, SharedByHeads(config.qk_rope_head_dim) if style == "mla_kv_a_proj" else style
        of_tensors, of_experts = config.base_model_tp_plan or {}, config.base_model_ep_plan or {}
        for pattern, style in (*of_tensors.items(), *of_experts.items()):
            full = f"{prefix}*{pattern}"  # of the base model, whose place in this one differs
            matches = fnmatch.filter(names, full)
            if style in EXPERT_STYLES and matches and takes_routing(module.get_submodule(matches[0])):
                yield full, style


def resolve_plan(module: nn.Module, plan: Plan, parts: int) -> dict[str, ParallelStyle]:
    """Return the style of each submodule that the plan names; of several patterns the last one counts.

    A pattern that matches a layer that PEFT has wrapped stands for it, not for the parts that match as well.

    Args:
        parts: the number of processes among which layers are split.

    Raises:
        ConfigError: a pattern matches nothing, a style is unknown, or a layer cannot be split by `parts`.
    """
    names = dict(module.named_modules())
    inner = [*filter(None, names)]
    wrapped = wrapped_layers(names)
    problems = needs_newer_torch(plan.values(), torch.__version__)
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        matches = fnmatch.filter(inner, pattern)
        around = tuple(f"{name}." for name in wrapped if name in matches)
        matches = [name for name in matches if not name.startswith(around)]
        if not matches:
            problems.append(f"tensor_parallel_plan: nothing matches {pattern!r}.{did_you_mean(pattern, inner)}")
        if style in EXPERT_STYLES:
            continue
        if isinstance(style, str) and style not in STYLES:
            advice = did_you_mean(style, [*STYLES, "experts"])
            problems.append(
                f"tensor_parallel_plan: {style!r} for {pattern!r} is not a style.{advice} Styles: {', '.join(STYLES)}, "
                "experts, or one of torch.distributed.tensor.parallel."
            )
            continue
        for name in matches:
            found.pop(name, None)
            if style is not None:
                found[name] = STYLES[style](names[name]) if isinstance(style, str) else style
    raise_problems(problems, type(module).__name__)
    found = styles_within(names, found, wrapped)
    wrong = filter(None, (_problem(name, names[name], style, parts) for name, style in found.items()))
    raise_problems([*islice(wrong, 1), *_heads(module, parts)], type(module).__name__)
    return found


def needs_newer_torch(styles: Collection[Style], version: str) -> list[str]:
    """Return a problem if torch 2.9 would have to flatten sequences that are split, which later ones can."""
    heads = [style for style in styles if style in ("colwise_loss_parallel", "colwise_gather_output", "colwise_rep")]
    if not version.startswith("2.9.") or "sequence_parallel" not in styles or not heads:
        return []
    return [
        f"tensor_parallel_plan: {heads[0]!r} after 'sequence_parallel' needs a newer torch than {version}, which "
        "cannot compute a layer on parts of sequences: update it (2.13 is tested), or leave these styles out."
    ]


def _problem(name: str, layer: nn.Module, style: ParallelStyle, parts: int) -> str:
    """Return why a style of torch cannot split a layer; "" if it can."""
    layer = getattr(layer, "_orig_mod", layer)
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return ""
    if not isinstance(layer, (nn.Linear, nn.Embedding)) or "weight" not in layer._parameters:
        kind = type(layer)
        return (
            f"tensor_parallel_plan: {name} is of class {kind.__name__} from {kind.__module__}, and its style splits "
            "nn.Linear and nn.Embedding whose weight is a parameter (without weight_norm and other parametrizations), "
            "also with adapters of LoRA (without DoRA and other variants; of embeddings with 'rowwise' only). Leave it "
            "out with None, or use another option than tensor_parallel."
        )
    if isinstance(layer, nn.Embedding):  # a vocabulary may be split unevenly
        return ""
    size, what, gathered = layer.in_features, "inputs", False
    if isinstance(style, ColwiseParallel):
        size, what, gathered = layer.out_features, "outputs", style.output_layouts == (Replicate(),)
    if size % parts and not gathered:
        return (
            f"tensor_parallel={parts} does not divide the {size} {what} of {name}: choose a number that divides them, "
            "or leave the layer out of the plan."
        )
    return ""


def _heads(module: nn.Module, parts: int) -> list[str]:
    """Return a problem for each Hugging Face model whose heads cannot be split."""
    heads = {
        (name, getattr(model.config, name, None) or parts)
        for _, model in hugging_face_models(module)
        for name in ("num_attention_heads", "num_key_value_heads")
    }
    return [
        f"tensor_parallel={parts} does not divide the {number} {name} of the model."
        for name, number in sorted(heads)
        if number % parts
    ]


def apply_plan(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Split the layers; weights that are tied stay tied.

    Raises:
        ConfigError: tied weights would be split in different ways.
    """
    places: dict[int, list[ParameterSlot]] = {}
    for slot in slots_of(module, module):
        places.setdefault(id(slot.parameter), []).append(slot)
    here = {name: style for name, style in styles.items() if is_here(module.get_submodule(name))}
    shared = _SharedInput(mesh)
    for name, style in here.items():
        if isinstance(style, ColwiseParallel) and style.input_layouts == (Replicate(),):
            # Before the hook of the style, which leaves a distributed tensor unchanged.
            module.get_submodule(name).register_forward_pre_hook(shared.distribute)
        if isinstance(style, RowwiseParallel) and style.output_layouts == (Shard(1),):
            module.get_submodule(name).register_forward_pre_hook(partial(_refuse_uneven, mesh.size()))
    # Without sending anything: all processes have the values, or get them later.
    trains = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
    parallelize_module(module, mesh, here, src_data_rank=None)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trains[name])  # torch's styles for norms make new parameters, which train
    for name in here:
        module.get_submodule(name).register_forward_hook(_owned)
    for first, *others in places.values():
        kept = first.parameter
        for other in others:
            if getattr(other.parameter, "placements", None) != getattr(kept, "placements", None):
                raise ConfigError(
                    f"tensor_parallel_plan: {first.name} and {other.name} are one weight, and are split differently: "
                    "give both layers styles that split it alike (an embedding 'rowwise' and a head 'colwise'), or "
                    "none."
                )
            other.hold(kept)


def _refuse_uneven(parts: int, layer: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """Raise ConfigError for sequences whose parts would have different lengths, since collectives fail with these."""
    length = args[0].shape[1]
    if length % parts:
        raise ConfigError(
            f"tensor_parallel={parts} does not divide sequences of {length} tokens, which styles of "
            f"tensor_parallel_plan split: pad the batches to a multiple of {parts}, in the collate_fn."
        )


def _owned(layer: nn.Module, args: Any, output: Any) -> Any:
    """Return the output of a layer as no view, so that it can be changed in place, as by `nn.ReLU(inplace=True)`."""
    if torch.compiler.is_compiling() or not isinstance(output, torch.Tensor):
        return None
    return _Owned.apply(output) if torch.is_grad_enabled() and output._is_view() else None


class _Owned(torch.autograd.Function):
    """Return the same values as no view: torch refuses to change in place the views that DTensors return.

    The sum over processes is complete: of a tensor that waits for it in a compiled block, gradients would be wrong.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        complete: torch.Tensor = tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor
        return complete.detach()

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


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

    @without_graph
    def _forget(self, gradient: torch.Tensor) -> None:
        self._last = None


def is_here(layer: nn.Module) -> bool:
    """Whether this process has the weights of a layer, which may be on another stage of a pipeline."""
    parameters = list(layer.parameters())
    return not parameters or not all(isinstance(p, AbsentParameter) for p in parameters)


def describe_plan(module: nn.Module, styles: Mapping[str, ParallelStyle], experts: Collection[str]) -> str:
    """Return which layers are split, and which layers with weights are replicated."""
    replicated = [
        name or "parameters of the module itself"
        for name, child in module.named_modules()
        if name not in styles and name not in experts and next(child.parameters(recurse=False), None) is not None
    ]
    split = [f"{len(styles)} layers"] if styles else []
    split += [f"the experts of {first_of(list(experts))}"] if experts else []
    return f"split by the plan: {' and '.join(split)}; replicated: {first_of(replicated, 5) if replicated else 'none'}"


def needs_loss_parallel(styles: Mapping[str, ParallelStyle]) -> bool:
    """Whether a layer's outputs stay sharded, for a loss that torch's `loss_parallel` computes from them."""
    return any(isinstance(style, ColwiseParallel) and not style.use_local_output for style in styles.values())


@contextmanager
def split_losses() -> Iterator[None]:
    """Have `cross_entropy` take logits that are sharded over processes, and return a plain tensor."""
    with loss_parallel(), _PlainLosses():
        yield


class _PlainLosses(TorchFunctionMode):
    """Has `cross_entropy` return this process's copy of a loss, which can be logged, and added to others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not cross_entropy:
            return func(*args, **(kwargs or {}))
        return self._loss(*args, **(kwargs or {}))

    def _loss(self, input: torch.Tensor, target: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # Weights of classes and smoothed labels are not for split logits in torch: then they are gathered.
        simple = not args and options.get("weight") is None and not options.get("label_smoothing")
        if isinstance(input, DTensor) and not (simple and target.dim() < input.dim()):
            input = input.full_tensor()
        loss: torch.Tensor = local_part(cross_entropy(input, target, *args, **options))
        return loss
