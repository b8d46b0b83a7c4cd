"""Check every value of a configuration against the signature that takes it, and collect all problems."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.callback import Callback, Logger, available_callbacks
from trainer.config.classes import find_class, one_line_error
from trainer.config.tree import Diagnostics, KeyPath, Node, Problem, Source, canonical_class, dotted, repr_value
from trainer.config.types import (
    Parameters,
    TypeMismatchError,
    allowed,
    classes_in,
    items_of,
    objects_in,
    options_of,
    parameters_of,
    reads_as_number,
    takes_mapping,
    validate,
)
from trainer.errors import ConfigError, TrainerError, did_you_mean
from trainer.settings import LIGHTNING_EQUIVALENTS
from trainer.strategy import Strategy, available_strategies
from trainer.trainer import Trainer

INVALID = object()
"""Placeholder of a value that does not fit."""


class ClassSpecError(ConfigError):
    """A constructor refused its arguments, or failed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass
class ClassSpec:
    """A class with arguments that fit its signature; among them may be other specs."""

    cls: type
    arguments: dict[str, Any]
    source: Source
    place: str
    sources: dict[str, Source] = field(default_factory=dict)
    """Where each argument was given."""

    def build(self) -> Any:
        """Return the object.

        Raises:
            ClassSpecError: the constructor raised: says what, and where in the user's code.
        """
        arguments = {name: instantiate(value) for name, value in self.arguments.items()}
        try:
            return self.cls(**arguments)
        except TrainerError as error:
            # Ours name the argument that they are about.
            names = [name for name in re.findall(r"\w+", str(error)) if name in self.sources]
            source = self.sources[names[0]] if names else self.source
            raise ClassSpecError(Problem(source, f"{self.place}: {error}")) from error
        except Exception as error:
            message = f"{self.place}: making {self.cls.__name__} failed: {one_line_error(error)}"
            raise ClassSpecError(Problem(self.source, message)) from error


def instantiate(value: Any) -> Any:
    """Return a value with the objects that its specs describe."""
    if isinstance(value, ClassSpec):
        return value.build()
    if isinstance(value, list):
        return [instantiate(item) for item in value]
    return value


def with_source(problems: Iterable[str], sources: Mapping[str, Source]) -> list[Problem]:
    """Return problems with the trainer's arguments, each with the place where the argument that it names was given."""
    found = []
    for problem in problems:
        name = next((name for name in re.findall(r"\w+", problem) if name in sources), None)
        if name is None:
            found.append(Problem(None, problem))
        else:
            found.append(Problem(sources[name], f"trainer{'.' if problem.startswith(name) else ': '}{problem}"))
    return found


class Checker:
    """Checks values against annotations and arguments against signatures. Problems go to `findings`."""

    def __init__(self, findings: Diagnostics) -> None:
        self.findings = findings

    def class_spec(self, node: Node, bases: tuple[type, ...], place: KeyPath) -> ClassSpec | None:
        """Return a choice of class in canonical form; None when something is wrong with it."""
        where = dotted(place)
        nested = entries(node).get("init_args")
        name = entries(node).get("class_path")
        if name is None or not isinstance(name.value, str):
            table = table_of(bases)
            example = next((key for key in entries(nested) if key in table), next(iter(table), "package.module.Class"))
            given = "no class_path" if isinstance(node.value, dict) and name is None else repr_value(name or node)
            self.findings.add(
                node.source,
                f"{where}: given {given}, allowed: 'class_path: {example}' (or file.py:Class), and init_args.",
            )
            return None
        try:
            found = find_class(name.value, bases, table_of(bases), name.source)
        except ConfigError as error:
            self.findings.add(name.source, f"{where}: {error}")
            return None
        name.value = found.name
        return self.spec_of(found.cls, nested, place, node.source, name.source)

    def spec_of(self, cls: type, node: Node | None, place: KeyPath, source: Source, named_at: Source) -> ClassSpec:
        """Return the spec of a class with the arguments in a mapping; those that it cannot do without are asked for."""
        arguments = self.arguments(node, cls, place)
        needed = [name for name, p in parameters_of(cls).named.items() if p.default is p.empty]
        missing = [name for name in needed if name not in entries(node)]
        if missing:
            needs = f"the argument{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
            self.findings.add(
                named_at,
                f"{dotted(place)} ({cls.__name__}) needs {needs}: give it in the file under init_args, "
                f"or --{dotted((*place, missing[0]))} VALUE.",
            )
        return ClassSpec(cls, arguments, source, dotted(place), sources_of(node))

    def arguments(self, node: Node | None, cls: type, place: KeyPath) -> dict[str, Any]:
        """Return the values given to a class as a mapping, checked; names that it does not take are problems."""
        who = f"{dotted(place)} ({cls.__name__})" if place != ("trainer",) else "trainer"
        parameters = parameters_of(cls)
        values = {}
        for name, child in entries(node).items():
            if name in parameters.named:
                values[name] = self.value(child, parameters.named[name].annotation, (*place, name))
            elif parameters.open:
                values[name] = child.plain()
            else:
                self.findings.add(
                    child.source, f"{who} has no argument {name!r}.{hint_for(str(name), parameters, cls)}"
                )
        return values

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, node: Node, annotation: Any, place: KeyPath) -> Any:
        """Return a value as its annotation wants it, with specs for objects; `INVALID` when it does not fit."""
        objects, items = tuple(objects_in(annotation)), items_of(annotation)
        if isinstance(node.value, dict) and objects:
            structured = next((cls for cls in objects if dataclasses.is_dataclass(cls)), None)
            if "class_path" in node.value or (structured is None and not takes_mapping(annotation)):
                node.value = canonical_class(node, place, self.findings).value
                return self.class_spec(node, objects, place) or INVALID
            if structured is not None:
                return self.spec_of(structured, node, place, node.source, node.source)
        if isinstance(node.value, list) and items is not None:
            return [self.value(item, items, (*place, index)) for index, item in enumerate(node.value)]
        try:
            value = validate(node.plain(), annotation)
        except TypeMismatchError as mismatch:
            value = self.coerce(node, annotation, place, mismatch)
        if isinstance(value, Path):
            node.value = str(value.absolute())
        return value

    def coerce(self, node: Node, annotation: Any, place: KeyPath, mismatch: TypeMismatchError) -> Any:
        """Return the class that a text names, or what was typed as text; if it is neither, report the mismatch."""
        objects, classes = tuple(objects_in(annotation)), tuple(classes_in(annotation))
        if isinstance(node.value, str) and objects:
            node.value = {"class_path": Node(node.value, node.source, node.text)}
            return self.class_spec(node, objects, place) or INVALID
        if isinstance(node.value, str) and classes:
            try:
                found = find_class(node.value, classes, {}, node.source)
            except ConfigError as error:
                self.findings.add(node.source, f"{dotted(place)}: {error}")
                return INVALID
            node.value = found.name
            return found.cls
        if node.text is not None and not isinstance(node.value, (dict, list)):
            with suppress(TypeMismatchError):
                value = validate(node.text, annotation)
                node.value = node.text
                return value
        part, inner = node, place  # the part that does not fit
        for step in mismatch.path:
            children: dict[Any, Node] = dict(enumerate(part.value)) if isinstance(part.value, list) else entries(part)
            if step in children:  # others are the names of union members
                part, inner = children[step], (*inner, step)
        inside = f" in {dotted(place)}" if inner != place else ""
        self.findings.add(
            part.source,
            f"{dotted(inner)}: given {repr_value(part)}{in_words(part.value)}, "
            f"allowed{inside}: {allowed(annotation, object_in_words)}.{quotes_hint(node, annotation)}",
        )
        return INVALID


def table_of(bases: tuple[type, ...]) -> dict[str, type]:
    """Return the short names for classes of these kinds."""
    table: dict[str, type] = {}
    if Strategy in bases:
        table.update(available_strategies())
    for base in (Callback, Logger):
        if base in bases:
            table.update({name: cls for name, cls in available_callbacks().items() if issubclass(cls, base)})
    return table


def entries(node: Node | None) -> dict[Any, Node]:
    """Return the entries of a mapping; none for anything else."""
    return node.value if node is not None and isinstance(node.value, dict) else {}


def sources_of(node: Node | None) -> dict[Any, Source]:
    """Return the source of each entry of a mapping."""
    return {name: child.source for name, child in entries(node).items()}


def has_spec(value: Any) -> bool:
    """Whether an object is still to be made for this value (or it is an invalid one)."""
    return value is INVALID or isinstance(value, ClassSpec) or (isinstance(value, list) and any(map(has_spec, value)))


def hint_for(name: str, parameters: Parameters, cls: type) -> str:
    """Return a suggestion for an argument that does not exist; without a close one, those that do."""
    known = sorted(parameters.named)
    equivalents = LIGHTNING_EQUIVALENTS if cls is Trainer else None
    close = did_you_mean(name, [*known, "class_path", "init_args"], equivalents)
    if close or not known:
        return close or " It takes none."
    return f" It takes: {', '.join(known)}." if len(known) <= 12 else " See trainer fit --help."


def object_in_words(cls: type) -> str:
    """Return how a message describes an object of a class."""
    if dataclasses.is_dataclass(cls):
        return f"a mapping ({', '.join(field.name for field in dataclasses.fields(cls))})"
    return f"a {cls.__name__} (class_path and init_args)"


def quotes_hint(node: Node, annotation: Any) -> str:
    """Return what to type where quotes make the difference."""
    if node.text is None and isinstance(node.value, str) and reads_as_number(node.value):
        return " Remove the quotes."
    if node.text is None and type(node.value) in (int, float) and str in options_of(annotation):
        return " Put it in quotes."
    return ""


def in_words(value: Any) -> str:
    """Return the type of a value where its look does not tell: " (text)" and the like."""
    if isinstance(value, str):
        return " (text)"
    return " (a mapping)" if isinstance(value, dict) else ""
