"""The state of an optimizer by the names of its parameters, so that another strategy, or another order, can read it.

    {"kind": "AdamW", "state": {"layer.weight": {"step": ..., "exp_avg": ...}},
     "param_groups": [{"params": ["layer.weight", ...], "lr": ...}]}

Keys and values are those of torch's optimizers, whoever computes the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.shards import Loadable, StoredTensor, whole
from trainer.errors import CheckpointError


def state_by_name(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's `state_dict` with parameters called by their names in the module, instead of by position.

    Raises:
        CheckpointError: the optimizer has a parameter that is not in the module.
    """
    names = names_by_group(module, optimizer)
    position_to_name = dict(enumerate(name for group in names for name in group))
    groups = [{**group, "params": group_names} for group, group_names in zip(state["param_groups"], names, strict=True)]
    return {
        "kind": type(optimizer).__name__,
        "state": {position_to_name[position]: values for position, values in state["state"].items()},
        "param_groups": groups,
    }


def state_by_position(
    module: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    take: Callable[[str, Loadable], torch.Tensor] = lambda name, value: whole(value),
) -> dict[str, Any]:
    """The inverse of `state_by_name`, for this optimizer's own parameters.

    Args:
        take: from the name of a parameter and a tensor of its saved state, the one to load.

    Raises:
        CheckpointError: the optimizer is of another kind, or has other parameters.
    """
    groups = matching_groups(module, optimizer, state)
    order = [name for group in groups for name in group["params"]]
    position = {name: i for i, name in enumerate(order)}
    values = {position[name]: _taken(values, name, take) for name, values in state["state"].items()}
    return {
        "state": values,
        "param_groups": [{**group, "params": [position[name] for name in group["params"]]} for group in groups],
    }


def matching_groups(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any], names: list[list[str]] | None = None
) -> list[dict[str, Any]]:
    """The saved groups in the order of the optimizer's own, each with its parameters' names in the optimizer's order.

    Args:
        names: of the parameters of each group, where the optimizer has others in their place.

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
        raise CheckpointError(f"the parameters of {kind} differ from the checkpoint's: {difference}.")
    return [
        {**next(g for g in state["param_groups"] if sorted(g["params"]) == sorted(group_names)), "params": group_names}
        for group_names in names
    ]


def names_by_group(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of each group's parameters, in the optimizer's order.

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


def _taken(values: Any, name: str, take: Callable[[str, Loadable], torch.Tensor]) -> Any:
    """A parameter's state with its tensors taken, at any depth."""
    if isinstance(values, (torch.Tensor, StoredTensor)):
        return take(name, values)
    if isinstance(values, dict):
        return {key: _taken(value, name, take) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(_taken(value, name, take) for value in values)
    return values
