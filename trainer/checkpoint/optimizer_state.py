"""Convert optimizer states between positions and parameter names, so that any strategy and order can read them.

    {"kind": "AdamW", "state": {"layer.weight": {"step": ..., "exp_avg": ...}},
     "param_groups": [{"params": ["layer.weight", ...], "lr": ...}]}

Keys and values are torch's, whichever implementation computes the step. Optimizers of other authors may keep more:

    "common": {"k": ...}                        entries of `optimizer.state` that belong to no parameter
    "extra": {"slow": ...}                      entries of `state_dict` beside state and param_groups
    "parts": {"base_optimizer": {"state": ...,  what an optimizer inside this one has and `state_dict` lacks; "" is
              "common": ..., "param_groups": ...}}  the optimizer itself
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map_only, tree_map_with_path

from trainer.checkpoint.quantized_state import in_full_precision, quantize_again
from trainer.checkpoint.schema import unlike
from trainer.checkpoint.shards import Loadable, StoredTensor, in_memory, materialize
from trainer.errors import CheckpointError, first_of
from trainer.model.reachable import is_generator
from trainer.optimizers import optimizers_inside, parameters_of

Take = Callable[[torch.Tensor, Loadable], torch.Tensor]
"""Converts a tensor of a saved state to the one to load, which belongs to a tensor of this process."""


OPTIMIZER: dict[str, Any] = {
    "kind": str,
    "state": {str: object},
    "param_groups": [{"params": [str]}],
    "common?": dict,
    "extra?": dict,
    "parts?": {str: {"state?": {str: object}, "common?": dict, "param_groups?": [dict]}},
    "by_position?": bool,
}
"""The kinds of the entries (see `schema.Kind`)."""


def state_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with parameters identified by their names in the module, not by position.

    Raises:
        CheckpointError: the optimizer has a parameter that is not in the module.
    """
    names = names_by_group(module, optimizer)
    state = optimizer.state_dict()
    name_at = dict(enumerate(chain.from_iterable(names)))
    packed = state.get("state", {})
    taken = getattr(optimizer, "state", {}).keys() & name_at.keys()
    if taken:
        position = min(taken)
        raise CheckpointError(
            f"{type(optimizer).__name__} has the key {position} in its state, and state_dict() uses this number for "
            f"{name_at[position]}, whose state would be lost. Use a text as key."
        )
    groups = zip(state.get("param_groups", optimizer.param_groups), names, strict=True)
    states: dict[str, Any] = {}
    common: dict[Any, Any] = {}
    for key, value in packed.items():
        if key in name_at:
            states[name_at[key]] = in_full_precision(value)
        else:
            common[key] = value
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}

    def by_name(key: Any) -> Any:
        """Return the key to store in place of a parameter or its id."""
        kind, number = ("id", key) if type(key) is int else ("parameter", id(key))
        return (kind, name_of[number]) if number in name_of else key

    saved = {
        "kind": type(optimizer).__name__,
        "state": states,
        "param_groups": [{**options_of(group), "params": group_names} for group, group_names in groups],
    }
    more = {
        "common": common,
        "extra": _with_keys(extra_of(state), by_name),
        "parts": _parts(optimizer, packed, {name: position for position, name in name_at.items()}, name_of),
    }
    return {**saved, **{key: value for key, value in more.items() if value}}


def extra_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that an optimizer of another author has added to its `state_dict`."""
    return {key: value for key, value in state.items() if key not in ("state", "param_groups")}


def refuse_own_tensors(optimizer: Optimizer, state: Mapping[str, Any], where: str) -> None:
    """Check that an optimizer keeps no tensors but its parameters' states and single numbers.

    Args:
        state: what `state_by_name` returned, or its optional entries.
        where: where they cannot be saved.

    Raises:
        CheckpointError: it does.
    """
    for key in ("common", "extra", "parts"):
        if any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in tree_leaves(state.get(key))):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps tensors outside of the states of its parameters, which cannot be "
                f"saved under {where} but under 'ddp' and 'fsdp'."
            )


def _parts(
    optimizer: Optimizer, packed: Mapping[Any, Any], position_of: Mapping[str, int], name_of: Mapping[int, str]
) -> dict[str, Any]:
    """Return what the optimizers inside this one, and it itself, have and the states of its `state_dict` lack."""
    parts: dict[str, Any] = {}
    own_groups = {*map(id, optimizer.param_groups)}
    for path, part in optimizers_inside(optimizer).items():
        found: dict[str, Any] = {"state": {}, "common": {}, "param_groups": []}
        for key, value in getattr(part, "state", {}).items():
            if not isinstance(key, torch.Tensor):
                if packed.get(key) is not value:
                    found["common"][key] = value
                continue
            name = name_of.get(id(key), "")
            if value == {} or _is_within(value, packed.get(position_of.get(name))):
                continue
            if not name:
                raise CheckpointError(_not_in(part, key, "the module"))
            found["state"][name] = in_full_precision(value)
        if not own_groups.issuperset(map(id, part.param_groups)):
            found["param_groups"] = [options_of(group) for group in part.param_groups]
        if any(found.values()):
            parts[path] = {key: value for key, value in found.items() if value}
    return parts


def _is_within(value: Any, other: Any) -> bool:
    """Whether another state has all tensors of a state."""
    if value is other:
        return True
    tensors = {id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    return bool(tensors) and tensors <= {id(leaf) for leaf in tree_leaves(other)}


def _with_keys(value: Any, rename: Callable[[Any], Any]) -> Any:
    """Return nested data with other keys of dicts."""
    if isinstance(value, dict):
        return _with_items(value, {rename(key): _with_keys(one, rename) for key, one in value.items()})
    return type(value)(_with_keys(one, rename) for one in value) if type(value) in (list, tuple) else value


def _with_items(like: dict[Any, Any], items: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the same class, and with the same default, that has other items."""
    made = copy(like)
    made.clear()
    dict.update(made, items)
    return made


def renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return what `state_by_name` returned with other names of the parameters."""
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]]

    def by_name(values: Mapping[str, Any]) -> dict[str, Any]:
        return {rename(name): value for name, value in values.items()}

    changed = {**state, "state": by_name(state["state"]), "param_groups": groups}
    if "extra" in state:
        changed["extra"] = _with_keys(state["extra"], lambda key: (key[0], rename(key[1])) if _is_name(key) else key)
    if "parts" in state:
        parts = state["parts"].items()
        changed["parts"] = {path: {**part, "state": by_name(part.get("state", {}))} for path, part in parts}
    return changed


def _is_name(key: Any) -> bool:
    """Whether a key stands for a parameter, or for its `id`, which is another one in each process."""
    return isinstance(key, tuple) and len(key) == 2 and key[0] in ("parameter", "id")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters, without random generators: their states are saved elsewhere."""
    return {option: value for option, value in group.items() if option != "params" and not is_generator(value)}


def set_groups(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer the groups that it had when its state was saved by `state_by_name`, so that it can be loaded.

    Does nothing if the module lacks a parameter of them.
    """
    parameters, groups, saved = dict(module.named_parameters()), optimizer.param_groups, state["param_groups"]
    try:
        members = [[parameters[name] for name in group["params"]] for group in saved]
    except KeyError:
        return
    del groups[len(saved) :]
    for group, own in zip(groups, members, strict=False):
        group["params"] = own
    for options, own in [*zip(saved, members, strict=True)][len(groups) :]:
        optimizer.add_param_group({**options, "params": own})
    held = {id(parameter) for own in members for parameter in own}
    for key in [key for key in optimizer.state if isinstance(key, torch.Tensor) and id(key) not in held]:
        del optimizer.state[key]


def state_by_position(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any], take: Take = lambda like, value: materialize(value)
) -> dict[str, Any]:
    """Invert `state_by_name`, for this optimizer's own parameters: the state dict, "dtypes" and "parts".

    Args:
        take: converts a tensor of the saved state of a parameter, given with it, to the one to load.

    Raises:
        CheckpointError: the optimizer is of another kind, or has other parameters.
    """
    groups = matching_groups(module, optimizer, state)
    parameters = dict(module.named_parameters())
    order = [name for group in groups for name in group["params"]]
    position = {name: number for number, name in enumerate(order)}
    if unknown := state["state"].keys() - position.keys():
        raise CheckpointError(f"the checkpoint has states of {first_of(sorted(unknown))}, which {state['kind']} lacks")
    current = optimizer.state_dict()
    in_order = [parameters[name] for name in order]
    given = {
        "state": {
            **{
                position[name]: _ready_to_load(take, parameters[name], values)
                for name, values in state["state"].items()
            },
            **_placed(state.get("common", {}), current.get("state", {}), in_order, take),
        },
        "param_groups": [{**group, "params": [position[name] for name in group["params"]]} for group in groups],
        **_placed(_with_keys(state.get("extra", {}), partial(_as_key, parameters)), current, in_order, take),
    }
    parts = {}
    for path, part in state.get("parts", {}).items():
        states = {parameters[name]: one for name, one in part.get("state", {}).items() if name in parameters}
        parts[path] = {**part, "state": {like: _ready_to_load(take, like, values) for like, values in states.items()}}
    return {
        **{key: value for key, value in given.items() if key in current or key not in ("state", "param_groups")},
        "dtypes": {position[name]: dtype for name, dtype in state.get("dtypes", {}).items()},
        "parts": parts,
    }


def _ready_to_load(take: Take, like: torch.Tensor, values: Any) -> Any:
    """Return the state of a parameter with its tensors, at any depth, ready to be loaded."""
    return tree_map_only((torch.Tensor, StoredTensor), lambda value: with_strides_of(like, take(like, value)), values)


def _as_key(parameters: Mapping[str, nn.Parameter], key: Any) -> Any:
    """Return the parameter, or its `id`, for which a key of a saved state stands."""
    if not _is_name(key) or key[1] not in parameters:
        return key
    return parameters[key[1]] if key[0] == "parameter" else id(parameters[key[1]])


def _placed(saved: Any, current: Any, parameters: Sequence[torch.Tensor], take: Take) -> Any:
    """Put saved tensors that belong to no parameter on the devices of the optimizer's current ones.

    Without a current one, a tensor goes to the device of the first parameter of its shape, or stays in host memory.
    """
    now = dict(tree_leaves_with_path(current))

    def place(path: Any, value: Any) -> Any:
        if not isinstance(value, (torch.Tensor, StoredTensor)):
            return value
        alike = (p for p in parameters if tuple(p.shape) == tuple(value.shape) and p.numel() > 1)
        like = now.get(path)
        if not isinstance(like, torch.Tensor):
            like = next(alike, None)
        return materialize(value) if like is None else take(like, value).to(like.device)

    return tree_map_with_path(place, saved)


def with_dtypes_of(state: dict[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `state_by_name` returned with the dtypes that the parameters had then, under "dtypes".

    `weights`: the weights in the same checkpoint.
    """
    tensors = {name: value for name, value in weights.items() if isinstance(value, (torch.Tensor, StoredTensor))}
    names = [name for group in state["param_groups"] for name in group["params"]]
    return {**state, "dtypes": {name: tensors[name].dtype for name in names if name in tensors}}


def has_own_dtype(value: Loadable, parameter: torch.dtype | None) -> bool:
    """Whether an optimizer chose the dtype of a saved tensor, as for float32 moments of bfloat16 parameters.

    A tensor without dimensions, such as a step, always keeps its dtype.

    Args:
        parameter: dtype of the tensor's parameter when it was saved; None: unknown.
    """
    return not value.shape or (parameter is not None and value.dtype != parameter)


def load_by_position(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `state_by_position` returned.

    Tensors keep a dtype that the optimizer chose: torch rounds all of them to the dtypes of their parameters.
    """
    dtypes, parts = state["dtypes"], optimizers_inside(optimizer)
    groups = [(one, one.param_groups, [*one.param_groups]) for one in parts.values() if "param_groups" in vars(one)]
    optimizer.load_state_dict({key: value for key, value in state.items() if key not in ("dtypes", "parts")})
    for one, kept, before in groups:
        _move_states_from_ids(one)
        _keep_groups(one, kept, before)
    parameters = parameters_of([optimizer])
    _restore_dtypes(optimizer, [*parts.values()], parameters, state)
    dtype_of = {id(parameter): dtypes.get(position) for position, parameter in enumerate(parameters)}
    for path, saved in state["parts"].items():
        if path not in parts:
            raise CheckpointError(
                f"the checkpoint has a state of {type(optimizer).__name__}.{path}, an optimizer in it that is gone"
            )
        _load_part(parts[path], saved, dtype_of)
    for part in parts.values():
        quantize_again(part)


def _restore_dtypes(
    optimizer: Optimizer, parts: Sequence[Any], parameters: Sequence[torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Put the saved tensors where torch has rounded tensors whose dtype the optimizer chose."""
    loaded = optimizer.state_dict().get("state", {})  # of an optimizer around another one, the other's
    saved = state.get("state", {})
    for position, parameter in enumerate(parameters):
        if position in saved and position in loaded:
            before, dtype = loaded[position], state["dtypes"].get(position)
            for part in parts:
                if vars(part).get("state", {}).get(parameter) is before:
                    part.state[parameter] = _with_saved_dtypes(before, saved[position], parameter.dtype, dtype)


def _keep_groups(optimizer: Optimizer, kept: list[Any], groups: list[dict[str, Any]]) -> None:
    """Give an optimizer the list and dicts of groups that it had, and the generators in them.

    Torch has made new ones, and nested optimizers share them.
    """
    now = [*optimizer.param_groups]
    for old, new in zip(groups, now, strict=False):
        options = {**new, **{option: value for option, value in old.items() if is_generator(value)}}
        old.clear()
        old.update(options)
    kept[:] = [*groups[: len(now)], *now[len(groups) :]]
    optimizer.param_groups = kept


def _move_states_from_ids(optimizer: Optimizer) -> None:
    """Give states that were loaded by `id(parameter)` to the parameters, whose hashes are the ids."""
    ids = {id(parameter): parameter for parameter in parameters_of([optimizer])}
    state: dict[Any, Any] = vars(optimizer).get("state", {})
    by_id = {key: state.pop(key) for key in [*state] if type(key) is int and key in ids}
    state.update({ids[key]: values for key, values in by_id.items()})


def _load_part(optimizer: Optimizer, saved: Mapping[str, Any], dtypes: Mapping[int, torch.dtype | None]) -> None:
    """Set what an optimizer keeps outside of its `state_dict`, and of the `state_dict` of the optimizer around it."""

    def placed(parameter: torch.Tensor, on_device: bool, value: torch.Tensor) -> torch.Tensor:
        dtype = value.dtype if has_own_dtype(value, dtypes.get(id(parameter))) else parameter.dtype
        return value.to(parameter.device if value.dim() or on_device else value.device, dtype, copy=True)

    if "param_groups" in saved:
        for group, options in zip(optimizer.param_groups, in_memory(saved["param_groups"]), strict=True):
            group.update(options)
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            if parameter in saved["state"]:
                to_place = partial(placed, parameter, on_device)
                optimizer.state[parameter] = tree_map_only(torch.Tensor, to_place, saved["state"][parameter])
    optimizer.state.update(in_memory(saved.get("common", {})))


def _with_saved_dtypes(loaded: Any, saved: Any, rounded: torch.dtype, parameter: torch.dtype | None) -> Any:
    """Return a loaded state, at any depth, with the saved tensors in place of those that torch has rounded.

    Args:
        rounded: the dtype after torch's rounding.
        parameter: the dtype of the parameter when the state was saved.
    """
    own = dict(tree_leaves_with_path(saved))

    def kept(path: Any, value: Any) -> Any:
        theirs = own.get(path)
        if not isinstance(value, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            return value
        again = value.dtype == rounded != theirs.dtype and has_own_dtype(theirs, parameter)
        return theirs.to(value.device, copy=True) if again else value

    found = tree_map_with_path(kept, loaded)
    return _with_items(saved, found) if isinstance(saved, dict) else found  # torch makes dicts of all


def with_strides_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the state of a parameter with the parameter's strides, such as channels_last, if it has its shape.

    Checkpoints hold contiguous tensors, and fused optimizers go by the order in memory.
    """
    if type(value) is not torch.Tensor or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


_LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
"""Tensors of torch's fused optimizers, which read as many elements of each as the parameter has."""


_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
"""The options that schedulers of torch add to a group."""


def with_names(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose parameters were numbered by an import with their names, in the order of this optimizer.

    Raises:
        CheckpointError: the optimizer has other options, groups of other sizes, or a parameter has another shape than
            its state.
    """
    if not state.get("by_position"):
        return state
    kind = type(optimizer).__name__
    unknown = {*chain.from_iterable(state["param_groups"])} - {*chain.from_iterable(optimizer.param_groups)}
    if unknown := unknown - _OF_SCHEDULERS:
        raise CheckpointError(
            f"the imported optimizer has the options {first_of(sorted(unknown))}, which {kind} of configure_optimizers "
            "lacks: use the same one, or start from the weights alone by load_from_checkpoint."
        )
    names, saved = names_by_group(module, optimizer), [group["params"] for group in state["param_groups"]]
    if [*map(len, names)] != [*map(len, saved)]:
        raise CheckpointError(
            f"the imported optimizer has groups of {[*map(len, saved)]} parameters, and {type(optimizer).__name__} of "
            f"configure_optimizers has {[*map(len, names)]}: give it the same groups, or start from the weights alone."
        )
    name_of = dict(zip(chain.from_iterable(saved), chain.from_iterable(names), strict=True))
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    by_name = {name_of[position]: values for position, values in state["state"].items()}
    for name, _, shape in _shapes(by_name):
        if shape not in ((), shapes[name]):
            raise CheckpointError(
                f"the imported optimizer's state of {name} has the shape {list(shape)}, and the parameter "
                f"{list(shapes[name])}: configure_optimizers has the parameters in another order than then."
            )
    groups = [{**group, "params": ours} for group, ours in zip(state["param_groups"], names, strict=True)]
    return {**state, "kind": kind, "state": by_name, "param_groups": groups, "by_position": False}


def check_shapes(module: nn.Module, state: dict[str, Any]) -> None:
    """Check the shapes in a saved state that torch's fused optimizers rely on.

    Raises:
        CheckpointError: a tensor has not the shape of its parameter, or a step is not one number.
    """
    # A parameter that DeepSpeed has partitioned is empty, and keeps its full shape here.
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}
    of_parts = [part.get("state", {}) for part in state.get("parts", {}).values()]
    for name, key, shape in chain.from_iterable(map(_shapes, [state["state"], *of_parts])):
        if key == "step":
            fits = math.prod(shape) == 1
        else:
            fits = key not in _LIKE_PARAMETERS or shape == shapes.get(name, shape)
        if not fits:
            raise CheckpointError(
                f"the checkpoint's {key!r} of {name} has the shape {list(shape)}, and the parameter has "
                f"{list(shapes.get(name, ()))}: the checkpoint is damaged, or belongs to another model."
            )


def _shapes(states: Mapping[str, Any]) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield the name of the parameter, the key and the shape of each tensor in the states of parameters."""
    for name, values in states.items():
        if isinstance(values, dict):
            for key, value in values.items():
                if isinstance(value, (torch.Tensor, StoredTensor)):
                    yield name, key, tuple(value.shape)


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
            "one; or start a new training from these weights, by load_from_checkpoint and fit without ckpt_path."
        )
    names = names_by_group(module, optimizer) if names is None else names
    saved = [group["params"] for group in state["param_groups"]]
    if sorted(map(sorted, names)) != sorted(map(sorted, saved)):
        different = {*chain.from_iterable(names)} ^ {*chain.from_iterable(saved)}
        raise CheckpointError(
            f"the parameters of {kind} or their groups differ from the checkpoint's: {sorted(different)[:3]}. To train "
            "others from these weights, use load_from_checkpoint(strict=False), and fit without ckpt_path."
        )
    groups = []
    for number, (group_names, now) in enumerate(zip(names, optimizer.param_groups, strict=True)):
        group = in_memory(next(g for g in state["param_groups"] if sorted(g["params"]) == sorted(group_names)))
        # An optimizer of another author may give an option another type as it trains.
        of_torch = type(optimizer).__module__.startswith("torch.")
        known = {**now, "params": group["params"]} if of_torch else {}
        if found := unlike(group, known, f"the options of group {number} of {kind}"):
            raise CheckpointError(f"{found}: the checkpoint is damaged, or was written with another optimizer")
        # Another version of torch may lack an option.
        groups.append({**now, **group, "params": group_names})
    return groups


def names_by_group(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of each group's parameters, in the optimizer's order.

    Raises:
        CheckpointError: the optimizer has a parameter that is not in the module.
    """
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    try:
        return [[name_of[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    except KeyError as error:
        raise CheckpointError(_not_in(optimizer, error.args[0], type(module).__name__)) from None


def _not_in(optimizer: Optimizer, parameter: torch.Tensor, module: str) -> str:
    return (
        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not in {module}, so it "
        "would not be saved. Make it an attribute of the module."
    )
