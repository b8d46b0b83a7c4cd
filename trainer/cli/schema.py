"""`trainer schema`: a JSON schema of configurations, which editors use to complete and check them.

pydantic makes the schemas of single types. It was tried for whole constructors, and refuses the Trainer's, which has
positional and keyword-only arguments, and those with a type that only type checkers import.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.cli.options import CommandParser, reports_errors
from trainer.config.plug_names import precisions
from trainer.names.aliases import SHORT_PRECISIONS

EXAMPLES = """\
In an editor that uses yaml-language-server (VS Code's YAML extension and others), the first line of a configuration
names the file:

    # yaml-language-server: $schema=trainer.schema.json

examples:
  trainer schema > trainer.schema.json
"""
OWN_CLASS = {"type": "string", "pattern": "[.:]", "description": "package.module.Class, or file.py:Class"}
NULL = {"type": "null"}
REFERENCE = {"type": "string", "pattern": r"\$\{.*\}", "description": "a reference to another value"}


@reports_errors
def run(arguments: list[str]) -> int:
    """Print the schema. Returns the exit code."""
    words = "Print a JSON schema of configurations: names, types and descriptions of all arguments."
    CommandParser(prog="trainer schema", description=words, epilog=EXAMPLES).parse(arguments)
    print(json.dumps(schema(), indent=1))
    return 0


def schema() -> dict[str, Any]:
    """Return the schema of a configuration."""
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from trainer.callback import available_callbacks
    from trainer.config.check import table_of
    from trainer.config.read import SCHEDULER_OPTIONS
    from trainer.logger import Logger
    from trainer.settings import NONE_IS_DEFAULT
    from trainer.strategy import available_strategies
    from trainer.trainer import Trainer

    callbacks = available_callbacks()
    loggers = {name: cls for name, cls in callbacks.items() if issubclass(cls, Logger)}
    trainer = arguments_schema(Trainer)
    properties = trainer["properties"]
    names = [*precisions(), *SHORT_PRECISIONS]
    numbers = [int(name) for name in names if name.isdecimal()]
    properties["precision"] = {"anyOf": [{"enum": [*names, *numbers]}, REFERENCE]} | _words(properties["precision"])
    properties["strategy"] = _choice(available_strategies(), ["auto"]) | _words(properties["strategy"])
    for name, table in (("callbacks", callbacks), ("logger", loggers)):
        chosen = _choice(table)
        others = [{"type": "boolean"}] if name == "logger" else [NULL]
        several = {"type": "array", "items": chosen}
        properties[name] = {"anyOf": [chosen, several, *others]} | _words(properties[name])
    for name in NONE_IS_DEFAULT:
        properties[name] = _or_null(properties[name])
    own = {"anyOf": [OWN_CLASS, _object(OWN_CLASS, {"type": "object"})]}
    properties["profiler"] = {"anyOf": [properties["profiler"], own]} | _words(properties["profiler"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of trainer fit, validate, test and predict",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "module": own | {"description": "The class to train."},
            "data": _or_null(own) | {"description": "The class of the data module."},
            "trainer": _or_null(trainer),
            "optimizer": _or_null(_choice(table_of((Optimizer,)))),
            "lr_scheduler": _or_null(_choice(table_of((LRScheduler,)), beside=SCHEDULER_OPTIONS)),
            "ckpt_path": {"type": ["string", "null"], "description": "last, best, or the path of a checkpoint."},
            "allow_changes": {"type": ["array", "null"], "items": {"type": "string"}},
            "name": {"type": ["string", "null"], "description": "The name of the run."},
            "vars": {"type": ["object", "null"], "description": "Values for references: ${vars.NAME}."},
            "weights": {"type": ["string", "null"], "description": "Pretrained weights to start from."},
        },
    }


def arguments_schema(cls: type) -> dict[str, Any]:
    """Return the schema of the arguments of a class."""
    from trainer.cli.class_help import argument_texts
    from trainer.config.types import constructor_parameters

    texts = _trainer_texts() if cls.__name__ == "Trainer" else argument_texts(inspect.getdoc(cls) or "")
    parameters = constructor_parameters(cls)
    properties: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.named.items():
        properties[name] = {"anyOf": [_type_schema(parameter.annotation), REFERENCE]}
        if name in texts:
            properties[name] |= {"description": texts[name]}
    return {"type": "object", "properties": properties, "additionalProperties": parameters.open}


def _trainer_texts() -> Mapping[str, str]:
    from dataclasses import fields

    from trainer.settings import Settings

    return {field.name: field.metadata["help"] for field in fields(Settings)}


def _type_schema(annotation: Any) -> dict[str, Any]:
    """Return the schema of an annotation; an open one where JSON lacks the type."""
    from pydantic import ConfigDict, TypeAdapter

    from trainer.config.types import NO_ADAPTER

    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
        found = adapter.json_schema()
        return {} if {"anyOf": []} in (found, *found.get("anyOf", ())) else found
    except NO_ADAPTER:
        return {}


def _choice(table: Mapping[str, type], further: Iterable[str] = (), beside: Iterable[str] = ()) -> dict[str, Any]:
    """Return the schema of a place where a class of a table is chosen, by name or with its arguments.

    Args:
        further: names that are not classes.
        beside: words that stand next to the arguments of any class.
    """
    known = [_object({"const": name}, arguments_schema(cls), beside) for name, cls in table.items()]
    own = _object(OWN_CLASS, {"type": "object"})
    return {"anyOf": [{"enum": [*further, *table]}, *known, OWN_CLASS, own]}


def _object(class_path: dict[str, Any], arguments: dict[str, Any], beside: Iterable[str] = ()) -> dict[str, Any]:
    """Return the schema of a class with its arguments, below `init_args` or next to `class_path`."""
    words: dict[str, Any] = {name: {} for name in beside}
    arguments = arguments | {"properties": arguments.get("properties", {}) | words}
    return {
        "type": "object",
        "properties": {**arguments["properties"], "class_path": class_path, "init_args": arguments},
        "required": ["class_path"],
        "additionalProperties": arguments.get("additionalProperties", True),
    }


def _or_null(described: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that takes null, too: the default, or nothing of the kind."""
    return {"anyOf": [described, NULL]} | _words(described)


def _words(described: dict[str, Any]) -> dict[str, Any]:
    return {"description": described.get("description", "")}
