"""Descriptions of objects that are made later: a class with its arguments, and a value of the data's object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

from trainer.arguments import with_python_numbers
from trainer.config.classes import one_line_error
from trainer.config.tree import Node, OfData, Problem, Source, children_of, mapped, named_source
from trainer.config.types import TypeMismatchError, allowed, constructor_parameters, validate
from trainer.errors import ConfigError, TrainerError
from trainer.hyperparameters import construct

INVALID = object()
"""Placeholder of a value that does not fit."""


@dataclass
class ClassSpec:
    """A class, or a function, with arguments that fit its signature; among them may be other specs."""

    cls: Any
    arguments: dict[str, Any]
    source: Source
    path: str
    nodes: dict[str, Node] = field(default_factory=dict)
    """The node of each argument."""
    provided: Sequence[str] = ()
    """Arguments that no file can hold, such as an optimizer's parameters."""
    bases: tuple[type, ...] = (object,)
    """The object has to be an instance of one of these classes."""
    is_factory: bool = False
    """True where a function that makes such objects is wanted."""
    complete: Callable[..., None] | None = None
    """A function that completes the object; it also gets the values that no file can hold."""
    from_checkpoint: bool = False
    """True where the arguments are a checkpoint's, among which are those that are taken by position alone."""

    def __repr__(self) -> str:
        return f"{self.cls.__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def build(self, **provided: Any) -> Any:
        """Return the object.

        Args:
            provided: the values of arguments that no file can hold.

        Raises:
            ConfigError: the constructor refused its arguments, or failed: says what, and where in the user's code.
        """
        arguments = {name: value for name, value in provided.items() if name in self.provided}
        arguments |= {name: instantiate(value, **provided) for name, value in self.arguments.items()}
        if self.is_factory:
            return partial(self.cls, **arguments) if arguments else self.cls
        try:
            made = construct(self.cls, arguments) if self.from_checkpoint else self.cls(**arguments)
            if not isinstance(made, self.bases):
                wanted = " or ".join(base.__name__ for base in self.bases)
                raise TypeError(f"it returned a {type(made).__name__}, not a {wanted}")
        except TrainerError as error:
            source = named_source(str(error), {name: node.source for name, node in self.nodes.items()}) or self.source
            raise ConfigError(str(Problem(source, f"{self.path}: {error}"))) from error
        except Exception as error:
            message = f"{self.path}: making {self.cls.__qualname__} failed: {one_line_error(error)}"
            raise ConfigError(str(Problem(self.source, message))) from error
        if self.complete is not None:
            self.complete(made, **provided)
        return made


@dataclass
class ValueOfData:
    """A value that refers to attributes of the data module's object."""

    node: Node
    annotation: Any
    path: str
    data: Callable[[], Any]
    """Returns a data module, for those who make the module alone."""

    def __repr__(self) -> str:
        return str(reference_to_data(self.node))

    def build(self, **provided: Any) -> Any:
        """Return the value; `data` among the provided ones returns the object in place of the field.

        Raises:
            ConfigError: the object has no such attribute, or its value does not fit.
        """
        data = provided.get("data", self.data)()
        value = mapped(self.node.plain(), lambda one: self._attribute(one, data) if isinstance(one, OfData) else one)
        try:
            return validate(with_python_numbers(value), self.annotation)
        except (TypeMismatchError, TypeError):
            given = f"{self} is {value!r}, allowed: {allowed(self.annotation)}."
            raise ConfigError(str(Problem(self.node.source, f"{self.path}: {given}"))) from None

    def _attribute(self, reference: OfData, data: Any) -> Any:
        name = reference.removeprefix("${data.").removesuffix("}")
        parameter = constructor_parameters(type(data)).named.get(name)
        try:
            return attrgetter(name)(data)
        except Exception as error:
            if parameter is not None and not hasattr(data, name):  # an argument that is not given and not kept
                return parameter.default
            message = f"{self.path}: {reference}: {one_line_error(error)}."
            raise ConfigError(str(Problem(self.node.source, message))) from error


def instantiate(value: Any, **provided: Any) -> Any:
    """Return a value with the objects that its specs describe; `provided` as in `ClassSpec.build`."""
    if isinstance(value, (ClassSpec, ValueOfData)):
        return value.build(**provided)
    if type(value) in (list, tuple):
        return type(value)(instantiate(item, **provided) for item in value)
    return {key: instantiate(item, **provided) for key, item in value.items()} if type(value) is dict else value


def has_spec(value: Any) -> bool:
    """Whether an object is still to be made for this value (or it is an invalid one)."""
    inside = [*value, *value.values()] if type(value) is dict else value if type(value) in (list, tuple) else ()
    return value is INVALID or isinstance(value, (ClassSpec, ValueOfData)) or any(map(has_spec, inside))


def reference_to_data(node: Node) -> OfData | None:
    """Return the first reference to an attribute of the data in a value; None where there is none."""
    if isinstance(node.value, OfData):
        return node.value
    return next(filter(None, map(reference_to_data, children_of(node).values())), None)
