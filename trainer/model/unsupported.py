"""Describe layers and parameters that some strategies cannot train, and convert memory that no strategy can use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.errors import ConfigError, first_of
from trainer.model.gradients import is_sparse
from trainer.precision import is_quantized

Found = Iterator[str]
"""The names of layers or parameters."""
CHANGE_GRADIENTS = (
    "Change the gradients in on_before_optimizer_step, where p.grad is a shard; shard a mask by "
    "distribute_tensor(mask, p.device_mesh, p.placements) of torch.distributed.tensor. Or use strategy 'ddp'."
)


def unsupported(module: nn.Module, strategy: str, *kinds: str) -> list[str]:
    """Return a problem for each of these kinds, the keys of `KINDS`, if the module has such layers or parameters."""
    problems = []
    for kind in kinds:
        find, cannot, advice = KINDS[kind]
        if names := list(find(module)):
            problems.append(f"strategy {strategy!r} cannot {cannot}: {first_of(names)}. {advice}")
    return problems


def refuse_lazy(module: nn.Module) -> None:
    """Raise ConfigError for parameters without a shape, as `nn.LazyLinear` has before its first forward."""
    if names := [name for name, value in module.named_parameters() if is_lazy(value)]:
        raise ConfigError(
            f"{type(module).__name__} has parameters without a shape: {first_of(names)}. Give the layer its input "
            "size, or run an example through it in configure_model."
        )


def _layers(is_one: Callable[[nn.Module], bool]) -> Callable[[nn.Module], Found]:
    return lambda module: (name for name, layer in module.named_modules() if is_one(layer))


def _parameters(has: Callable[[nn.Parameter], bool]) -> Callable[[nn.Module], Found]:
    return lambda module: (name for name, value in module.named_parameters() if not is_lazy(value) and has(value))


def _shape(value: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the full parameter, which ZeRO-3 keeps where it has partitioned it."""
    return tuple(getattr(value, "ds_shape", value.shape))


KINDS: dict[str, tuple[Callable[[nn.Module], Found], str, str]] = {
    "scalar": (
        _parameters(lambda value: _shape(value) == ()),
        "shard parameters without a dimension",
        "Give them the shape [1]: nn.Parameter(torch.ones(1)).",
    ),
    "empty": (
        _parameters(lambda value: 0 in _shape(value)),
        "shard parameters without elements",
        "Leave them out, or make them buffers.",
    ),
    "complex": (
        _parameters(torch.is_complex),
        "train complex parameters",
        "Keep real and imaginary part as real parameters (torch.view_as_complex), or use strategy 'ddp' or 'fsdp'.",
    ),
    "quantized": (
        _parameters(is_quantized),
        "shard quantized parameters, for which torchao 0.18 lacks aten.split, aten.slice, aten.new_zeros or aten.view",
        "Use strategy 'ddp', or load the frozen weights in bfloat16.",
    ),
    "sparse": (
        _layers(lambda layer: is_sparse(layer) and bool(layer.weight.requires_grad)),
        "take the sparse gradients of layers",
        "Leave out sparse=True, or use strategy 'ddp' or 'single_device'.",
    ),
    "hooked": (
        _parameters(lambda value: bool(value._backward_hooks or value._post_accumulate_grad_hooks)),
        "call hooks on parameters (register_hook), which are replaced by shards",
        CHANGE_GRADIENTS,
    ),
    "script": (
        _layers(lambda layer: isinstance(layer, torch.jit.ScriptModule)),
        "add hooks to scripted layers",
        "Give the layers from which torch.jit made them, or use strategy 'ddp'.",
    ),
    "compiled": (
        _layers(lambda layer: type(layer).__name__ == "OptimizedModule"),
        "add hooks to compiled layers",
        "Give them uncompiled, with Trainer(compile=...) if need be.",
    ),
}
"""Kinds that a strategy may be unable to train -> a function that finds them, and the words around the names."""


def use_contiguous_parameters(module: nn.Module) -> None:
    """Give parameters of another memory format, such as channels_last, contiguous memory, which sharding needs."""
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def use_separate_elements(module: nn.Module) -> None:
    """Give each element of a persistent buffer separate memory; elements shared by `expand` cannot be loaded."""
    for layer in module.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            persistent = name not in layer._non_persistent_buffers_set
            if persistent and buffer.layout == torch.strided and shares_elements(buffer):
                setattr(layer, name, buffer.clone(memory_format=torch.contiguous_format))


def shares_elements(buffer: torch.Tensor) -> bool:
    """Whether elements of a tensor are one in memory, as `expand` makes them."""
    return any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
