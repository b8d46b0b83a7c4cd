"""Give the module of a configuration the hyperparameters of the checkpoint to evaluate."""

from __future__ import annotations

from typing import Any

from trainer.checkpoint.directory import POINTERS
from trainer.checkpoint.lightning_file import read_located
from trainer.config.check import missing_arguments, needs_arguments
from trainer.config.chosen_run import plain
from trainer.config.loading import Recipe
from trainer.config.specs import ClassSpec
from trainer.config.tree import COMMAND_LINE, Node, Problem, Source, children_of
from trainer.config.types import is_structured
from trainer.errors import CheckpointError, ConfigError
from trainer.hyperparameters import as_given, constructor_arguments, own_and_inside


def take_hyperparameters(configuration: Recipe) -> list[str]:
    """Let the module have the hyperparameters of the checkpoint, but for the arguments that were typed, even in part.

    Returns:
        A line for each value of a file that another one took the place of.

    Raises:
        ConfigError: neither the configuration nor the checkpoint gives an argument that the module needs.
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
    given = {name: node for name, node in module.nodes.items() if name in arguments}
    for name, node in given.items():
        if node.append:
            words = f"module.{name}+= adds nothing to the checkpoint's list. Give the whole list: --module.{name}."
            raise ConfigError(str(Problem(node.source, words)))
        if _typed(node):
            del arguments[name]
        else:
            lines += _replaced(name, node.source, module.arguments[name], arguments[name])
    module.arguments |= arguments
    if missing := missing_arguments(module.cls, module.arguments):
        words = f"{needs_arguments(module.cls, ('module',), missing)} The checkpoint has no such hyperparameter."
        raise ConfigError(str(Problem(module.source, words)))
    return lines


def _kept_arguments(configuration: Recipe, lines: list[str]) -> dict[str, Any]:
    """Return the arguments of the module that the checkpoint has; `lines` gets one for each that cannot be made again.

    Raises:
        CheckpointError: there is no checkpoint, or it is another module's.
    """
    cls = configuration.module.cls
    place = str(configuration.ckpt_path)
    if place in POINTERS and configuration.run_dir is not None:  # its last one, if none is the best
        place = str(configuration.run_dir)
    kept = read_located(place, ["hyperparameters"]).get("hyperparameters", {})
    stored, kinds = kept.get("module", {}), kept.get("kinds", {}).get("module")
    inside = kept.get("arguments", {}).get("module")
    for name in sorted({*own_and_inside(stored, inside)[0]} & {*(kinds or ())}):
        try:
            as_given(stored[name], kinds[name], cls, name)
        except CheckpointError as error:
            lines.append(f"module.{name} is not as in the checkpoint: {error}")
            del stored[name]
    return constructor_arguments(cls, stored, inside, {}, kinds, partial=True)


def _replaced(name: str, source: Source, given: Any, value: Any) -> list[str]:
    """Return a line for a value of a file that another one takes the place of."""
    if isinstance(given, ClassSpec) and is_structured(given.cls):
        given = given.build()
    if given == value or plain(given, "/") == plain(value, "/"):
        return []
    values = f"{value!r}, as in the checkpoint, and not {given!r}, as at {source}"
    return [f"module.{name} is {values}: to have that, type --module.{name}"]


def _typed(node: Node) -> bool:
    """Whether a value, or a part of it, was typed."""
    return node.source == COMMAND_LINE or any(map(_typed, children_of(node).values()))
