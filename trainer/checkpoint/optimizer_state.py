"""Convert optimizer states between positions and parameter names, so that any strategy and order can read them.

    {"kind": "AdamW", "state": {"layer.weight": {"step": ..., "exp_avg": ...}},
     "param_groups": [{"params": ["layer.weight", ...], "lr": ...}]}

Keys and values are those of torch's optimizers, whichever implementation computes the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.quantized_state import in_full_precision, quantize_again
from trainer.checkpoint.schema import unlike
from trainer.checkpoint.shards import Loadable, StoredTensor, materialize
from trainer.errors import CheckpointError


def state_by_name(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with parameters identified by their names in the module, not by position.

    Raises:
        CheckpointError: the optimizer has a parameter that is not in the module.
    """
    names = names_by_group(module, optimizer)
    position_to_name = dict(enumerate(name for group in names for name in group))
    groups = [{**group, "params": group_names} for group, group_names in zip(state["param_groups"], names, strict=True)]
    return {
        "kind": type(optimizer).__name__,
        "state": {position_to_name[position]: in_full_precision(own) for position, own in state["state"].items()},
        "param_groups": groups,
    }


def add_saved_groups(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Add the groups that an optimizer got while it trained, so that the state of `state_by_name` can be loaded."""
    parameters, groups = dict(module.named_parameters()), state["param_groups"]
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for group in groups[len(optimizer.param_groups) :]:
        if all(name in parameters and id(parameters[name]) not in known for name in group["params"]):
            optimizer.add_param_group({**group, "params": [parameters[name] for name in group["params"]]})


def state_by_position(
    module: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    take: Callable[[str, Loadable], torch.Tensor] = lambda name, value: materialize(value),
) -> dict[str, Any]:
    """Invert `state_by_name`, for this optimizer's own parameters.

    Args:
        take: converts a tensor of the saved state of a parameter, given by name, to the one to load.

    Raises:
        CheckpointError: the optimizer is of another kind, or has other parameters.
    """
    groups = matching_groups(module, optimizer, state)
    parameters = dict(module.named_parameters())

    def fitted(name: str, value: Loadable) -> torch.Tensor:
        return with_strides_of(parameters[name], take(name, value))

    order = [name for group in groups for name in group["params"]]
    position = {name: i for i, name in enumerate(order)}
    for name in state["state"]:
        if name not in position:
            raise CheckpointError(
                f"the checkpoint has a state of the parameter {name!r}, which {state['kind']} has not"
            )
    values = {position[name]: _take_tensors(values, name, fitted) for name, values in state["state"].items()}
    return {
        "state": values,
        "param_groups": [{**group, "params": [position[name] for name in group["params"]]} for group in groups],
        "dtypes": {position[name]: dtype for name, dtype in state.get("dtypes", {}).items() if name in position},
    }


def with_dtypes_of(state: dict[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `state_by_name` returned with the dtypes that the parameters had then, under "dtypes".

    `weights`: of the same checkpoint.
    """
    tensors = {name: value for name, value in weights.items() if isinstance(value, (torch.Tensor, StoredTensor))}
    return {**state, "dtypes": {name: tensors[name].dtype for name in state["state"] if name in tensors}}


def has_own_dtype(value: Loadable, parameter: torch.dtype | None) -> bool:
    """Whether an optimizer chose the dtype of a saved tensor, as for float32 moments of bfloat16 parameters.

    A tensor without dimensions, such as a step, always has a dtype of its own.

    Args:
        parameter: dtype of the tensor's parameter when it was saved; None: unknown.
    """
    return not value.shape or (parameter is not None and value.dtype != parameter)


def load_by_position(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `state_by_position` returned.

    Tensors with a dtype of their own keep it: torch rounds all of them to the dtypes of their parameters.
    """
    dtypes = state["dtypes"]
    optimizer.load_state_dict({key: value for key, value in state.items() if key != "dtypes"})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for position, values in state["state"].items():
        parameter = parameters[position]
        loaded = optimizer.state[parameter]
        optimizer.state[parameter] = _unrounded(loaded, values, parameter.dtype, dtypes.get(position))
    quantize_again(optimizer)


def _unrounded(loaded: Any, saved: Any, rounded: torch.dtype, parameter: torch.dtype | None) -> Any:
    """Return a loaded state, at any depth, with the saved tensors in place of those that torch has rounded.

    Args:
        rounded: the dtype to which torch rounds.
        parameter: the dtype of the parameter when the state was saved.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        again = loaded.dtype == rounded != saved.dtype and has_own_dtype(saved, parameter)
        return saved.to(loaded.device, copy=True) if again else loaded
    if isinstance(loaded, dict) and isinstance(saved, dict):
        for key in loaded.keys() & saved.keys():
            loaded[key] = _unrounded(loaded[key], saved[key], rounded, parameter)
    elif type(loaded) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        pairs = zip(loaded, saved, strict=True)
        return type(loaded)(_unrounded(one, its_saved, rounded, parameter) for one, its_saved in pairs)
    return loaded


def with_strides_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the state of a parameter with the parameter's strides, such as channels_last, if it has its shape.

    Checkpoints hold contiguous tensors, and fused optimizers go by the order in memory.
    """
    if type(value) is not torch.Tensor or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
"""Tensors of torch's fused optimizers, which read as many elements of each as the parameter has."""


def check_shapes(module: nn.Module, state: dict[str, Any]) -> None:
    """Check the shapes in a saved state that torch's fused optimizers rely on.

    Raises:
        CheckpointError: a tensor has not the shape of its parameter, or a step is not one number.
    """
    # A parameter that DeepSpeed has partitioned is empty, and keeps its full shape here.
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
    for name, values in state["state"].items():
        for key, value in values.items() if name in shapes else ():
            shape = tuple(value.shape) if isinstance(value, (torch.Tensor, StoredTensor)) else None
            if shape is None or key not in ("step", *_LIKE_PARAMETERS):
                continue
            if (math.prod(shape) != 1) if key == "step" else (shape != shapes[name]):
                raise CheckpointError(
                    f"the checkpoint's {key!r} of {name} has the shape {list(shape)}, and the parameter has "
                    f"{list(shapes[name])}: the checkpoint is damaged, or belongs to another model."
                )


def matching_groups(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any], names: list[list[str]] | None = None
) -> list[dict[str, Any]]:
    """Return the saved groups in the optimizer's order, each with its parameters' names in the optimizer's order.

    Args:
        names: the parameter names of each group, if the optimizer holds other parameters in their place.

    Raises:
        CheckpointError: the optimizer is of another kind, or has other parameters.
    """
    kind = type(optimizer).__name__
    if state["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {state['kind']}, but configure_optimizers gave {kind}. Use the same "
            "optimizer; to start a new training from these weights, use load_from_checkpoint and fit without ckpt_path."
        )
    names = names_by_group(module, optimizer) if names is None else names
    saved = [group["params"] for group in state["param_groups"]]
    if sorted(map(sorted, names)) != sorted(map(sorted, saved)):
        ours, theirs = {n for group in names for n in group}, {n for group in saved for n in group}
        difference = sorted(ours ^ theirs)[:3] or "the grouping"
        raise CheckpointError(
            f"the parameters of {kind} differ from the checkpoint's: {difference}. A resumed run trains the same ones, "
            "with strict_loading = False, too; to train others from these weights, use load_from_checkpoint, which "
            "strict=False lets load what fits, and fit without ckpt_path."
        )
    groups = []
    for number, (group_names, now) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        group = next(g for g in state["param_groups"] if sorted(g["params"]) == sorted(group_names))
        group = {key: value.read() if isinstance(value, StoredTensor) else value for key, value in group.items()}
        options = {name: value for name, value in now.items() if name != "params"}
        if found := unlike(group, options, f"the options of group {number} of {kind}"):
            raise CheckpointError(f"{found}: the checkpoint is damaged, or was written with another optimizer")
        # An option that is not there is that of another version of torch.
        groups.append({**options, **group, "params": group_names})
    return groups


def names_by_group(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of each group's parameters, in the optimizer's order.

    Raises:
        CheckpointError: the optimizer has a parameter that is not in the module.
    """
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in name_of:
                raise CheckpointError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not in "
                    f"{type(module).__name__}, so it would not be saved. Make it an attribute of the module."
                )
    return [[name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _take_tensors(values: Any, name: str, take: Callable[[str, Loadable], torch.Tensor]) -> Any:
    """Apply `take` to all tensors in a parameter's state, at any depth."""
    if isinstance(values, (torch.Tensor, StoredTensor)):
        return take(name, values)
    if isinstance(values, dict):
        return {key: _take_tensors(value, name, take) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_take_tensors(value, name, take) for value in values)
    return values
