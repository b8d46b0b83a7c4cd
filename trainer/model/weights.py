"""Load weights by name, and check that names and shapes fit the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainer.errors import CheckpointError, ConfigError

Location = str | torch.device
MapLocation = (
    Location | Mapping[Any, Location] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)
"""The forms of `map_location` of `torch.load`."""


class AbsentParameter(nn.Parameter):
    """A parameter that another process holds: one value, expanded to the parameter's shape, which nothing may read."""


def read_map_location(map_location: MapLocation) -> torch.device | None:
    """Return the device for weights read from a checkpoint, which are on the CPU; None for no map_location.

    Raises:
        ConfigError: `map_location` has another form, or the device is not on this machine.
    """
    location: Any = map_location
    try:
        if isinstance(map_location, Mapping):
            devices = {str(torch.device(key)): torch.device(value) for key, value in map_location.items()}
            location = devices.get("cpu", "cpu")
        elif callable(map_location):
            storage = torch.UntypedStorage(0)
            moved = map_location(storage, "cpu")
            location = (storage if moved is None else moved).device
        if location is None:
            return None
        if not isinstance(location, (str, torch.device)):
            raise TypeError(f"it is a {type(location).__name__}")
        return torch.empty(0, device=location).device
    except Exception as error:
        raise ConfigError(
            f"map_location={map_location!r} gives no device of this machine ({type(error).__name__}: {error}). Give a "
            "device such as 'cpu' or 'cuda:0', a dict such as {'cpu': 'cuda:0'}, or a function (storage, location) -> "
            "storage, as for torch.load."
        ) from error


def is_extra_state(name: str) -> bool:
    """Whether an entry of a module's `state_dict` is what its `get_extra_state` returned: data of any kind."""
    return name.rpartition(".")[2] == "_extra_state"


def load_weights(module: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """Load weights and buffers by name.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}: {str(error).expandtabs(4):.4000}\n"
            "It was written for another model, or with other hyperparameters."
        ) from None


def check_fit(module: nn.Module, shapes: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    """Compare the names and shapes of weights with those of the module.

    Args:
        shapes: full shapes by the names of the module's `state_dict`; None for a module's extra state.

    Raises:
        CheckpointError: shapes differ, or, with `strict`, names.
    """
    problems = [
        f"size mismatch for {name}: the checkpoint has {list(state[name].shape)}, the module {list(shape)}"
        for name, shape in shapes.items()
        if name in state and shape is not None and tuple(shape) != tuple(getattr(state[name], "shape", shape))
    ]
    missing, unexpected = shapes.keys() - state.keys(), state.keys() - shapes.keys()
    if strict and missing:
        problems.append(f"the checkpoint lacks {', '.join(sorted(missing))}")
    if strict and unexpected:
        problems.append(f"the module lacks {', '.join(sorted(unexpected))}")
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}: {'; '.join(problems)}\n"
            "It was written for another model, or with other hyperparameters."
        )


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module; its parameters stay the same objects, so that shared weights stay shared."""
    misplaced = next((p for p in module.parameters() if p.device.type != device.type), None)
    swap = torch.__future__.get_swap_module_params_on_conversion()
    if misplaced is not None and not torch._has_compatible_shallow_copy_type(misplaced, torch.empty(0, device=device)):
        # A device that torch knows from an extension: `Module.to` would make new parameters.
        torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
