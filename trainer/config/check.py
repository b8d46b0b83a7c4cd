"""Check every value of a configuration against the signature that takes it, and collect all problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.callback import Callback, available_callbacks
from trainer.config.classes import find_class, one_line_error
from trainer.config.read import INVALID, Values
from trainer.config.tree import (
    KeyPath,
    Node,
    Problem,
    Source,
    canonical_class,
    dotted,
    entries,
    named_source,
    repr_value,
    sources_of,
    with_source,
)
from trainer.config.types import (
    TypeMismatchError,
    classes_in,
    constructor_parameters,
    items_of,
    objects_in,
    takes_mapping,
)
from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError, TrainerError
from trainer.logger import Logger
from trainer.loop.changes_since_checkpoint import allowed_problems
from trainer.loop.resolved_config import settings_problems
from trainer.module import TrainModule
from trainer.settings import Settings
from trainer.strategy import Strategy, available_strategies
from trainer.trainer import Trainer


@dataclass
class ClassSpec:
    """A class with arguments that fit its signature; among them may be other specs."""

    cls: type
    arguments: dict[str, Any]
    source: Source
    path: str
    sources: dict[str, Source] = field(default_factory=dict)
    """The source of each argument."""

    def build(self, **provided: Any) -> Any:
        """Return the object.

        Args:
            provided: arguments that no file can hold, such as an optimizer's parameters.

        Raises:
            ConfigError: the constructor refused its arguments, or failed: says what, and where in the user's code.
        """
        arguments = provided | {name: instantiate(value) for name, value in self.arguments.items()}
        try:
            return self.cls(**arguments)
        except TrainerError as error:
            source, message = named_source(str(error), self.sources) or self.source, f"{self.path}: {error}"
            raise ConfigError(str(Problem(source, message))) from error
        except Exception as error:
            message = f"{self.path}: making {self.cls.__name__} failed: {one_line_error(error)}"
            raise ConfigError(str(Problem(self.source, message))) from error


def instantiate(value: Any) -> Any:
    """Return a value with the objects that its specs describe."""
    if isinstance(value, ClassSpec):
        return value.build()
    return [instantiate(item) for item in value] if isinstance(value, list) else value


class Checker(Values):
    """Checks a configuration: its values against annotations, arguments against signatures. Problems go to `findings`.

    Nodes get the names and paths that mean the same from any folder.
    """

    # -- the keys of a configuration ----------------------------------------------------------------------------------

    def module(self, node: Node) -> ClassSpec | None:
        """Return the module."""
        return self.class_spec(node, (TrainModule,), ("module",))

    def data(self, node: Node | None) -> ClassSpec | None:
        """Return the data module, if there is one."""
        return None if node is None or node.value is None else self.class_spec(node, (DataModule,), ("data",))

    def optimizer(self, node: Node | None, module: type) -> ClassSpec | None:
        """Return the optimizer of a module that has no `configure_optimizers`."""
        if node is None or node.value is None:
            return None
        if module.configure_optimizers is not TrainModule.configure_optimizers:  # type: ignore[attr-defined]
            words = (
                f"module ({module.__name__}) defines configure_optimizers, which would be replaced. Keep one of them."
            )
            self.findings.add(node.source, f"optimizer: {words}")
            return None
        return self.class_spec(node, (Optimizer,), ("optimizer",), provided=("params",))

    def scheduler(self, node: Node | None) -> ClassSpec | None:
        """Return the learning-rate scheduler of the optimizer; `interval` and the like are among its arguments."""
        if node is None or node.value is None:
            return None
        return self.class_spec(node, (LRScheduler,), ("lr_scheduler",), provided=("optimizer",))

    def allow_changes(self, node: Node | None) -> list[str]:
        """Return the names of what may differ from the run that wrote the checkpoint."""
        names = [] if node is None else self.value(node, list[str], ("allow_changes",))
        if node is None or not isinstance(names, list):
            return []
        for problem in allowed_problems(names):
            self.findings.add(node.source, problem)
        return names

    def trainer(self, node: Node | None) -> dict[str, Any]:
        """Return the arguments of Trainer that were given: each fits its type, then its value is checked.

        Objects are not made yet: `Trainer` checks them, and with them all that the command adds to these arguments.
        """
        if node is None or node.value is None:
            return {}
        values = self.arguments(node, Trainer, ("trainer",))
        valid = {name: value for name, value in values.items() if value is not INVALID}
        plain = {name: value for name, value in valid.items() if not has_spec(value)}
        self.findings.problems += with_source(settings_problems(Settings(**plain)), sources_of(node))
        return valid

    def strategy(self, node: Node) -> Any:
        """Return a name of the table as it is; with arguments, or for a class of the user's, a spec."""
        name, arguments = entries(node).get("class_path"), entries(node).get("init_args")
        if name is not None and name.value == "auto":
            if arguments is not None:
                words = "trainer.strategy: 'auto' takes no arguments. Name the strategy that they are for."
                self.findings.add(node.source, words)
            return "auto"
        spec = self.class_spec(node, (Strategy,), ("trainer", "strategy"))
        if spec is None:
            return INVALID
        return name.value if name and arguments is None and name.value in [*available_strategies()] else spec

    # -- classes ------------------------------------------------------------------------------------------------------

    def class_spec(
        self, node: Node, bases: tuple[type, ...], path: KeyPath, provided: Sequence[str] = ()
    ) -> ClassSpec | None:
        """Return a choice of class in canonical form; None when something is wrong with it.

        Args:
            provided: arguments that are given when the object is made, and not in the configuration.
        """
        where = dotted(path)
        nested = entries(node).get("init_args")
        name = entries(node).get("class_path")
        table = table_of(bases)
        if name is None or not isinstance(name.value, str):
            example = next((key for key in entries(nested) if key in table), next(iter(table), "package.module.Class"))
            given = "no class_path" if isinstance(node.value, dict) and name is None else repr_value(name or node)
            words = f"{where}: given {given}, allowed: 'class_path: {example}' (or file.py:Class), and init_args."
            if nested is not None and len(path) == 3:
                words += f" Elements of a list are numbered: {dotted((*path[:2], 0))}.NAME."
            self.findings.add(node.source, words)
            return None
        cls = self.named_class(name, bases, table, path)
        return None if cls is None else self.spec_of(cls, nested, path, node.source, name.source, provided)

    def named_class(self, node: Node, bases: tuple[type, ...], table: Mapping[str, type], path: KeyPath) -> type | None:
        """Return the class with a name (see `find_class`); None if there is no such class."""
        try:
            found = find_class(str(node.value), bases, table, node.source)
        except ConfigError as error:
            self.findings.add(node.source, f"{dotted(path)}: {error}", error)
            return None
        node.value = found.name
        return found.cls

    def spec_of(
        self,
        cls: type,
        node: Node | None,
        path: KeyPath,
        source: Source,
        named_at: Source,
        provided: Sequence[str] = (),
    ) -> ClassSpec:
        """Return the spec of a class with the arguments in a mapping; those that it cannot do without are asked for."""
        arguments = self.arguments(node, cls, path)
        needed = [name for name, p in constructor_parameters(cls).named.items() if p.default is p.empty]
        missing = [name for name in needed if name not in entries(node) and name not in provided]
        if missing:
            needs = f"needs the argument{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
            fix = f"give it in the file under init_args, or --{dotted((*path, missing[0]))} VALUE."
            self.findings.add(named_at, f"{dotted(path)} ({cls.__name__}) {needs}: {fix}")
        return ClassSpec(cls, arguments, source, dotted(path), sources_of(node))

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        """Return a value as its annotation wants it, with specs for objects; `INVALID` when it does not fit."""
        if path == ("trainer", "strategy"):
            return self.strategy(node)
        objects, items = tuple(objects_in(annotation)), items_of(annotation)
        if isinstance(node.value, dict) and objects:
            structured = next((cls for cls in objects if dataclasses.is_dataclass(cls)), None)
            if "class_path" in node.value or (structured is None and not takes_mapping(annotation)):
                node.value = canonical_class(node, path, self.findings).value
                return self.class_spec(node, objects, path) or INVALID
            if structured is not None:
                return self.spec_of(structured, node, path, node.source, node.source)
        if isinstance(node.value, list) and items is not None:
            return [self.value(item, items, (*path, index)) for index, item in enumerate(node.value)]
        return super().value(node, annotation, path)

    def coerce(self, node: Node, annotation: Any, path: KeyPath, mismatch: TypeMismatchError) -> Any:
        """Return the class that a text names, or what was typed as text; if it is neither, report the mismatch."""
        objects, classes = tuple(objects_in(annotation)), tuple(classes_in(annotation))
        if isinstance(node.value, str) and objects:
            node.value = {"class_path": Node(node.value, node.source, node.text)}
            return self.class_spec(node, objects, path) or INVALID
        if isinstance(node.value, str) and classes:
            return self.named_class(node, classes, {}, path) or INVALID
        return super().coerce(node, annotation, path, mismatch)


def table_of(bases: tuple[type, ...]) -> dict[str, type]:
    """Return the short names for classes of these kinds."""
    table: dict[str, type] = {}
    if Strategy in bases:
        table.update(available_strategies())
    for kind, package in ((Optimizer, torch.optim), (LRScheduler, torch.optim.lr_scheduler)):
        if kind in bases:
            table.update(
                {
                    name: cls
                    for name, cls in vars(package).items()
                    if isinstance(cls, type) and issubclass(cls, kind) and cls is not kind and not name.startswith("_")
                }
            )
    for base in (Callback, Logger):
        if base in bases:
            table.update({name: cls for name, cls in available_callbacks().items() if issubclass(cls, base)})
    return table


def has_spec(value: Any) -> bool:
    """Whether an object is still to be made for this value (or it is an invalid one)."""
    return value is INVALID or isinstance(value, ClassSpec) or (isinstance(value, list) and any(map(has_spec, value)))
