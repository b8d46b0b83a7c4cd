"""Match values from configuration files with the annotations of parameters."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from os import PathLike
from pathlib import Path, PurePath
from types import NoneType
from typing import Any, Literal, Never, get_args, get_origin

from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from trainer.arguments import LISTS, MAPPINGS, PYTHON, TypeNames, describe_annotation, hints_of, options_of

TEXTS = (str, Path, PurePath, PathLike)
SCALARS = (bool, int, float, NoneType)


@dataclass(frozen=True)
class Parameters:
    """The arguments of a class."""

    named: dict[str, inspect.Parameter]
    """Parameters with evaluated annotations: `Any` for one that is missing or cannot be evaluated."""
    open: bool
    """True if there are **kwargs, so that any name may be given."""


class TypeMismatchError(Exception):
    """A value does not fit; `path` leads to the part of it that does not."""

    def __init__(self, path: tuple[str | int, ...]) -> None:
        super().__init__(path)
        self.path = path


def constructor_parameters(cls: type) -> Parameters:
    """Return the arguments that a class takes by name."""
    constructor: Any = cls.__init__  # type: ignore[misc]  # of this very class
    hints = hints_of(constructor, cls)
    named = {}
    takes_more = False
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_more = hints.get(name) is not Never
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            named[name] = parameter.replace(annotation=hints.get(name, Any))
    return Parameters(named, takes_more)


def objects_in(annotation: Any) -> list[type]:
    """Return the classes of a union whose objects a file describes by class_path and init_args, or as a dataclass."""
    return [option for option in options_of(annotation) if isinstance(option, type) and is_object(option)]


def items_of(annotation: Any) -> Any:
    """Return the annotation of the items where a union has a list of objects; else None."""
    for option in options_of(annotation):
        if get_origin(option) in LISTS and get_args(option) and objects_in(get_args(option)[0]):
            return get_args(option)[0]
    return None


def classes_in(annotation: Any) -> list[type]:
    """Return the bases `X` of the members `type[X]` of a union."""
    found = []
    for option in options_of(annotation):
        if get_origin(option) is type:
            found += [base for base in options_of(get_args(option)[0]) if isinstance(base, type)]
    return found


@cache
def is_object(cls: type) -> bool:
    """Whether a file cannot hold values of a class as they are, as it does numbers, text, paths, enums..."""
    if dataclasses.is_dataclass(cls):
        return True
    if get_origin(cls) is not None or issubclass(cls, enum.Enum):
        return False
    try:
        TypeAdapter(cls)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return True
    return False


def validate(value: Any, annotation: Any) -> Any:
    """Return the value as the annotation wants it, for example a tuple for a list, a float for 1.

    Types are not guessed: 2.5 or "3" is not an int, true is not a number.

    Raises:
        TypeMismatchError: it does not fit.
    """
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:
        try:
            adapter = TypeAdapter(annotation)  # a model or typed dict brings its own configuration
        except PydanticUserError:
            return value
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError:
        pass
    try:  # what JSON has no type for (tuples, paths, enums) may be written as a list or text
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise TypeMismatchError(error.errors(include_url=False)[0]["loc"]) from None


def wants_text(value: Any, annotation: Any) -> bool:
    """Whether a value that was read from a text is to be that text: it may be, and fits no other of a union."""
    others = [option for option in options_of(annotation) if option not in TEXTS]
    if len(others) == len(options_of(annotation)):
        return False
    if isinstance(value, (dict, list)):
        plain = (*SCALARS, Literal, *(LISTS if isinstance(value, dict) else MAPPINGS))
        return all((get_origin(option) or option) in plain for option in others)
    return isinstance(value, str) or not any(_fits(value, option) for option in others)


def _fits(value: Any, option: Any) -> bool:
    try:
        validate(value, option)
    except TypeMismatchError:
        return False
    return True


def item_annotations(value: Any, annotation: Any) -> list[Any]:
    """Return the annotation of each item of a list, or of each value of a mapping; `Any` where there are several."""
    kinds = (*LISTS, tuple) if isinstance(value, list) else MAPPINGS
    found = [get_args(option) for option in options_of(annotation) if get_origin(option) in kinds]
    arguments: tuple[Any, ...] = found[0] if len(found) == 1 else ()
    if isinstance(value, list) and len(arguments) == len(value) and ... not in arguments:
        return [*arguments]
    of_each = arguments[-1] if isinstance(value, dict) and arguments else arguments[0] if arguments else Any
    return [of_each] * len(value)


def allowed(annotation: Any) -> str:
    """Return an annotation in the words of configuration files."""
    return describe_annotation(annotation, _FILES)


def _describe_object(option: Any) -> str:
    if not isinstance(option, type) or get_origin(option) is not None:
        return str(option).replace("typing.", "")
    path = " (class_path and init_args)" if is_object(option) else ""
    if issubclass(option, enum.Enum):
        return " or ".join(json.dumps(member.value, default=str) for member in option)
    if dataclasses.is_dataclass(option):
        return f"a mapping ({', '.join(field.name for field in dataclasses.fields(option))})"
    return f"a {option.__name__}{path}"


_FILES = TypeNames(
    {
        **PYTHON.types,
        bool: "true or false",
        NoneType: "null",
        type: "the path of a class",
        Callable: "a callable (which no file can hold: set it in Python)",
        **dict.fromkeys(MAPPINGS, "a mapping"),
    },
    json.dumps,
    _describe_object,
)


def takes_mapping(annotation: Any) -> bool:
    """Whether a plain mapping fits one of the union's members."""
    return any((get_origin(option) or option) in (*MAPPINGS, Any) for option in options_of(annotation))


def reads_as_number(text: str) -> bool:
    """Whether a text would be a number without its quotes."""
    try:
        float(text)
    except ValueError:
        return False
    return True
