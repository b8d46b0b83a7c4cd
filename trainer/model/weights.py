"""Load weights by name, also into a module that is distributed over processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainer.errors import CheckpointError, ConfigError, first_of
from trainer.precision import is_quantized, parts_of

log = logging.getLogger("trainer")

Location = str | torch.device
MapLocation = (
    Location | Mapping[Any, Location] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None] | None
)
"""The forms of `map_location` of `torch.load`."""


_GET_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


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
        return None if location is None else torch.empty(0, device=location).device
    except Exception as error:
        raise ConfigError(
            f"map_location={map_location!r} gives no device of this machine ({type(error).__name__}: {error}). Give a "
            "device such as 'cpu' or 'cuda:0', a dict such as {'cpu': 'cuda:0'}, or a function (storage, location) -> "
            "storage, as for torch.load."
        ) from error


_MADE_LATER: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The names of the buffers that were None when a module was made; a step or a hook makes them."""


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the names of the buffers that belong to checkpoints, also those that are None, with their places."""
    for path, part in module.named_modules():
        for name in part._buffers.keys():  # noqa: SIM118  (a scripted module's is not a dict)
            if name not in part._non_persistent_buffers_set:
                yield f"{path}.{name}".removeprefix("."), part, name


def note_later_buffers(module: nn.Module) -> None:
    """Note which buffers are None, for `match_buffers`."""
    for _, part, name in saved_buffers(module):
        if part._buffers[name] is None:
            _MADE_LATER.setdefault(part, set()).add(name)


def drop_later_buffers(module: nn.Module) -> None:
    """Set the buffers to None that were None when the module was made."""
    for _, part, name in saved_buffers(module):
        if name in _MADE_LATER.get(part, ()):
            part._buffers[name] = None


def match_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Make buffers that a step or a hook creates match a checkpoint: tensors where it has them, else None."""
    note_later_buffers(module)
    tensors = chain(module.buffers(), module.parameters())
    device = next((tensor.device for tensor in tensors), None)
    for key, part, name in saved_buffers(module):
        if key in state:
            if part._buffers[name] is None:
                part._buffers[name] = torch.empty(state[key].shape, dtype=state[key].dtype, device=device)
        elif name in _MADE_LATER.get(part, ()):
            part._buffers[name] = None


def load_weights(module: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """Load weights and buffers by name; a buffer that is None on one side becomes what the state has.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    match_buffers(module, state)
    kept = _load_parts(module, state)
    present = {name: value for name, value in state.items() if name not in kept}
    quantized = {name.rpartition(".")[0] for name in kept}

    def complete(_: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in quantized]

    hook = module.register_load_state_dict_post_hook(complete)
    try:
        unexpected = module.load_state_dict(present, strict=strict).unexpected_keys
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}: {str(error).expandtabs(4):.4000}\n"
            "It was written for another model, or with other hyperparameters; or a hook has added layers, parameters "
            "or buffers in the training, which __init__ or configure_model has to make. To take the weights whose "
            "names are there: strict_loading = False in the module, or load_from_checkpoint(path, strict=False)."
        ) from None
    finally:
        hook.remove()
    if unexpected:
        log.warning("weights of the checkpoint that are not in the module are left out: %s", first_of(unexpected, 5))


def with_parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights by name; in place of a quantized weight, which no file format knows, the tensors in it.

    Their names follow torchao's attributes: `layer.weight.qdata`, `layer.weight.scale`.
    """
    return dict(chain.from_iterable(parts_of(name, value) for name, value in state.items()))


@torch.no_grad()
def _load_parts(module: nn.Module, state: Mapping[str, torch.Tensor]) -> set[str]:
    """Set the parts of the quantized parameters that a state has; return their names in it."""
    found: set[str] = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if not is_quantized(parameter):
            continue
        parts = dict(parts_of(name, parameter))
        if all(key in state and state[key].shape == part.shape for key, part in parts.items()):
            for key, part in parts.items():
                part.copy_(state[key])
            found |= parts.keys()
    return found


class SettingParts(TorchFunctionMode):
    """Has `load_state_dict` in the block set distributed tensors as if they were full.

    So all that torch calls is called as on one process: hooks of `load_state_dict`, and overrides of
    `_load_from_state_dict`, which see full values.

    Args:
        shape_of: returns the full shape of a tensor that `set_value` sets; None for any other.
        set_value: sets such a tensor from a full one.
    """

    def __init__(
        self,
        shape_of: Callable[[torch.Tensor], tuple[int, ...] | None],
        set_value: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._shape_of, self._set_value = shape_of, set_value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shape = self._shape_of(args[0]) if func in (torch.Tensor.copy_, _GET_SHAPE) else None
        if shape is None:
            return func(*args, **(kwargs or {}))
        if func == _GET_SHAPE:
            return torch.Size(shape)
        self._set_value(*args[:2])
        return args[0]


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
