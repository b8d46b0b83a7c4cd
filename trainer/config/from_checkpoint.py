"""Give the module of a configuration the hyperparameters of the checkpoint with which it is evaluated."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, MutableSequence
from contextlib import suppress
from typing import Any, cast

from trainer.checkpoint.directory import POINTERS, locate
from trainer.checkpoint.format import read_checkpoint
from trainer.config.check import missing_arguments, needs_arguments
from trainer.config.chosen_run import plain
from trainer.config.loading import Configuration
from trainer.config.specs import ClassSpec, instantiate, is_data
from trainer.config.tree import COMMAND_LINE, Node, Problem, entries
from trainer.config.types import constructor_parameters, is_structured
from trainer.errors import CheckpointError, ConfigError
from trainer.hyperparameters import as_given, constructor_arguments, own_and_inside


def take_hyperparameters(configuration: Configuration) -> list[str]:
    """Let the module have the hyperparameters of the checkpoint, but for the values, or parts of them, that were typed.

    Returns:
        A line for each value of a file that another one took the place of.

    Raises:
        ConfigError: neither the configuration nor the checkpoint gives an argument that the module needs, or a
            dataclass refuses a typed value beside the checkpoint's.
    """
    module, lines = configuration.module, list[str]()
    if configuration.ckpt_path is None:
        return []
    try:
        arguments = _kept_arguments(configuration, lines)
    except CheckpointError as error:
        if missing_arguments(module.cls, module.arguments):
            raise ConfigError(str(error)) from None
        return []  # no checkpoint, or one of another module, which is said where its weights are loaded
    module.from_checkpoint = True
    for name, value in arguments.items():
        if name in module.nodes:
            node, given = module.nodes[name], module.arguments[name]
            value = _with_typed(node, given, value)
            lines += _replaced(name, node, given, value)
        module.arguments[name] = value
    if missing := missing_arguments(module.cls, module.arguments):
        words = f"{needs_arguments(module.cls, ('module',), missing)} The checkpoint has no such hyperparameter."
        raise ConfigError(str(Problem(module.source, words)))
    return lines


def _kept_arguments(configuration: Configuration, lines: list[str]) -> dict[str, Any]:
    """Return the arguments of the module that the checkpoint has; `lines` gets one for each that cannot be made again.

    Raises:
        CheckpointError: there is no checkpoint, or it is another module's.
    """
    cls = configuration.module.cls
    of_run = configuration.ckpt_path in POINTERS and configuration.run_dir  # its last one, if none is the best
    path = locate(str(of_run or configuration.ckpt_path))
    kept = read_checkpoint(path, keys=["hyperparameters"]).get("hyperparameters", {})
    stored, kinds = kept.get("module", {}), kept.get("kinds", {}).get("module")
    inside = kept.get("arguments", {}).get("module")
    for name in (name for name in own_and_inside(stored, inside)[0] if name in (kinds or {})):
        try:
            as_given(stored[name], kinds[name], cls, name)
        except CheckpointError as error:
            lines.append(f"module.{name} is not as in the checkpoint: {error}")
            del stored[name]
    return constructor_arguments(cls, stored, inside, {}, kinds, partial=True)


def _replaced(name: str, node: Node, given: Any, value: Any) -> list[str]:
    """Return a line for a value of a file that another one takes the place of."""
    with suppress(ConfigError):  # it may lack what the checkpoint has
        given = instantiate(given) if is_data(given) else given
    source = next((one.source for one in (node, *entries(node).values()) if one.source != COMMAND_LINE), None)
    if source is None or given == value or plain(given, "/") == plain(value, "/"):
        return []
    as_in = f"as in the checkpoint{' and as typed' if _typed(node) else ''}"
    return [
        f"module.{name} is {value!r}, {as_in}, and not {given!r}, as at {source}: to have that, type --module.{name}"
    ]


def _typed(node: Node) -> bool:
    """Whether a value, or a part of it, was typed."""
    inside = node.value if isinstance(node.value, list) else [*entries(node).values()]
    return any(map(_typed, inside)) if inside else node.source == COMMAND_LINE


def _with_typed(node: Node, given: Any, kept: Any) -> Any:
    """Return a checkpoint's value with the parts of a given one that were typed; `node` is the given one's."""
    if not _typed(node):
        return kept
    if isinstance(given, ClassSpec) and type(kept) is given.cls and is_structured(given.cls):
        names = constructor_parameters(given.cls).named
        parts = {name: getattr(kept, name) for name in names if hasattr(kept, name)}
        parts |= _typed_entries(given.nodes, given.arguments, parts)
        return dataclasses.replace(given, arguments=parts).build()
    same_class = isinstance(given, dict) and isinstance(kept, MutableMapping)
    if same_class and given.get("class_path") == kept.get("class_path"):
        made = copy.copy(kept)
        made.update(_typed_entries(entries(node), given, kept))
        return made
    if not isinstance(given, (list, tuple)) or not isinstance(kept, (tuple, MutableSequence)):
        return given
    if node.append is not None:
        return type(given)([*kept, *given[len(given) - node.append :]])
    if type(given) is type(kept) is list and len(given) == len(kept) and node.source != COMMAND_LINE:
        return [_with_typed(*of_item) for of_item in zip(cast("list[Node]", node.value), given, kept, strict=True)]
    return given


def _typed_entries(nodes: Mapping[Any, Node], given: Mapping[Any, Any], kept: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of which a part was typed, beside the other parts of the checkpoint's."""
    typed = [(key, node) for key, node in zip(given, nodes.values(), strict=True) if _typed(node)]
    return {key: _with_typed(node, given[key], kept.get(key, {})) for key, node in typed}
