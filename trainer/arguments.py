"""Check the arguments of constructors against their annotations, describe annotations, and read paths.

Configuration files are checked by pydantic. It is not used here, because it takes 0.1 s to import, and either refuses
numpy's numbers and tuples in place of lists, or converts "3" to 3.
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import hashlib
import inspect
import numbers
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path, PurePath
from types import FunctionType, MethodType, NoneType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    NamedTuple,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from trainer.errors import ArgumentError, ConfigError, did_you_mean, raise_problems, shown
from trainer.names.misses import is_default, words_for

LISTS = (list, tuple, set, frozenset, Sequence, Iterable, Collection)
MAPPINGS = (dict, Mapping, MutableMapping)


_COMPARISONS = {"from": operator.ge, "above": operator.gt, "up to": operator.le}


@dataclass(frozen=True)
class Limit:
    """A bound of a number, for use in `Annotated`."""

    comparison: Literal["from", "above", "up to"]
    number: float

    def holds(self, value: Any) -> bool:
        """Return True if a number respects the bound."""
        return bool(_COMPARISONS[self.comparison](value, self.number))

    def __str__(self) -> str:
        return f"{self.comparison} {self.number:,}"


PositiveInt = Annotated[int, Limit("from", 1), Limit("up to", 2**31 - 1)]
NonNegativeInt = Annotated[int, Limit("from", 0), Limit("up to", 2**31 - 1)]
PositiveFloat = Annotated[float, Limit("above", 0), Limit("up to", 10**9)]
NonNegativeFloat = Annotated[float, Limit("from", 0)]


def defines(value: Any, *names: str) -> bool:
    """Return True if the class of a value has one of these methods, as Python looks them up for `iter` and the like.

    The value itself is not asked: its `__getattr__` may do anything, and a class has methods of its metaclass, too.
    """
    return any(name in vars(one) for one in type(value).__mro__ for name in names)


def whole_number(text: str) -> int | None:
    """Return the integer that a text of at most 18 decimal digits stands for; None for any other text."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


class ChecksArguments:
    """Base of classes whose constructors check the types of their arguments, if they belong to this package."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the class's own `__init__` to raise one ConfigError for all arguments that do not fit their annotations.

        The body of `__init__` may rely on the types of its arguments; numbers of other classes, such as numpy's,
        arrive as Python's.
        """
        super().__init_subclass__(**options)
        init: Any = vars(cls).get("__init__")
        if init is None or not cls.__module__.startswith("trainer."):
            return

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **options: Any) -> None:
            init(self, **(_checked_arguments(cls, init, args, options) if args or options else {}))

        cls.__init__ = checked  # type: ignore[method-assign]


def _checked_arguments(cls: type, init: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor by name.

    Raises:
        ArgumentError: an argument is unknown, or given twice, or there are too many.
        ConfigError: arguments do not fit their annotations.
    """
    kind, hints, given, problems = cls.__name__, hints_of(init, cls), {}, []
    parameters = dict([*inspect.signature(init).parameters.items()][1:])
    takes_others = inspect.Parameter.VAR_KEYWORD in [one.kind for one in parameters.values()]
    by_position = _by_position(kind, parameters, args, options) if args else {}
    for name, value in (by_position | options).items():
        if name not in parameters:
            if is_default(kind, name, value):
                continue  # an argument of Lightning's that changes nothing
            words = words_for(f"{kind}()", [name])
            if words or not takes_others:
                hint = did_you_mean(name, parameters, words)
                raise ArgumentError(f"{kind}() got an unexpected keyword argument {name!r}.{hint}")
        given[name] = value = with_python_numbers(value)
        if name in parameters and name in hints and not fits(value, hints[name]):
            problems.append(f"{kind}({name}={value!r}): give {describe_annotation(hints[name])}.")
    raise_problems(problems, f"{kind}'s arguments")
    return given


def _by_position(
    kind: str, parameters: Mapping[str, inspect.Parameter], args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments given by position with their names."""
    names = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    given = dict(zip(names, args, strict=False))
    if len(given) < len(args) or given.keys() & options.keys():
        raise ArgumentError(f"{kind}() takes ({', '.join(names)}) by position, each once: write name=value.")
    return given


def given_arguments(cls: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a class by name, or by number if the call is wrong (`__init__` refuses it)."""
    if not args and not options:
        return {}
    try:
        bound = inspect.signature(cls.__init__).bind(None, *args, **options)  # type: ignore[misc]
    except TypeError:
        return {str(number): value for number, value in enumerate(args)} | dict(options)
    return {name: with_python_numbers(value) for name, value in [*bound.arguments.items()][1:]}


def fingerprint_of_call(cls: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Return a fingerprint of a class and the arguments of its constructor, without defaults: equal in each process.

    Functions count by their names, lambdas by their code, objects by their class and, if it has no address, `repr`.
    """
    given = given_arguments(cls, args, options)
    if given:
        parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        defaults = {name: _fingerprint_text(one.default) for name, one in parameters.items()}
        given = {name: value for name, value in given.items() if _fingerprint_text(value) != defaults.get(name)}
    text = f"{cls.__qualname__}: {_fingerprint_text(given)}"
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _fingerprint_text(value: Any) -> str:
    if isinstance(value, PurePath):
        return repr(str(value))
    if type(value) in (list, tuple):  # a configuration has lists in place of tuples
        return f"[{', '.join(map(_fingerprint_text, value))}]"
    if type(value) in (set, frozenset):
        return f"{{{', '.join(sorted(map(_fingerprint_text, value)))}}}"
    if type(value) is dict:
        items = sorted(zip(map(_fingerprint_text, value), map(_fingerprint_text, value.values()), strict=True))
        return f"{{{', '.join(map(': '.join, items))}}}"
    if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
        code = value.__code__
        parts = code.co_code, code.co_names, _without_address(code.co_consts)
        return f"{value.__module__}.{value.__qualname__}{parts}"
    if isinstance(value, (type, FunctionType, MethodType)):
        return f"{value.__module__}.{value.__qualname__}"
    if type(value) in (NoneType, bool, int, float, str, bytes, timedelta):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}{_without_address(value)}"


def _without_address(value: Any) -> str:
    """Return the `repr` of a value, or nothing where it is another one in each process."""
    return "" if " at 0x" in repr(value) else repr(value)


def with_python_numbers(value: Any, depth: int = 3) -> Any:
    """Return numpy's numbers, fractions and members of enumerations of integers as int, float or bool.

    Numbers inside lists, tuples and dicts, down to `depth`, are converted in copies. Sequences and mappings of other
    classes, such as OmegaConf's, become lists and dicts. Other values are returned unchanged.
    """
    if depth < 0 or type(value) in (bool, int, float, str, NoneType):
        return value
    if isinstance(value, MutableSequence) and not isinstance(value, (list, bytearray)):
        value = list(value)
    if isinstance(value, MutableMapping) and not isinstance(value, dict):
        value = dict(value)
    if type(value) in (list, tuple):
        items = [with_python_numbers(item, depth - 1) for item in value]
        return value if all(map(operator.is_, items, value)) else type(value)(items)
    if type(value) is dict:
        pairs = [*value.items()]
        plain = with_python_numbers(pairs, depth + 1)
        return value if plain is pairs else dict(plain)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    is_numpy_bool = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    return bool(value) if is_numpy_bool else value


def number_of(argument: str, function: Callable[..., object], *args: Any) -> float:
    """Return the number that a user's function returns.

    Args:
        argument: the beginning of the call that gave the function, such as "SimpleProfiler(clock".

    Raises:
        ConfigError: the function raises an error, or returns something else.
    """
    try:
        number: Any = with_python_numbers(function(*args))
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"{argument}=...) raised {words}. Give a function that returns a number.") from error
    if not fits(number, float):
        raise ConfigError(f"{argument}=...) returned a {type(number).__name__}: give a function that returns a number.")
    return float(number)


@functools.cache
def hints_of(init: Any, cls: type, extras: bool = True) -> dict[str, Any]:
    """Return the evaluated annotations of a constructor by argument; `Any` for one that cannot be evaluated.

    Args:
        extras: with `Annotated`, and the like.
    """
    try:
        return get_type_hints(init, include_extras=extras)
    except Exception:  # a name known to type checkers only: take the annotations one by one
        hints = {}
        known = {**vars(builtins), **vars(typing), **vars(collections.abc), **vars(sys.modules[cls.__module__])}
        names = _UnknownAsAny({**known, cls.__name__: cls})
        for name, annotation in getattr(init, "__annotations__", {}).items():
            try:
                hints[name] = eval(annotation, {}, names) if isinstance(annotation, str) else annotation
            except Exception:
                hints[name] = Any
        return hints


class _UnknownAsAny(dict[str, Any]):
    """A namespace that answers every unknown name with `Any`."""

    def __missing__(self, name: str) -> Any:
        return Any


def options_of(annotation: Any, limits: bool = False) -> list[Any]:
    """Return the members of a union, or the annotation itself; aliases and new names of types are resolved.

    Args:
        limits: keep `Annotated` members unchanged, for their limits.
    """
    options, waiting = [], [annotation]
    while waiting:
        one = waiting.pop(0)
        members: list[Any] = []
        if type(one).__name__ == "TypeAliasType":  # `type X = ...`
            members = [one.__value__]
        elif isinstance(one, NewType):
            members = [one.__supertype__]
        elif isinstance(one, TypeVar):
            bounds = (one.__bound__, *one.__constraints__)
            members = [bound for bound in bounds if bound is not None and not isinstance(bound, ForwardRef)]
        elif get_origin(one) is Annotated and not limits:
            members = [get_args(one)[0]]
        elif get_origin(one) in (Union, types.UnionType):
            members = [*get_args(one)]
        waiting[:0] = members
        options += [] if members else [one]
    return options


# -- values ------------------------------------------------------------------------------------------------------------


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of an annotation's type. NaN and bools do not fit numbers; everything fits an unknown type."""
    return any(map(functools.partial(_fits, value), options_of(annotation, limits=True)))


def _fits(value: Any, option: Any) -> bool:
    kind, arguments = get_origin(option) or option, get_args(option)
    if kind is Annotated:
        return fits(value, arguments[0]) and all(one.holds(value) for one in arguments[1:] if isinstance(one, Limit))
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if arguments and kind in (*LISTS, *MAPPINGS):
        return _items_fit(value, kind, arguments)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and value == value
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def _items_fit(value: Any, kind: Any, arguments: tuple[Any, ...]) -> bool:
    if kind in MAPPINGS:
        keys, values = arguments
        return isinstance(value, Mapping) and all(fits(key, keys) and fits(value[key], values) for key in value)
    if not isinstance(value, _LIKE_LISTS):
        return False
    if kind is tuple and ... not in arguments:
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    return all(fits(one, arguments[0]) for one in value)


_LIKE_LISTS = (list, tuple, set, frozenset, range)


def flat_names(values: Mapping[Any, Any], separator: str = "/", prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings under names such as `optimizer/lr`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= flat_names(value, separator, name + separator) if isinstance(value, Mapping) else {name: value}
    return flat


def require_bool(argument: str, value: Any) -> None:
    """Raise a ConfigError for an argument that is not a bool, 0, 1 or None, such as "no", which would count as true."""
    if value not in (None, True, False):
        raise ConfigError(f"{argument}={shown(value)}: give True or False.")


# -- texts -------------------------------------------------------------------------------------------------------------


class TypeNames(NamedTuple):
    """The words for the types of annotations, in Python or in a configuration file."""

    types: Mapping[Any, str]
    literal: Callable[[Any], str]
    """Return a value of a Literal as a user types it."""
    others: Callable[[Any], str]
    """Return the words for a type that is not in `types`."""


PYTHON = TypeNames(
    {
        int: "an integer",
        float: "a number",
        bool: "True or False",
        str: "text",
        NoneType: "None",
        Any: "anything",
        Path: "a path",
        type: "a class",
        Callable: "a function",
        **dict.fromkeys(LISTS, "a list"),
        **dict.fromkeys(MAPPINGS, "a dict"),
    },
    repr,
    lambda option: f"a {getattr(option, '__name__', option)}",
)


def describe_annotation(annotation: Any, names: TypeNames = PYTHON) -> str:
    """Return a description of an annotation's values: "an integer from 1 or None", "a list (a number)"."""
    words = chain.from_iterable(_words_for(option, names) for option in options_of(annotation, limits=True))
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last


def _words_for(option: Any, names: TypeNames) -> list[str]:
    kind, arguments = get_origin(option) or option, get_args(option)
    if kind is Literal:
        return [*map(names.literal, arguments)]
    if kind is Annotated:
        remarks = [f"({one})" if isinstance(one, str) else str(one) for one in arguments[1:]]
        return [" ".join([describe_annotation(arguments[0], names), *remarks])]
    if kind not in names.types:
        return [names.others(option)]
    items: list[str] = []
    if kind in (*LISTS, *MAPPINGS):
        items = [describe_annotation(one, names) for one in arguments if one is not ...]
    elif kind is type:
        items = [getattr(base, "__name__", str(base)) for one in arguments for base in options_of(one)]
    return [f"{names.types[kind]} ({', '.join(items)})"] if items else names.types[kind].split(" or ")


# -- folders -----------------------------------------------------------------------------------------------------------


URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.:-]+):/(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
"""A URL, or what `Path` makes of one, without a slash; a path that begins so is written ./x:/y."""


def local_path(path: str | Path, argument: str = "") -> Path:
    """Return a user's path of this machine; `~` and `~user` at its start are home folders, and file:///x is /x.

    Args:
        argument: the name of the argument whose value the path is, for messages.

    Raises:
        ConfigError: the value is not a path, or is the URL of another place; a name in it is too long; or the user does
            not exist.
    """
    named = f"{argument}=" if argument else ""
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise ConfigError(f"{named}{path!r}: give a path of this machine as text, such as 'runs/first'.")
    url = URL.fullmatch(str(path))
    if url is not None and url["scheme"].lower() not in ("file", "local"):
        raise ConfigError(
            f"{named}{str(path)!r} is a URL: give a path of this machine. Only checkpoints go to a URL, with "
            "ModelCheckpoint(dirpath='s3://...')."
        )
    here = path if url is None else url["rest"][1:] if url["rest"].startswith("/") else f"/{url['rest']}"
    expanded = os.path.expanduser(here)
    if max(map(len, os.fsencode(expanded).split(b"/"))) > 255:  # which `Path.is_file` and the like would raise for
        raise ConfigError(f"{named}{str(path)[:60]!r}...: a name may have 255 bytes between two slashes. Shorten it.")
    if expanded.startswith("~"):
        raise ConfigError(
            f"{named}{str(path)!r}: {expanded.split('/')[0]!r} has no home folder on this machine. Write the path in "
            f"full; for a name that begins with ~ in the current folder, ./{expanded}."
        )
    # When they are read again, "./~x" must not be taken for a home folder, nor "./x:/y" for a URL.
    found = Path(expanded)
    return found.absolute() if str(found).startswith("~") or URL.fullmatch(str(found)) else found


def kept_path(path: str | Path, argument: str = "") -> Path:
    """Return `local_path` as an absolute path, which stays the same when the program changes its working directory."""
    return local_path(path, argument).absolute()


def optional_path(path: str | Path | None, argument: str) -> Path | None:
    """Return `kept_path` of a path, and None for None."""
    return None if path is None else kept_path(path, argument)


def make_folder(folder: Path, argument: str) -> None:
    """Make a folder and those above it; `argument`: the one that names it.

    Raises:
        ConfigError: there is a file in its place, or the file system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{argument}: the folder {str(folder)!r} cannot be made: {error.strerror}.") from error
