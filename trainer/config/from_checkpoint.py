"""Give the module of a configuration the hyperparameters of the checkpoint with which it is evaluated."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping, MutableSequence
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
    module, lines = configuration.module, []
    if configuration.ckpt_path is None:
        return []
    try:
        of_run = configuration.ckpt_path in POINTERS and configuration.run_dir  # its last one, if none is the best
        path = locate(str(of_run or configuration.ckpt_path))
        kept = read_checkpoint(path, keys=["hyperparameters"]).get("hyperparameters", {})
        stored, kinds = kept.get("module", {}), kept.get("kinds", {}).get("module")
        inside = kept.get("arguments", {}).get("module")
        for name in (name for name in own_and_inside(stored, inside)[0] if name in (kinds or {})):
            try:
                as_given(stored[name], kinds[name], module.cls, name)
            except CheckpointError as error:
                lines.append(f"module.{name} is not as in the checkpoint: {error}")
                del stored[name]
        arguments = constructor_arguments(module.cls, stored, inside, {}, kinds, partial=True)
    except CheckpointError as error:
        if missing_arguments(module.cls, module.arguments):
            raise ConfigError(str(error)) from None
        return []  # no checkpoint, or one of another module, which is said where its weights are loaded
    module.from_checkpoint = True
    for name, value in arguments.items():
        node = module.nodes.get(name)
        if node is not None:
            given = module.arguments[name]
            value = _with_typed(node, given, value)
            with suppress(ConfigError):  # it may lack what the checkpoint has
                given = instantiate(given) if is_data(given) else given
            source = next((one.source for one in (node, *entries(node).values()) if one.source != COMMAND_LINE), None)
            if source is not None and given != value and plain(given, "/") != plain(value, "/"):
                as_in = f"as in the checkpoint{' and as typed' if _typed(node) else ''}"
                lines.append(
                    f"module.{name} is {value!r}, {as_in}, and not {given!r}, as at {source}: to have that, type "
                    f"--module.{name}"
                )
        module.arguments[name] = value
    if missing := missing_arguments(module.cls, module.arguments):
        words = f"{needs_arguments(module.cls, ('module',), missing)} The checkpoint has no such hyperparameter."
        raise ConfigError(str(Problem(module.source, words)))
    return lines


def _typed(node: Node) -> bool:
    """Whether a value, or a part of it, was typed."""
    inside = node.value if isinstance(node.value, list) else [*entries(node).values()]
    return any(map(_typed, inside)) if inside else node.source == COMMAND_LINE


def _with_typed(node: Node, given: Any, kept: Any) -> Any:
    """Return a checkpoint's value with the parts of a given one that were typed; `node` is the given one's."""
    if not _typed(node):
        return kept
    if (
        isinstance(given, dict)
        and isinstance(kept, MutableMapping)
        and given.get("class_path") == kept.get("class_path")
    ):
        made = copy.copy(kept)
        for (key, value), child in zip(given.items(), entries(node).values(), strict=True):
            if _typed(child):
                made[key] = _with_typed(child, value, kept.get(key, {}))
        return made
    if isinstance(given, ClassSpec) and type(kept) is given.cls and is_structured(given.cls):
        parts = {name: getattr(kept, name) for name in constructor_parameters(given.cls).named if hasattr(kept, name)}
        for name, child in given.nodes.items():
            if _typed(child):
                parts[name] = _with_typed(child, given.arguments[name], parts.get(name))
        return dataclasses.replace(given, arguments=parts).build()
    if isinstance(given, (list, tuple)) and isinstance(kept, (tuple, MutableSequence)) and node.append is not None:
        return type(given)([*kept, *given[len(given) - node.append :]])
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept) and node.source != COMMAND_LINE:
        return [_with_typed(*of_item) for of_item in zip(cast("list[Node]", node.value), given, kept, strict=True)]
    return given
