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
import math
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

from trainer.errors import ArgumentError, ConfigError, did_you_mean, raise_problems
from trainer.names.misses import further_arguments, is_default, words_for

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


def check_constructor(cls: type) -> None:
    """Wrap the class's own `__init__` to raise one ConfigError for all arguments that do not fit their annotations.

    The body of `__init__` may rely on the types of its arguments; numbers of other classes, such as numpy's, arrive as
    Python's.
    """
    init: Any = vars(cls).get("__init__")
    if init is None:
        return

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        # Here and not above: of the classes of a table few are constructed.
        signature = inspect.signature(init)
        _, *known = signature.parameters
        parameters = [*signature.parameters.values()]
        own = [one.name for one in parameters[1:] if one.kind is one.POSITIONAL_OR_KEYWORD]
        takes_others = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        args, options = with_python_numbers(args), with_python_numbers(options)
        if len(args) > len(own):
            args, options = args[: len(own)], _by_name(cls.__name__, own, args, options)
        if any(name not in known for name in options):
            options = _without_strangers(cls.__name__, known, takes_others, options)
        try:
            given = signature.bind(self, *args, **options).arguments
        except TypeError:
            init(self, *args, **options)  # raises Python's own error
            raise
        raise_problems(_problems(cls, init, signature, given), f"{cls.__name__}'s arguments")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]


def keep_arguments(cls: type, attribute: str) -> None:
    """Wrap the class's own `__init__` to keep the arguments by name, where no constructor of a subclass has done so."""
    init: Any = vars(cls).get("__init__")
    if init is None:
        return

    @functools.wraps(init)
    def kept(self: Any, *args: Any, **options: Any) -> None:
        _, *names = inspect.signature(init).parameters
        given = {**dict(zip(names, args, strict=False)), **options}
        vars(self).setdefault(attribute, with_python_numbers(given))
        init(self, *args, **options)

    cls.__init__ = kept  # type: ignore[misc]


def _by_name(kind: str, own: Sequence[str], given: Sequence[object], options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with the arguments given by position beyond those of the constructor of the class `kind`.

    Their names are those that Lightning's class has at these places.

    Args:
        own: the arguments that the constructor takes by position.
        given: the arguments by position.

    Raises:
        ArgumentError: Lightning's class takes none at such a place, or the argument is in `options` too.
    """
    theirs = [*own, *further_arguments(kind)]
    for place, value in enumerate(given[len(own) :], len(own)):
        if place >= len(theirs):
            taken = f"({', '.join(own)}), give others as name=value" if own else "no argument"
            raise ArgumentError(f"{kind}() takes {taken} by position; {len(given)} were given.")
        if theirs[place] in options:
            raise ArgumentError(f"{kind}() got {theirs[place]} twice, by position and by name: give it once.")
        options[theirs[place]] = value
    return options


def _without_strangers(kind: str, known: Sequence[str], takes_others: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` without those that only Lightning's class has, if they have the value that changes nothing.

    Raises:
        ArgumentError: another one is not among the arguments `known`, and cannot be passed on.
    """
    strangers = [name for name, value in options.items() if name not in known and not is_default(kind, name, value)]
    words = words_for(f"{kind}()", strangers)
    for name in strangers:
        if name in words or not takes_others:
            hint = did_you_mean(name, known, words)
            raise ArgumentError(f"{kind}() got an unexpected keyword argument {name!r}.{hint}")
    return {name: value for name, value in options.items() if name in known or name in strangers}


def fingerprint_of_call(cls: type, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    """Return a fingerprint of a class and the arguments of its constructor, without defaults: equal in each process.

    Functions count by their names, lambdas by their code, objects by their class and, if it has no address, `repr`.
    """
    given: dict[str, Any] = {str(number): value for number, value in enumerate(args)} | dict(options)
    try:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        given = dict(list(signature.bind(None, *args, **options).arguments.items())[1:])
        defaults = {one.name: one.default for one in signature.parameters.values()}
        given = {name: value for name, value in given.items() if _in_words(value) != _in_words(defaults[name])}
    except (TypeError, ValueError):  # a wrong call, which `__init__` refuses, or a constructor without a signature
        pass
    return hashlib.sha256(f"{cls.__qualname__}: {_in_words(given)}".encode("utf-8", "backslashreplace")).hexdigest()[
        :16
    ]


def _in_words(value: Any, depth: int = 4) -> str:
    value = with_python_numbers(value) if depth == 4 else value
    if value is None or type(value) in (bool, int, float, str, bytes, timedelta):
        return repr(value)
    if isinstance(value, PurePath):
        return repr(str(value))
    if depth > 0 and type(value) in (list, tuple):  # a configuration has lists in place of tuples
        return f"[{', '.join(_in_words(one, depth - 1) for one in value)}]"
    if depth > 0 and type(value) in (set, frozenset):
        return f"{{{', '.join(sorted(_in_words(one, depth - 1) for one in value))}}}"
    if depth > 0 and type(value) is dict:
        items = sorted((_in_words(key, depth - 1), _in_words(one, depth - 1)) for key, one in value.items())
        return f"{{{', '.join(f'{key}: {one}' for key, one in items)}}}"
    if isinstance(value, (type, FunctionType, MethodType)):
        code = value.__code__ if isinstance(value, FunctionType) and value.__name__ == "<lambda>" else None
        told = () if code is None else (code.co_code, code.co_names, _without_address(code.co_consts))
        return f"{value.__module__}.{value.__qualname__}{told or ''}"
    return f"{type(value).__module__}.{type(value).__qualname__}{_without_address(value)}"


def _without_address(value: Any) -> str:
    """Return the `repr` of a value, or nothing where it is another one in each process."""
    try:
        told = repr(value)
    except Exception:  # of a class of the user's own
        return ""
    return "" if " at 0x" in told else told


def with_python_numbers(value: Any, depth: int = 3) -> Any:
    """Return numpy's numbers, fractions and members of enumerations of integers as int, float or bool.

    Also those inside lists, tuples and dicts, of which copies are returned then, down to `depth`. Sequences and
    mappings of other classes, such as OmegaConf's, become lists and dicts. Other values are returned unchanged.
    """
    kind = type(value)
    if kind in (bool, int, float, str, NoneType):
        return value
    for abstract, plain_kind in ((MutableSequence, list), (MutableMapping, dict)):
        if depth > 0 and issubclass(kind, abstract) and not issubclass(kind, (plain_kind, bytearray)):
            value, kind = plain_kind(value), plain_kind
    if kind in (list, tuple, dict) and depth > 0:
        items = [item for pair in value.items() for item in pair] if kind is dict else value
        plain = [with_python_numbers(item, depth - 1) for item in items]
        if all(map(operator.is_, plain, items)):
            return value
        return dict(zip(plain[::2], plain[1::2], strict=True)) if kind is dict else kind(plain)
    if _is_numpy_bool(value):
        return bool(value)
    if issubclass(kind, numbers.Real):
        try:
            return int(value) if issubclass(kind, numbers.Integral) else float(value)
        except OverflowError:  # a fraction above the largest float, which the checks refuse
            return value
    return value


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")  # bool_ before numpy 2


def _problems(cls: type, init: Any, signature: inspect.Signature, given: dict[str, Any]) -> list[str]:
    hints = hints_of(init, cls)
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        f"{cls.__name__}({name}={value!r}): give {describe_annotation(hints[name])}.{_suggestion(value, hints[name])}"
        for name, value in list(given.items())[1:]
        if name in hints and signature.parameters[name].kind not in fixed and not fits(value, hints[name])
    ]


def _suggestion(value: Any, annotation: Any) -> str:
    literals = [option for option in options_of(annotation) if get_origin(option) is Literal]
    choices = [choice for option in literals for choice in get_args(option) if isinstance(choice, str)]
    return did_you_mean(value, choices) if isinstance(value, str) else ""


def failed_function(argument: str, returns: str, error: Exception) -> ConfigError:
    """Return the error for a user's function that raised `error`.

    Args:
        argument: the beginning of the call that gave the function, such as "Timer(clock".
        returns: the words for the values that the function has to return.
    """
    message = f"{argument}=...) raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    found = ConfigError(f"{message}. Give a function that returns {returns}.")
    found.__cause__ = error
    return found


def check_clock(argument: str, clock: Callable[[], float]) -> None:
    """Raise a ConfigError if a function does not return a number."""
    try:
        now: object = clock()
    except Exception as error:
        raise failed_function(argument, "seconds", error) from error
    if not fits(now, float):
        raise ConfigError(f"{argument}=...) returned a {type(now).__name__}: give a function that returns seconds.")


@functools.cache
def hints_of(init: Any, cls: type) -> dict[str, Any]:
    """Return the evaluated annotations of a constructor by argument; `Any` for one that cannot be evaluated."""
    try:
        return get_type_hints(init, include_extras=True)
    except Exception:  # a name known to type checkers only: take the annotations one by one
        hints = {}
        known = {**vars(builtins), **vars(typing), **vars(collections.abc), **vars(sys.modules[cls.__module__])}
        names = _Names({**known, cls.__name__: cls})
        for name, annotation in getattr(init, "__annotations__", {}).items():
            try:
                hints[name] = eval(annotation, {}, names) if isinstance(annotation, str) else annotation
            except Exception:
                hints[name] = Any
        return hints


class _Names(dict[str, Any]):
    """A namespace in which every unknown name is `Any`."""

    def __missing__(self, name: str) -> Any:
        return Any


def options_of(annotation: Any, limits: bool = False) -> list[Any]:
    """Return the members of a union, or the annotation itself; aliases and new names of types are resolved.

    Args:
        limits: keep `Annotated` members as they are, for their limits.
    """
    if type(annotation).__name__ == "TypeAliasType":  # `type X = ...`
        return options_of(annotation.__value__, limits)
    if isinstance(annotation, NewType):
        return options_of(annotation.__supertype__, limits)
    if isinstance(annotation, TypeVar):
        known = [one for one in (annotation.__bound__, *annotation.__constraints__) if not isinstance(one, ForwardRef)]
        return [option for one in known if one is not None for option in options_of(one, limits)] or [annotation]
    if get_origin(annotation) is Annotated and not limits:
        return options_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [option for member in get_args(annotation) for option in options_of(member, limits)]
    return [annotation]


# -- values ------------------------------------------------------------------------------------------------------------


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of an annotation's type. NaN and bools do not fit numbers; everything fits an unknown type."""
    return any(_fits(value, option) for option in options_of(annotation, limits=True))


def _fits(value: Any, option: Any) -> bool:
    origin, arguments = get_origin(option), get_args(option)
    if not arguments:  # typing.List is list
        origin, option = None, origin or option
    if origin is Annotated:
        return fits(value, arguments[0]) and all(one.holds(value) for one in arguments[1:] if isinstance(one, Limit))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if option is Any:
        return True
    if option in (None, NoneType):
        return value is None
    if option is bool:
        return isinstance(value, bool) or _is_numpy_bool(value)
    if option is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if option is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and _is_float(value)
    if origin is tuple and ... not in arguments:
        return _is_list(value) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in LISTS:
        return _is_list(value) and all(fits(one, arguments[0]) for one in value)
    if origin in MAPPINGS:
        return isinstance(value, Mapping) and all(
            fits(key, arguments[0]) and fits(one, arguments[1]) for key, one in value.items()
        )
    if option is Callable or origin is Callable:
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    return isinstance(value, option) if isinstance(option, type) and origin is None else True


def _is_float(value: Any) -> bool:
    """Whether a number can be converted to a float that is not NaN."""
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset, range))


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
_PLURALS = {int: "integers", float: "numbers", str: "texts"}


def describe_annotation(annotation: Any, names: TypeNames = PYTHON) -> str:
    """Return a description of the values that an annotation allows, such as "an integer from 1 or None"."""
    options = [word for option in options_of(annotation, limits=True) for word in _names_of(option, names)]
    if names.types[int] in options and names.types[float] in options:
        options.remove(names.types[int])
    unique = list(dict.fromkeys(options))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"


def _names_of(option: Any, names: TypeNames) -> list[str]:
    origin, arguments = get_origin(option), get_args(option)
    if option is bool:
        return names.types[bool].split(" or ")
    if origin is Literal:
        return [names.literal(choice) for choice in arguments]
    if origin is Annotated:
        limits = [
            str(one) if isinstance(one, Limit) else f"({one})" for one in arguments[1:] if isinstance(one, (Limit, str))
        ]
        return [" ".join([describe_annotation(arguments[0], names), *limits])]
    return [_name_of(option, origin, arguments, names)]


def _name_of(option: Any, origin: Any, arguments: tuple[Any, ...], names: TypeNames) -> str:
    if origin is tuple and arguments and ... not in arguments:
        return f"a list ({', '.join(describe_annotation(argument, names) for argument in arguments)})"
    name = names.types.get(origin or option)
    if origin in LISTS and arguments:
        return f"{name} of {_plural(arguments[0], names)}"
    if origin in MAPPINGS and arguments:
        return f"{name} of {_plural(arguments[0], names)} to {_plural(arguments[1], names)}"
    if origin is type and arguments:
        bases = [getattr(base, "__name__", str(base)) for base in options_of(arguments[0])]
        return f"{name} ({', '.join(bases)})"
    return name or names.others(option)


def _plural(annotation: Any, names: TypeNames) -> str:
    return _PLURALS.get(annotation) or describe_annotation(annotation, names).removeprefix("a ").removeprefix("an ")


# -- folders -----------------------------------------------------------------------------------------------------------


URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.:-]+):/(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
"""A URL, or what `Path` makes of one, without a slash; a path that begins so is written ./x:/y."""


def local_path(path: str | Path, argument: str = "") -> Path:
    """Return a user's path of this machine; `~` and `~user` at its start are home folders, and file:///x is /x.

    Args:
        argument: the name of the argument whose value the path is, for messages.

    Raises:
        ConfigError: the value is not a path, or the URL of another place; a name in it is too long, or there is no such
            user.
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
    if max(map(len, os.fsencode(expanded).split(b"/"))) > 255:  # as of a folder named after all arguments
        raise ConfigError(f"{named}{str(path)[:60]!r}...: a name may have 255 bytes between two slashes. Shorten it.")
    if expanded.startswith("~"):
        raise ConfigError(
            f"{named}{str(path)!r}: there is no home folder of {expanded.split('/')[0]!r} on this machine. Write the "
            f"path in full; for a name that begins with ~ in the current folder, ./{expanded}."
        )
    # The path of "./~x" must not be taken for a home folder when it is looked at again, nor that of "./x:/y" for a URL.
    found = Path(expanded)
    return found.absolute() if str(found).startswith("~") or URL.fullmatch(str(found)) else found


def kept_path(path: str | Path, argument: str = "") -> Path:
    """Return `local_path` as an absolute path, which stays the same when the program changes its working directory."""
    found = local_path(path, argument)
    try:
        return found.absolute()
    except FileNotFoundError:  # the working directory was deleted: writing there is an error with words of its own
        return found


def make_folder(folder: Path, argument: str) -> None:
    """Make a folder and those above it; `argument`: the one that names it.

    Raises:
        ConfigError: there is a file in its place, or the file system refuses.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{argument}: the folder {str(folder)!r} cannot be made: {error.strerror}.") from error
