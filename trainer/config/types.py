"""Match values from files with the annotations of parameters, and put annotations into words."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import Never

LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclass(frozen=True)
class Parameters:
    """The arguments of a class."""

    named: dict[str, inspect.Parameter]
    """Their annotations are evaluated; what has none, or one that cannot be evaluated, is `Any`."""
    open: bool
    """It takes **kwargs: any name may be given."""


class TypeMismatchError(Exception):
    """A value does not fit; `path` leads to the part of it that does not."""

    def __init__(self, path: tuple[str | int, ...]) -> None:
        super().__init__(path)
        self.path = path


def parameters_of(cls: type) -> Parameters:
    """Return the arguments that a class takes by name."""
    hints = _hints(cls)
    named = {}
    takes_more = False
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_more = hints.get(name) is not Never
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            named[name] = parameter.replace(annotation=hints.get(name, Any))
    return Parameters(named, takes_more)


def _hints(cls: type) -> dict[str, Any]:
    constructor: Any = cls.__init__  # type: ignore[misc]  # of this very class
    try:
        return get_type_hints(constructor, include_extras=True)
    except Exception:  # a name known to type checkers only: take the annotations one by one
        hints = {}
        names = {**vars(sys.modules[cls.__module__]), cls.__name__: cls}
        for name, annotation in getattr(constructor, "__annotations__", {}).items():
            try:
                hints[name] = eval(annotation, names) if isinstance(annotation, str) else annotation
            except Exception:
                hints[name] = Any
        return hints


def options_of(annotation: Any) -> list[Any]:
    """Return the members of a union, or the annotation itself; `Annotated` and aliases are resolved."""
    if get_origin(annotation) is Annotated:
        return options_of(get_args(annotation)[0])
    if type(annotation).__name__ == "TypeAliasType":  # `type X = ...`
        return options_of(annotation.__value__)
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for member in get_args(annotation) for option in options_of(member)]
    return [annotation]


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

    Types are not guessed: 2.5 or "3" is no int, true is no number.

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


WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    set: "a list",
    Any: "anything",
    Path: "a path",
}


def allowed(annotation: Any) -> str:
    """Return an annotation in words."""
    words = [_word(option) for option in options_of(annotation)]
    if "an integer" in words and "a number" in words:
        words.remove("an integer")
    unique = list(dict.fromkeys(words))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"


def _word(option: Any) -> str:
    origin, arguments = get_origin(option), get_args(option)
    if option in WORDS:
        return WORDS[option]
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in arguments)
    if origin in (*LISTS, tuple, set, frozenset):
        inner = ", ".join(_plural(argument) for argument in arguments if argument is not ...)
        return f"a list of {inner}" if inner else "a list"
    if origin in MAPPINGS and len(arguments) == 2:
        return f"a mapping of {_plural(arguments[0])} to {_plural(arguments[1])}"
    if origin is type:
        return f"the path of a class ({', '.join(base.__name__ for base in arguments)})"
    if option is Callable or origin is collections.abc.Callable:
        return "a callable (which no file can hold: set it in Python)"
    if origin is not None:
        return str(option).replace("typing.", "")
    if isinstance(option, type) and issubclass(option, enum.Enum):
        return " or ".join(json.dumps(member.value, default=str) for member in option)
    if dataclasses.is_dataclass(option):
        return f"a mapping ({', '.join(field.name for field in dataclasses.fields(option))})"
    if isinstance(option, type):
        return f"a {option.__name__}{' (class_path and init_args)' if is_object(option) else ''}"
    return str(option).replace("typing.", "")


def _plural(annotation: Any) -> str:
    plurals = {int: "integers", float: "numbers", str: "texts", bool: "true or false"}
    if annotation in plurals:
        return plurals[annotation]
    return allowed(annotation).removeprefix("a ").removeprefix("an ")


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
