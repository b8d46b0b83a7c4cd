"""Build layers that will be sharded on the device of `init_device`, and broadcast rank 0's initial values."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from trainer.distributed.process_group import TorchProcessGroup, broadcast_into
from trainer.errors import ConfigError, first_of
from trainer.model.gradients import takes_gradient

log = logging.getLogger("trainer")

InitDevice = Literal["cpu", "mixed", "meta"]
INITIALIZERS = ("init_weights", "reset_parameters", "_reset_parameters")
"""Methods without arguments that initialize a module's parameters; the last one belongs to torch's attention."""

Tensors = dict[str, torch.Tensor]


def build_context(init_device: InitDevice) -> AbstractContextManager[Any]:
    """Return the context of `configure_model`: the meta device, if this process builds no values."""
    builds = init_device == "cpu" or (init_device == "mixed" and dist.get_rank() == 0)
    return nullcontext() if builds else torch.device("meta")


def named_tensors(module: nn.Module) -> Tensors:
    """Return parameters and buffers by name; a shared tensor has its first name only."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def refuse_meta_tensors(module: nn.Module) -> None:
    """Raise ConfigError if a parameter or buffer is on the meta device, and so has no values to train."""
    names = sorted(name for name, tensor in named_tensors(module).items() if tensor.is_meta)
    if names:
        raise ConfigError(_without_values(module, names))


def _without_values(module: nn.Module, names: list[str]) -> str:
    return (
        f"{type(module).__name__}: {first_of(names)}: on the meta device, without values. Build the layers in "
        "configure_model, without init_empty_weights() or torch.device('meta'); a large model under strategy 'fsdp' or "
        "'deepspeed_stage_3' with init_device='mixed' (pretrained weights) or 'meta' (new ones)."
    )


def initial_values(
    module: nn.Module, init_device: InitDevice, loaded: Collection[str] = (), device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Broadcast rank 0's initial values of the tensors that `configure_model` has built. Collective.

    With "cpu" the module is changed in place; the values travel through `device`, one tensor at a time. Otherwise the
    full values on `device` are yielded on every process, one tensor at a time, so that a process that keeps only shards
    never holds more than one full tensor. The module may be sharded before the first value is taken.

    Args:
        loaded: names whose values come from a checkpoint; these are left out.

    Raises:
        ConfigError: a tensor would have no values.
    """
    wanted = {name: tensor for name, tensor in named_tensors(module).items() if name not in loaded}
    # With "mixed" rank 0 has built what the others lack.
    elsewhere = init_device == "mixed" and dist.get_rank() > 0
    absent = {name for name, tensor in wanted.items() if tensor.is_meta and not elsewhere}
    needed = {id(wanted[name]) for name in absent}
    units = units_of(module) if init_device == "meta" else {}
    # A second module with a shared weight draws random numbers as well, as in its construction.
    units = {key: unit for key, unit in units.items() if needed & set(map(id, named_tensors(unit).values()))}
    given = {prefix + name for prefix, unit in units.items() for name in named_tensors(unit)}
    _check_built(module, init_device, absent - given)
    if init_device == "cpu":
        for tensor in wanted.values():
            _overwrite(tensor.detach(), torch.device(device))
        return iter(())
    built = {name: tensor.detach() for name, tensor in wanted.items() if name not in absent}
    shapes = {prefix: {n: t.to("meta") for n, t in named_tensors(unit).items()} for prefix, unit in units.items()}

    return _values(built, units, shapes, absent, loaded, device)


def _values(
    built: Tensors,
    units: dict[str, nn.Module],
    shapes: dict[str, Tensors],
    absent: set[str],
    loaded: Collection[str],
    device: torch.device | str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield rank 0's values of what was built, and of the `absent` tensors, which units initialize there."""
    for name in list(built):
        yield name, _from_rank_0(built.pop(name), device)
    for prefix, unit in units.items():
        later = {name for name in shapes[prefix] if prefix + name in loaded}
        made = initialize(unit, shapes[prefix], later) if dist.get_rank() == 0 else shapes[prefix]
        for name in list(made):
            value = made.pop(name)
            if prefix + name in absent:
                absent.remove(prefix + name)
                yield prefix + name, _from_rank_0(value, device)


def _check_built(module: nn.Module, init_device: InitDevice, without: set[str]) -> None:
    """Raise ConfigError, on all processes, if a tensor would have no values. Collective."""
    everyone = TorchProcessGroup(rank=dist.get_rank(), world_size=dist.get_world_size())
    names = sorted(set().union(*everyone.all_gather_object(sorted(without))))
    if names and init_device == "meta":
        raise ConfigError(
            f"{type(module).__name__}: {', '.join(names)}: no init_weights or reset_parameters gives them values. "
            "Define one in the module that has them, or give init_device='mixed' or 'cpu'."
        )
    if names:
        raise ConfigError(_without_values(module, names))


def _from_rank_0(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    value = tensor.to(device) if dist.get_rank() == 0 else torch.empty_like(tensor, device=device)
    broadcast_into(value)
    return value


def _overwrite(tensor: torch.Tensor, device: torch.device) -> None:
    """Overwrite a tensor with rank 0's values, sent between devices, which is faster than between hosts. Collective."""
    if tensor.device.type == device.type or dist.get_world_size() == 1:
        broadcast_into(tensor)
        return
    value = _from_rank_0(tensor, device)
    if dist.get_rank() > 0:
        tensor.copy_(value)


# -- modules that initialize themselves --------------------------------------------------------------------------------


def _initializer(module: nn.Module) -> str | None:
    return next((name for name in INITIALIZERS if callable(getattr(module, name, None))), None)


def units_of(module: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the outermost submodules with an initializer, by the prefix of their tensors' names."""
    if _initializer(module) is not None:
        return {prefix: module}
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        found |= units_of(child, f"{prefix}{name}.")
    return found


class _Initialize(nn.Module):
    """Calls the initializers of a module in the order of its construction, children first."""

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self) -> None:
        self.call(self.unit)

    def call(self, module: nn.Module) -> None:
        for child in module.children():
            self.call(child)
        initializer = _initializer(module)
        if initializer is not None:
            getattr(module, initializer)()


def initialize(unit: nn.Module, shapes: Tensors, loaded: Collection[str] = ()) -> Tensors:
    """Return, on the CPU, the initial values of a module's parameters and buffers, without changing the module.

    Args:
        shapes: the module's tensors on the meta device, by name.
        loaded: names of those whose values come from a checkpoint. They stay on the meta device if the initializers can
            do without them, so that rank 0 does not need memory for the full module.

    Raises:
        ConfigError: the initializers leave a tensor without values.
    """
    if loaded:
        try:
            return _initialize(unit, {name: t if name in loaded else _unset(t) for name, t in shapes.items()})
        except (RuntimeError, NotImplementedError) as error:
            log.info("init_device='meta': all of %s is initialized on rank 0: %s", type(unit).__name__, error)
    return _initialize(unit, {name: _unset(shape) for name, shape in shapes.items()})


def _initialize(unit: nn.Module, tensors: Tensors) -> Tensors:
    # As parameters, for which initializers of ties ask by name.
    parameters = dict(unit.named_parameters(remove_duplicate=False))
    values = {
        f"unit.{name}": nn.Parameter(tensor.detach(), requires_grad=False) if name in parameters else tensor
        for name, tensor in tensors.items()
    }
    before = {name: (value, value._version) for name, value in values.items() if not value.is_meta}
    with torch.no_grad():
        functional_call(_Initialize(unit), values, ())
    left = [name.removeprefix("unit.") for name in before if _is_unset(values[name], *before[name])]
    if left:
        raise ConfigError(
            f"init_device='meta': {_initializer(unit)} of {type(unit).__name__} leaves {', '.join(left)} without "
            "values. Set them there, or give init_device='mixed' or 'cpu'."
        )
    return {name.removeprefix("unit."): value.detach() for name, value in values.items()}


def _unset(shape: torch.Tensor) -> torch.Tensor:
    mark = math.nan if takes_gradient(shape) else 0
    return torch.full(shape.shape, mark, dtype=shape.dtype, device="cpu")


def _is_unset(value: torch.Tensor, before: torch.Tensor, version: int) -> bool:
    if takes_gradient(value):
        return bool(value.isnan().any())
    return value is before and value._version == version and not value.any()
