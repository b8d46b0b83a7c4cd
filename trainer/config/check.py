"""A walk over a configuration: every value against the signature that takes it, all problems kept."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.callback import Callback, Logger, available_callbacks
from trainer.config.classes import find_class, one_line_error
from trainer.config.tree import Diagnostics, KeyPath, Node, Problem, Source, canonical_class, dotted, shown
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
from trainer.strategy import Strategy, available_strategies

INVALID = object()
"""Stands for a value that was found wrong."""


class ClassSpecError(ConfigError):
    """A constructor refused its arguments, or failed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass
class ClassSpec:
    """A class with arguments that fit its signature; among them may be other recipes."""

    cls: type
    arguments: dict[str, Any]
    source: Source
    place: str
    sources: dict[str, Source] = field(default_factory=dict)
    """Where each argument was given."""

    def build(self) -> Any:
        """The object.

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
    """A value with the recipes in it carried out."""
    if isinstance(value, ClassSpec):
        return value.build()
    if isinstance(value, list):
        return [instantiate(item) for item in value]
    return value


def with_source(message: str, sources: Mapping[str, Source]) -> list[Problem]:
    """The problems in an error of the trainer's, each with the place where the argument that it names was given."""
    problems = [message]
    if re.match(r"\d+ problems in ", message):
        problems = [line.removeprefix("  - ") for line in message.splitlines()[1:]]
    found = []
    for problem in problems:
        names = [name for name in re.findall(r"\w+", problem) if name in sources]
        if names:
            joint = "." if problem.startswith(names[0]) else ": "
            found.append(Problem(sources[names[0]], f"trainer{joint}{problem}"))
        else:
            found.append(Problem(None, problem))
    return found


class Checker:
    """Values against annotations, arguments against signatures. What is wrong goes to `findings`."""

    def __init__(self, findings: Diagnostics) -> None:
        self.findings = findings

    def recipe(self, node: Node, bases: tuple[type, ...], place: KeyPath) -> ClassSpec | None:
        """A choice of class in canonical form; None when something is wrong with it or its arguments."""
        where = dotted(place)
        name = node.value.get("class_path") if isinstance(node.value, dict) else None
        if name is None or not isinstance(name.value, str):
            table = table_of(bases)
            arguments = entries(entries(node).get("init_args"))
            example = next((key for key in arguments if key in table), next(iter(table), "package.module.Class"))
            given = "no class_path" if isinstance(node.value, dict) and name is None else shown(name or node)
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
        nested = entries(node).get("init_args")
        arguments = self.arguments(nested, found.cls, place)
        self.missing(name, entries(nested), found.cls, place)
        return ClassSpec(found.cls, arguments, node.source, where, sources_of(nested))

    def arguments(self, node: Node | None, cls: type, place: KeyPath, leave: Collection[str] = ()) -> dict[str, Any]:
        """The values given to a class as a mapping, checked; unknown and missing names are problems.

        Args:
            leave: names that are looked at elsewhere.
        """
        who = f"{dotted(place)} ({cls.__name__})" if place != ("trainer",) else "trainer"
        parameters = parameters_of(cls)
        values = {}
        for name, child in entries(node).items():
            if name in leave:
                continue
            if name in parameters.named:
                values[name] = self.value(child, parameters.named[name].annotation, (*place, name))
            elif parameters.open:
                values[name] = child.plain()
            else:
                self.findings.add(child.source, f"{who} has no argument {name!r}.{did_you_mean_one(name, parameters)}")
        return values

    def missing(self, node: Node, given: Collection[Any], cls: type, place: KeyPath) -> None:
        """Report the arguments that a class cannot do without."""
        names = [name for name, p in parameters_of(cls).named.items() if p.required and name not in given]
        if names:
            needs = f"the argument{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"
            self.findings.add(
                node.source,
                f"{dotted(place)} ({cls.__name__}) needs {needs}: give it in the file under init_args, "
                f"or --{dotted((*place, names[0]))} VALUE.",
            )

    # -- values -------------------------------------------------------------------------------------------------------

    def value(self, node: Node, annotation: Any, place: KeyPath) -> Any:
        """A value, as its annotation wants it, with recipes for objects; `INVALID` when it does not fit."""
        objects, items = tuple(objects_in(annotation)), items_of(annotation)
        if isinstance(node.value, dict) and objects:
            structured = next((cls for cls in objects if dataclasses.is_dataclass(cls)), None)
            if "class_path" in node.value or (structured is None and not takes_mapping(annotation)):
                node.value = canonical_class(node, place, self.findings).value
                return self.recipe(node, objects, place) or INVALID
            if structured is not None:
                self.missing(node, node.value, structured, place)
                arguments = self.arguments(node, structured, place)
                return ClassSpec(structured, arguments, node.source, dotted(place), sources_of(node))
        if isinstance(node.value, list) and items is not None:
            return [self.value(item, items, (*place, index)) for index, item in enumerate(node.value)]
        try:
            value = validate(node.plain(), annotation)
        except TypeMismatchError as misfit:
            value = self.coerce(node, annotation, place)
            if value is None:  # BAD has been reported
                self.misfit(node, annotation, place, misfit)
                return INVALID
        if isinstance(value, Path):
            node.value = str(value.absolute())
        return value

    def coerce(self, node: Node, annotation: Any, place: KeyPath) -> Any:
        """Text that does not fit may name a class; what the command line's YAML made a number may be meant as text.

        None: neither. `INVALID`: a class that cannot be used, which is reported.
        """
        objects, classes = tuple(objects_in(annotation)), tuple(classes_in(annotation))
        if isinstance(node.value, str) and objects:
            long = canonical_class(Node(node.value, node.source, node.text), place, self.findings)
            recipe = self.recipe(long, objects, place)
            node.value = long.value
            return recipe or INVALID
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
        return None

    def misfit(self, node: Node, annotation: Any, place: KeyPath, misfit: TypeMismatchError) -> None:
        """Report a value that does not fit, at the line of the part that is wrong."""
        part, inner = node, place
        for step in misfit.path:
            children: dict[Any, Node] = dict(enumerate(part.value)) if isinstance(part.value, list) else entries(part)
            if step in children:  # others are the names of union members
                part, inner = children[step], (*inner, step)
        inside = f" in {dotted(place)}" if inner != place else ""
        quoted = isinstance(node.value, str) and node.text is None and reads_as_number(node.value)
        fix = " Remove the quotes." if quoted else ""
        if type(node.value) in (int, float) and node.text is None and str in options_of(annotation):
            fix = " Put it in quotes."
        self.findings.add(
            part.source,
            f"{dotted(inner)}: given {shown(part)}{in_words(part.value)}, "
            f"allowed{inside}: {allowed(annotation, object_in_words)}.{fix}",
        )


def table_of(bases: tuple[type, ...]) -> dict[str, type]:
    """The short names for classes of these kinds."""
    table: dict[str, type] = {}
    if Strategy in bases:
        table.update(available_strategies())
    for base in (Callback, Logger):
        if base in bases:
            table.update({name: cls for name, cls in available_callbacks().items() if issubclass(cls, base)})
    return table


def entries(node: Node | None) -> dict[Any, Node]:
    """The entries of a mapping; none for anything else."""
    return node.value if node is not None and isinstance(node.value, dict) else {}


def sources_of(node: Node | None) -> dict[Any, Source]:
    """Where each entry of a mapping stands."""
    return {name: child.source for name, child in entries(node).items()}


def has_recipe(value: Any) -> bool:
    """Whether an object is still to be built for this value (or it is a bad one)."""
    return value is INVALID or isinstance(value, ClassSpec) or (isinstance(value, list) and any(map(has_recipe, value)))


def did_you_mean_one(name: Any, parameters: Parameters) -> str:
    """A suggestion for an argument that does not exist; without a close one, those that do."""
    known = sorted(parameters.named)
    close = did_you_mean(str(name), [*known, "class_path", "init_args"])
    if close or not known:
        return close or " It takes none."
    return f" It takes: {', '.join(known)}." if len(known) <= 12 else " See trainer fit --help."


def object_in_words(cls: type) -> str:
    """How an object of a class is described where values are listed."""
    if dataclasses.is_dataclass(cls):
        return f"a mapping ({', '.join(field.name for field in dataclasses.fields(cls))})"
    return f"a {cls.__name__} (class_path and init_args)"


def in_words(value: Any) -> str:
    """The type of a value where its look does not tell: " (text)" and the like."""
    if isinstance(value, str):
        return " (text)"
    return " (a mapping)" if isinstance(value, dict) else ""
