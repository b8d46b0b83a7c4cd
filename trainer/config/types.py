"""Match values from configuration files with the annotations of parameters."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from os import PathLike
from types import NoneType
from typing import Any, Literal, Never, Optional, Protocol, get_args, get_origin, is_typeddict

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from trainer.arguments import (
    LISTS,
    MAPPINGS,
    PYTHON,
    ChecksArguments,
    TypeNames,
    describe_annotation,
    hints_of,
    options_of,
)
from trainer.config.classes import is_subclass

SCALARS = (bool, int, float, NoneType)
NO_ADAPTER = (PydanticUserError, SchemaError)
"""The errors of pydantic for an annotation that it cannot check."""


@dataclass(frozen=True)
class Parameters:
    """The arguments of a class."""

    named: dict[str, inspect.Parameter]
    """Parameters with evaluated annotations: `Any` for one that is missing or cannot be evaluated."""
    open: bool
    """True if there are **kwargs, so that any name may be given."""


class TypeMismatchError(Exception):
    """A value does not fit; `path` leads to the wrong part, and `reason`, in brackets, may be pydantic's."""

    def __init__(self, path: tuple[str | int, ...] = (), reason: str = "") -> None:
        super().__init__(path)
        self.path, self.reason = path, reason


def constructor_parameters(made_by: Callable[..., Any]) -> Parameters:
    """Return the arguments that a class, or a function, takes by name.

    With `**kwargs`, the arguments of the next constructor are included, and none of these is required:
    its default is `...` if it has none, since the constructor may give it.
    """
    of: Any = made_by
    if isinstance(made_by, type):
        of = made_by.__init__  # type: ignore[misc]
    hints = hints_of(of, made_by)
    named = {}
    takes_more = False
    for name, parameter in _parameters(made_by).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_more = hints.get(name) is not Never
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            hint = hints.get(name, Any)
            hint = hint.type if isinstance(hint, dataclasses.InitVar) else hint
            can_be_null = parameter.default is None and hint is not Any  # though people leave that out
            named[name] = parameter.replace(annotation=Optional[hint] if can_be_null else hint)  # noqa: UP045
    if not takes_more or not isinstance(made_by, type):
        return Parameters(named, takes_more)
    following = [cls for cls in made_by.__mro__ if "__init__" in vars(cls)][1]
    for name, parameter in constructor_parameters(following).named.items():
        is_asked_for = parameter.default is parameter.empty
        named.setdefault(name, parameter.replace(default=...) if is_asked_for else parameter)
    return Parameters(named, takes_more)


def _parameters(made_by: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    if is_subclass(made_by, ChecksArguments):  # whose `__new__` takes anything
        own: Any = made_by.__init__
        return {} if own is object.__init__ else dict([*inspect.signature(own).parameters.items()][1:])
    try:
        return dict(inspect.signature(made_by).parameters)
    except ValueError:  # one of torch's own functions in C
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


@dataclass
class Forms:
    """The members of a union, sorted by what a file writes for their values."""

    objects: list[type] = field(default_factory=list)
    """Classes whose objects are written by class_path and init_args, or as a dataclass; for a protocol `object`."""
    calls: list[Any] = field(default_factory=list)
    """`Callable` and `Callable[..., X]`, which also stand for protocols for calls."""
    classes: list[type] = field(default_factory=list)
    """The bases `X` of `type[X]`."""
    lists: list[Any] = field(default_factory=list)
    """Lists and the like with a type for their items."""
    mappings: list[Any] = field(default_factory=list)
    """Mappings with types, and typed dicts."""
    takes_mapping: bool = False
    """A plain mapping fits one of the members."""


def forms_of(annotation: Any) -> Forms:
    """Return the forms that a file may use for the values of an annotation."""
    found = Forms()
    for option in options_of(annotation):
        kind, arguments = kind_of(option), get_args(option)
        found.takes_mapping |= kind in (*MAPPINGS, Any)
        if is_typeddict(option) or (kind in MAPPINGS and arguments):
            found.mappings.append(option)
        elif kind in LISTS and arguments:
            found.lists.append(option)
        elif kind is Callable:
            found.calls.append(option)
        elif kind is type:
            bases = options_of(arguments[0] if arguments else Any)
            found.classes += [object if base is Any or is_protocol(base) else base for base in bases]
        elif is_protocol(kind):
            found.objects.append(object)
            if makes_callables(kind):
                found.calls.append(Callable[..., hints_of(kind.__call__, kind).get("return", Any)])
        elif isinstance(kind, type) and is_object(kind):
            found.objects.append(kind)
    return found


def kind_of(option: Any) -> Any:
    """Return the class of a generic annotation, such as list for `list[int]`; others unchanged."""
    return get_origin(option) or option


def is_protocol(cls: Any) -> bool:
    """Whether a class is a protocol, which objects need not be derived from."""
    return isinstance(cls, type) and Protocol in cls.__bases__


def makes_callables(cls: type) -> bool:
    """Whether objects of a class can be called."""
    return any("__call__" in vars(one) for one in cls.__mro__)


def is_structured(cls: Any) -> bool:
    """Whether a mapping of arguments stands for an object of a class: a dataclass, or a class of attrs."""
    return dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__")


@cache
def is_object(cls: type) -> bool:
    """Whether a file cannot hold values of a class directly, as it holds numbers, text, paths, enums..."""
    if is_structured(cls):
        return True
    with suppress(*NO_ADAPTER):
        TypeAdapter(cls)
        return False
    return not is_typeddict(cls)


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    with suppress(*NO_ADAPTER):
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    with suppress(*NO_ADAPTER):  # a model or typed dict brings its own configuration
        return TypeAdapter(annotation)
    return None


def validate(value: Any, annotation: Any) -> Any:
    """Return the value as the annotation wants it, for example a tuple for a list, a float for 1.

    Types are not guessed: 2.5 or "3" is not an int, true is not a number.

    Raises:
        TypeMismatchError: it does not fit.
    """
    try:
        adapter = _adapter(annotation)
    except TypeError:  # not hashable
        adapter = _adapter.__wrapped__(annotation)
    if adapter is None:
        return _without_adapter(value, annotation)
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError:
        pass
    try:  # tuples, paths, enums, which JSON lacks, may be written as a list or text
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        known = first["type"].endswith(("_type", "_parsing", "literal_error", "enum", "_of", "needs_python_object"))
        raise TypeMismatchError(first["loc"], "" if known else f" ({first['msg']})") from None


def _without_adapter(value: Any, annotation: Any) -> Any:
    """Return a value of an annotation that pydantic cannot check as a whole, as with a TypedDict before Python 3.12."""
    options = options_of(annotation)
    if len(options) == 1:
        kind = dict if is_typeddict(annotation) else kind_of(annotation)
        if is_protocol(kind):
            fits = not isinstance(value, (*SCALARS, str, list, dict))
        else:
            fits = not isinstance(kind, type) or isinstance(value, kind)
        if not fits:
            raise TypeMismatchError
        return value
    for option in options:
        with suppress(TypeMismatchError):
            return validate(value, option)
    raise TypeMismatchError


def _is_text(option: Any) -> bool:
    kind = kind_of(option)
    return is_subclass(kind, (str, PathLike)) and not issubclass(kind, enum.Enum)


def wants_text(value: Any, annotation: Any) -> bool:
    """Whether a value that was read from a text is to be that text: it may be, and fits no other of a union."""
    others = [option for option in options_of(annotation) if not _is_text(option)]
    if len(others) == len(options_of(annotation)):
        return False
    if isinstance(value, (dict, list)):
        plain = (*SCALARS, Literal, *(LISTS if isinstance(value, dict) else MAPPINGS))
        return all(kind_of(option) in plain for option in others)
    return isinstance(value, str) or not any(accepts(value, option) for option in others)


def member_named(text: str, annotation: Any) -> enum.Enum | None:
    """Return the member of an enumeration with this name, as LightningCLI writes them, where no value is like that."""
    for option in options_of(annotation):
        if is_subclass(option, enum.Enum) and text in option.__members__:
            return None if accepts(text, annotation) else option[text]
    return None


def as_written(member: enum.Enum) -> Any:
    """Return what stands for a member of an enumeration in a file: its value, or its name where no file holds that."""
    return member.value if isinstance(member.value, (*SCALARS, str)) else member.name


def accepts(value: Any, annotation: Any) -> bool:
    """Whether a value fits an annotation."""
    try:
        validate(value, annotation)
    except TypeMismatchError:
        return False
    return True


def allowed(annotation: Any) -> str:
    """Return an annotation in the words of configuration files."""
    return describe_annotation(annotation, _FILES)


def _describe_object(option: Any) -> str:
    if not isinstance(option, type):
        return str(option).replace("typing.", "")
    if option.__module__ == "torch" and option.__name__ in ("dtype", "device"):
        return f"the name of a torch.{option.__name__}"
    path = " (class_path and init_args)" if is_object(option) else ""
    if issubclass(option, enum.Enum):
        return " or ".join(json.dumps(as_written(member)) for member in option)
    if is_structured(option):
        return f"a mapping ({', '.join(constructor_parameters(option).named)})"
    return f"a {option.__name__}{path}"


_FILES = TypeNames(
    {
        **PYTHON.types,
        bool: "true or false",
        NoneType: "null",
        type: "the path of a class",
        timedelta: "a time such as 1:30:00 or P1DT2H",
        Callable: "a callable (which no file can hold: set it in Python)",
        **dict.fromkeys(MAPPINGS, "a mapping"),
    },
    lambda one: (
        json.dumps(one) if type(one) in (*SCALARS, str) else f"{one} (which no file can hold: set it in Python)"
    ),
    _describe_object,
)
