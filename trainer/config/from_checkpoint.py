"""Give the module of a configuration the hyperparameters of the checkpoint with which it is evaluated."""

from __future__ import annotations

from trainer.checkpoint.directory import locate
from trainer.checkpoint.format import read_checkpoint
from trainer.config.check import ValueOfData
from trainer.config.loading import Configuration
from trainer.config.read import has_spec
from trainer.config.tree import COMMAND_LINE
from trainer.config.types import constructor_parameters
from trainer.errors import CheckpointError
from trainer.hyperparameters import constructor_arguments


def take_hyperparameters(configuration: Configuration) -> list[str]:
    """Let the module have the hyperparameters of the checkpoint, but for those that were typed.

    Returns:
        A line for each value of a file that another one took the place of.
    """
    module, lines = configuration.module, []
    try:
        path = None if configuration.ckpt_path is None else locate(configuration.ckpt_path)
    except CheckpointError:  # which is said where its weights are loaded
        path = None
    if path is None:
        return []
    kept = read_checkpoint(path, keys=["hyperparameters"]).get("hyperparameters", {})
    stored, kinds = kept.get("module", {}), kept.get("kinds", {}).get("module")
    needed = {name: None for name in module.arguments if name not in stored}
    try:
        arguments = constructor_arguments(module.cls, stored, kept.get("arguments", {}).get("module"), needed, kinds)
    except CheckpointError:  # of another module, which is said where its weights are loaded
        return []
    parameters = constructor_parameters(module.cls).named
    for name, value in arguments.items():
        source = module.sources.get(name)
        given = module.arguments.get(name, parameters[name].default if name in parameters else None)
        is_object = has_spec(given) and not isinstance(given, ValueOfData)
        if name not in stored or source == COMMAND_LINE or is_object:
            continue
        if source is not None and given != value:
            lines.append(
                f"module.{name} is {value!r}, as in the checkpoint, and not {given!r}, as at {source}: to have that, "
                f"type --module.{name}"
            )
        module.arguments[name] = value
    return lines
