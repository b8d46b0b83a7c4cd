"""Record the constructor arguments of a module as data, to store them and to build the module again."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import inspect
import json
import logging
import os
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from trainer.arguments import hints_of, options_of
from trainer.errors import CheckpointError, ConfigError, did_you_mean, first_of, missing_package_advice

log = logging.getLogger("trainer")

T = TypeVar("T")

SCALARS = frozenset({type(None), bool, int, float, str})
NUMPY_NUMBERS: dict[str, type[np.generic]] = {
    np.dtype(kind).name: kind
    for kind in (
        *(np.bool_, np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8),
        *(np.uint64, np.uint32, np.uint16, np.uint8),
    )
}
"""numpy's numbers that are data, as Python's are, by the names of their dtypes."""


def is_scalar(value: Any) -> bool:
    """Whether a value is a scalar that checkpoints and hyperparameters hold with its exact type."""
    return type(value) in SCALARS or is_numpy_number(value)


def is_numpy_number(value: Any) -> bool:
    """Whether a value is one of `NUMPY_NUMBERS`."""
    return isinstance(value, np.generic) and value.dtype.name in NUMPY_NUMBERS


class Hyperparameters(dict[str, Any]):
    """A dict whose entries are also attributes: `hparams.lr` and `hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"no hyperparameter {name!r}; there are: {', '.join(map(str, self)) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HasHyperparameters:
    """Base of what has hyperparameters: `save_hyperparameters` keeps them in `hparams`."""

    # The keys that Lightning's checkpoints have for them.
    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    @property
    def hparams(self) -> Hyperparameters:
        """The values that `save_hyperparameters` kept; empty without it."""
        stored: Hyperparameters = self.__dict__.setdefault("_hparams", Hyperparameters())
        return stored

    @property
    def hparams_initial(self) -> Hyperparameters:
        """The hyperparameters when they were first saved."""
        return Hyperparameters(self.__dict__.get("_hparams_initial", self.hparams))

    def hyperparameters_to_store(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the hyperparameters as a checkpoint stores them, and their kinds.

        Values that are not data are left out. A warning names each of them once.
        """
        stored, kinds, problems = encoded_hyperparameters(self.hparams)
        reported = self.__dict__.get("_hparams_left_out", ())
        left_out = [name for name in problems if name not in reported]
        self.__dict__["_hparams_left_out"] = (*reported, *left_out)
        if left_out and os.environ.get("RANK", "0") == "0":
            log.warning(
                "%s: the hyperparameters %s are not data, so checkpoints do not contain them: give them to "
                "load_from_checkpoint, or leave them out with save_hyperparameters(ignore=%s)",
                type(self).__name__,
                ", ".join(problems[name] for name in left_out),
                left_out,
            )
        return stored, kinds

    def save_hyperparameters(
        self, *args: Any, ignore: Any = None, frame: FrameType | None = None, logger: bool = True, **values: Any
    ) -> None:
        """Keep the arguments of `__init__` in `self.hparams` and in every checkpoint. Call this inside `__init__`.

        A base class that calls this keeps the arguments of its subclasses, too. `load_from_checkpoint` restores paths,
        enumerations, sets, dataclasses and the like. A value that is not data (a module, a class, a function), or that
        contains one, is kept in `hparams` only, and a warning names it: pass it to `load_from_checkpoint`. The same
        holds for values that you put into `hparams` later.

        Args:
            args: names of arguments to keep; or a dict, namespace or configuration whose entries are kept.
            ignore: names of values to leave out, also where a base class or an earlier call has kept them.
            frame: the frame of `__init__`. Default: the caller's.
            logger: give the hyperparameters to the loggers.
            values: keep these instead of what the arguments say.

        Raises:
            ConfigError: this is not called inside `__init__`, or a name is not the name of an argument.
        """
        if frame is None:
            frame = inspect.currentframe()
            while frame is not None and frame.f_code.co_name == "save_hyperparameters":  # and overrides that call super
                frame = frame.f_back
        ignored = [ignore] if isinstance(ignore, str) else list(ignore or ())
        kept = collect_hyperparameters(frame, self, args, ignored, values)
        state, is_first = self.__dict__, os.environ.get("RANK", "0") == "0"
        before = state.get("_hparams_inside", {})
        for name in _changed_in_another(before, kept, self.hparams) if is_first else ():
            log.warning(
                "%s: two calls of save_hyperparameters keep a value of the name %s: load_from_checkpoint will give "
                "the last, %r, to both. Rename one of them.",
                type(self).__name__,
                name,
                kept.values[name],
            )
        both = {argument: (*before.get(argument, ()), *names) for argument, names in kept.inside.items()}
        state["_hparams_inside"] = before | {argument: [*dict.fromkeys(names)] for argument, names in both.items()}
        for name in ignored:
            self.hparams.pop(name, None)
        self.hparams.update(kept.values)
        state["_hparams_for_loggers"] = logger
        state["_hparams_initial"] = dict(self.hparams)
        self.hyperparameters_to_store()


class Collected(NamedTuple):
    """The hyperparameters that `save_hyperparameters` keeps."""

    values: dict[str, Any]
    inside: dict[str, list[str]]
    """The names of the values in the argument that holds them, as in `__init__(self, config)`; "": that are arguments
    themselves."""


def collect_hyperparameters(
    frame: FrameType | None, owner: object, names: Collection[Any], ignored: list[str], values: dict[str, Any]
) -> Collected:
    """Return the hyperparameters for `save_hyperparameters(*names, ignore=..., **values)`, called in `frame`.

    They are the arguments of the constructor that runs in `frame`, and of the subclasses' constructors that called it.

    Args:
        names: arguments to keep; or one dict, namespace or configuration, whose entries are kept.

    Raises:
        ConfigError: `frame` does not run a method of `owner`, or a name is not the name of an argument.
    """
    if not _runs_constructor_of(frame, owner):
        raise ConfigError("save_hyperparameters() must be called inside __init__: that is where the arguments are.")
    arguments, kind = arguments_of(frame, owner), type(owner).__name__
    whole = next(iter(names), "") if len(names) == 1 else ""
    if not isinstance(whole, str):
        argument = next((name for name, value in reversed(arguments.items()) if value is whole), "")
        chosen, names = entries_of(whole), ()
    else:
        _check_names(names, arguments, kind)
        argument, chosen = "", {name: value for name, value in arguments.items() if not names or name in names}
    kept = {name: value for name, value in chosen.items() if name not in ignored}
    inside = {argument: [*map(str, kept)]}
    if added := [name for name in values if name not in kept]:
        inside[""] = [*inside.get("", ()), *added]
    kept.update(values)
    return Collected(kept, inside)


def _check_names(names: Collection[Any], arguments: Mapping[str, Any], kind: str) -> None:
    """Raise a ConfigError for a name that is not an argument of the constructor of the class `kind`."""
    for name in map(str, names):
        if name not in arguments:
            raise ConfigError(
                f"{kind}.__init__ has no argument {name!r}.{did_you_mean(name, arguments)} Give names of arguments, or "
                "one dict, or values with names: save_hyperparameters(lr=0.1)."
            )


def _changed_in_another(before: Mapping[str, list[str]], kept: Collected, hparams: Mapping[str, Any]) -> list[str]:
    """Return the names of values that another argument has, too, from an earlier call, and differently."""
    pairs = [(names, theirs) for one, names in kept.inside.items() for other, theirs in before.items() if one != other]
    twice = {name for names, theirs in pairs for name in names if name in theirs}
    return [name for name in twice if repr(as_stored(hparams.get(name))) != repr(as_stored(kept.values.get(name)))]


def _runs_constructor_of(frame: FrameType | None, owner: object) -> bool:
    """Whether `frame` runs a method, called by the constructor of `owner` or that itself."""
    found: FrameType | None = frame
    while found is not None and _first_argument(found) is owner and found.f_code.co_name != "__init__":
        found = found.f_back
    return found is not None and _first_argument(found) is owner


def arguments_of(frame: FrameType | None, owner: object) -> dict[str, Any]:
    """Return the arguments of the constructors of `owner` that run in `frame` and its callers, the outermost last.

    `**kwargs` are merged in. `*args` of the outermost are kept under the name of their parameter. If it takes
    `**kwargs`, too, the arguments of a base class may have the same values under their names; `*args` are then left
    out. If some value has no such name, `*args` are kept as a `UserList`, which is not data, so that a warning names
    it.
    """
    arguments: dict[str, Any] = {}
    rest: dict[Any, Any] = {}
    found: FrameType | None = frame
    while found is not None and _first_argument(found) is owner:
        if found.f_code.co_name == "__init__":
            names, varargs, keywords, values = inspect.getargvalues(found)
            by_position = values.get(varargs or "") or ()
            if by_position and keywords:
                known = {*map(id, arguments.values()), *map(id, vars(owner).get("_hparams", {}).values())}
                by_position = () if known.issuperset(map(id, by_position)) else UserList(by_position)
            rest = {varargs: by_position} if by_position else {}
            named = {name: values[name] for name in names[1:] if name in values}
            arguments = {**arguments, **values.get(keywords or "", {}), **named}
        found = found.f_back
    return arguments | rest


def _first_argument(frame: FrameType) -> Any:
    """Return the value of a function's first variable, which is `self` in a method."""
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))


def entries_of(value: Any) -> dict[str, Any]:
    """Return the entries of a dict, configuration, dataclass or namespace.

    Raises:
        ConfigError: `value` is something else.
    """
    if isinstance(value, Mapping):  # of other classes, such as OmegaConf's: the same as load_from_checkpoint gives
        return dict(value) if type(value) is dict else _nested(value)
    if hasattr(value, "__dict__") and not isinstance(value, (type, Sequence)) and not callable(value):
        return dict(vars(value))
    raise ConfigError(
        f"save_hyperparameters got a {type(value).__name__}: give names of arguments, a dict, or values with names, "
        "save_hyperparameters(lr=0.1)."
    )


def constructor_arguments(
    owner: type,
    stored: Mapping[str, Any],
    inside: str | Mapping[str, list[str]] | None,
    given: Mapping[str, Any],
    kinds: Mapping[str, Any] | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """Return the arguments to build `owner` with, from a checkpoint's hyperparameters and the caller's values.

    Arguments that only a base class takes are left out.

    Args:
        inside: as `own_and_inside` takes it.
        kinds: the kinds of the values, from `encoded_hyperparameters`; None: use the annotations.
        partial: arguments without a default may be missing.

    Raises:
        CheckpointError: an argument is missing or unknown, or a value's class no longer exists.
    """
    signature = inspect.signature(owner)
    stored = dict(stored)
    for name, kind in (kinds or {}).items():
        if name in stored and name not in given:
            stored[name] = as_given(stored[name], kind, owner, name)
    own, wholes = own_and_inside({**stored, **(kinds or {})}, inside)  # also the names of those that are left out
    takes_any = inspect.Parameter.VAR_KEYWORD in {one.kind for one in signature.parameters.values()}
    arguments = {name: stored[name] for name in own if name in stored and (takes_any or name in signature.parameters)}
    if kinds is None:
        arguments = as_annotated(owner, arguments)
    made, missing = _made_wholes(wholes, {**stored, **given}, owner) if wholes else ({}, {})
    entered = {*chain.from_iterable(wholes.values())}.difference(own)
    arguments |= made | {name: value for name, value in given.items() if name not in entered}
    try:
        if {*missing} - {*given} and not partial:
            raise TypeError(f"missing {first_of(chain.from_iterable(missing.values()))}")
        _bound(owner, arguments, partial)
    except TypeError as error:
        raise CheckpointError(
            f"{owner.__name__} cannot be built with the checkpoint's hyperparameters ({', '.join(stored) or 'none'}): "
            f"{error}. Give missing ones by keyword, load_from_checkpoint(path, name=value); to have them stored, call "
            "self.save_hyperparameters() in __init__. Or the checkpoint is another module's."
        ) from None
    _report_defaults(owner, {*own} & {*signature.parameters} - {*arguments}, partial)
    return arguments


def _report_defaults(owner: type, names: Collection[str], partial: bool) -> None:
    """Name the arguments that are not data, so that a checkpoint lacks them, unless something else may give them."""
    if names and not partial:
        words = "%s: the checkpoint does not contain %s, so the defaults are used: give them to load_from_checkpoint"
        log.warning(words, owner.__name__, ", ".join(sorted(names)))


def _made_wholes(
    wholes: Mapping[str, list[str]], known: Mapping[str, Any], owner: type
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the arguments that hold several hyperparameters, and by argument what is missing for the others."""
    made, missing = {}, {}
    for argument, names in wholes.items():
        if unknown := [f"{name} (inside of {argument})" for name in names if name not in known]:
            missing[argument] = unknown
        else:
            made[argument] = _in_one({name: known[name] for name in names}, owner, argument)
    return made, missing


def own_and_inside(
    stored: Collection[str], inside: str | Mapping[str, list[str]] | None
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the hyperparameters that are arguments themselves, and of those inside of one, by it.

    Args:
        stored: the names of all hyperparameters.
        inside: as a checkpoint has it, and `Collected`; a text: all of them are in the argument of this name.
    """
    wholes = {inside: [*stored]} if isinstance(inside, str) else {**(inside or {})}
    wholes = {argument: [name for name in names if name in stored] for argument, names in wholes.items()}
    own = wholes.pop("", [])
    held = {name for names in (own, *wholes.values()) for name in names}
    own += [name for name in stored if name not in held]
    return own, {argument: names for argument, names in wholes.items() if argument not in own}


def _in_one(entries: dict[str, Any], owner: type, argument: str) -> Any:
    """Return the object that holds all hyperparameters: the dataclass of the annotation, or with attributes."""
    options = options_of(hints_of(owner.__init__, owner).get(argument))  # type: ignore[misc]
    if any(_is_of_omegaconf(one) for one in options):
        return _omegaconf(_nested(entries, dict), {}, owner)
    for cls in (one for one in options if isinstance(one, type) and dataclasses.is_dataclass(one)):
        if entries.keys() <= {field.name for field in dataclasses.fields(cls)}:
            return as_given(entries, ["dataclass", f"{cls.__module__}:{cls.__qualname__}", None], owner, argument)
    return _nested(entries)


def construct(owner: type[T], arguments: Mapping[str, Any]) -> T:
    """Call a constructor with arguments by name, also those that it takes by position alone."""
    bound = _bound(owner, arguments)
    return owner(*bound.args, **bound.kwargs)


def _bound(owner: type, arguments: Mapping[str, Any], partial: bool = False) -> inspect.BoundArguments:
    signature = inspect.signature(owner)
    named = {name for name, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD}
    bound = inspect.BoundArguments(signature, {name: one for name, one in arguments.items() if name in named})
    bound.apply_defaults()  # else `*args` could not follow one that is not given
    others = {name: one for name, one in arguments.items() if name not in named}
    bind = signature.bind_partial if partial else signature.bind
    return bind(*bound.args, **bound.kwargs, **others)


def _nested(value: Any, kind: type[dict[str, Any]] = Hyperparameters) -> Any:
    """Return mappings as `Hyperparameters`, at any depth, as a configuration's entries are attributes."""
    if isinstance(value, Mapping):
        return kind({name: _nested(item, kind) for name, item in value.items()})
    is_list = isinstance(value, MutableSequence) and not isinstance(value, (deque, bytearray))
    return [_nested(item, kind) for item in value] if is_list else value


# -- data: what a checkpoint stores of a value, and what it was where the stored one does not say it -------------------

Kind = list[Any] | None
"""`[name, class, kinds of the items by their position]`, each None where there is nothing to say."""


LEFT_OUT: Kind = ["left out", None, None]
"""The kind of a hyperparameter that is not data, so that a checkpoint has its name only."""
MAX_DEPTH = 40
"""Levels of containers in a hyperparameter. Their kinds take two levels each, of the 100 that a checkpoint has."""


class _NotDataError(Exception):
    """A value is not data; the message is its path inside the hyperparameters, and its class."""


def encoded_hyperparameters(hparams: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return hyperparameters as a checkpoint stores them, their kinds, and the places of those that are not data.

    Data are None, bool, int, float, str, a number of numpy, a path, a member of an enumeration, a timedelta, a dtype or
    device of torch, and dicts, lists, tuples, sets, dataclasses, namespaces and OmegaConf's configurations of data; but
    not containers of other classes. A hyperparameter that contains something else is not stored, and its kind is
    `LEFT_OUT`. Of one that comes back unchanged the kind is not in the result.
    """
    stored: dict[str, Any] = {}
    kinds: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name, value in hparams.items():
        try:
            stored[str(name)], kind = _encoded(value, str(name))
        except _NotDataError as error:
            problems[str(name)], kind = str(error), LEFT_OUT
        if kind is not None:
            kinds[str(name)] = kind
    return stored, kinds, problems


def as_stored(value: Any) -> Any:
    """Return data as a checkpoint stores it: paths as texts, enumerations by value (or by name), sets as lists.

    Other values are returned unchanged.
    """
    try:
        return _encoded(value, "")[0]
    except _NotDataError:
        return value


def _encoded(value: Any, where: str, depth: int = 0) -> tuple[Any, Kind]:
    """Return what is stored of a value, and its kind.

    Args:
        depth: the number of containers around the value.

    Raises:
        _NotDataError: no checkpoint can store it.
    """
    if is_scalar(value):
        return value, None
    name, problem = kind_of(value), _NotDataError(f"{where} ({type(value).__name__})")
    if name is None or depth > MAX_DEPTH:  # a value that contains itself has no end
        raise problem
    try:
        detail, content = CODECS[name].detail(value), CODECS[name].content(value)
    except Exception as error:  # of a property, a resolver, or a field without a value
        raise problem from error
    if name == "omegaconf":
        stored, inside = _encoded(content, where, depth + 1)
        return stored, [name, detail, inside]
    if isinstance(content, dict):
        return _encoded_entries(name, detail, content, where, depth + 1)
    if not isinstance(content, (list, tuple)):
        return content, [name, detail, None]
    items, kinds = _encoded_items(content, [f"{where}[{position}]" for position in range(len(content))], depth + 1)
    is_plain = name in ("list", "tuple") and kinds is None
    return type(content)(items), None if is_plain else [name, detail, kinds]


def kind_of(value: Any) -> str | None:
    """Return the name of a value's kind, a key of `CODECS`; None if no checkpoint can store the value."""
    kind: type = type(value)
    if kind in _BY_CLASS:
        return _BY_CLASS[kind]
    if isinstance(value, enum.Enum):
        return "enum"
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "Size"):  # torch's import takes seconds
        return kind.__name__
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple"
    if _is_of_omegaconf(kind):
        return "omegaconf"
    return "dataclass" if _has_all_fields(value) else None


def _has_all_fields(value: Any) -> bool:
    """Whether a value is a dataclass whose constructor takes its fields, and nothing else such as an InitVar."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    taken = {field.name for field in dataclasses.fields(value) if field.init}
    return inspect.signature(type(value)).parameters.keys() == taken


def _is_of_omegaconf(kind: Any) -> bool:
    """Whether a class is one of OmegaConf's configurations."""
    names = ("DictConfig", "ListConfig")
    return isinstance(kind, type) and kind.__module__.partition(".")[0] == "omegaconf" and kind.__name__ in names


class _Codec(NamedTuple):
    """Functions that take values of one kind apart, and make them again."""

    content: Callable[[Any], Any]
    """Returns what is stored of a value: a scalar, or a list, tuple or dict, whose items are stored in the same way."""
    make: Callable[[Any, Any, type], Any] = lambda content, detail, owner: content
    """Makes a value of its content, its detail, and the class that has it as a hyperparameter."""
    detail: Callable[[Any], Any] = lambda value: None
    """Returns what the content does not say."""


def _sorted(values: Iterable[Any]) -> list[Any]:
    """Return the values of a set in the same order in each process."""
    return sorted(values, key=lambda one: (repr(as_stored(one)), type(one).__name__))


def _full_name(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _content_of_enum(member: enum.Enum) -> Any:
    try:
        return _encoded(member.value, "")[0]
    except _NotDataError:
        return member.name


def _enum_member(content: Any, detail: Any, owner: type) -> Any:
    cls = _class_named(owner, detail[0], enum.Enum)
    return cls[detail[1]] if detail[1] in cls.__members__ else cls(content)


def _is_plain(value: Any) -> bool:
    """Whether a value is a path, or what JSON can hold: data that does not contain itself."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return bool(json.dumps(value, default=os.fspath))
    return False


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and the data that were added to it."""
    own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return own | {name: one for name, one in getattr(value, "__dict__", {}).items() if _is_plain(one)}


def _dataclass(content: Any, detail: Any, owner: type) -> Any:
    cls = _class_named(owner, detail, object)
    names = [field.name for field in dataclasses.fields(cls) if field.init and field.name in content]
    made = cls(**{name: content[name] for name in names})
    for field, item in content.items():  # `__post_init__` may have changed them
        object.__setattr__(made, field, item)
    return made


def _content_of_omegaconf(value: Any) -> Any:
    """Return a configuration with its references unresolved, or with their values if it is a part of another one."""
    omegaconf = sys.modules["omegaconf"].OmegaConf
    content = omegaconf.to_container(value)
    with contextlib.suppress(Exception):  # a value that is still to come, a resolver that is not there: as written
        resolved = omegaconf.to_container(value, resolve=True)
        with contextlib.suppress(Exception):  # of a part of a configuration: the other parts are not stored
            if omegaconf.to_container(omegaconf.create(content), resolve=True) == resolved:
                return content
        return resolved
    return content


def _flags(config: Any) -> dict[str, bool]:
    omegaconf = sys.modules["omegaconf"].OmegaConf
    return {"readonly": bool(omegaconf.is_readonly(config)), "struct": bool(omegaconf.is_struct(config))}


def _omegaconf(content: Any, flags: Mapping[str, bool], owner: type) -> Any:
    from omegaconf import OmegaConf

    made = OmegaConf.create(content)
    OmegaConf.set_readonly(made, flags.get("readonly") or None)
    OmegaConf.set_struct(made, flags.get("struct") or None)
    return made


def _dtype(name: str, detail: None, owner: type) -> Any:
    import torch

    return {one: value for one, value in vars(torch).items() if isinstance(value, torch.dtype)}[name]


def _device(name: str, detail: None, owner: type) -> Any:
    import torch

    return torch.device(name)


def _size(sizes: tuple[int, ...], detail: None, owner: type) -> Any:
    import torch

    return torch.Size(sizes)


def _made_by(cls: Callable[[Any], Any], content: Any, detail: Any, owner: type) -> Any:
    """Make a value of its content alone."""
    return cls(content)


CODECS: dict[str, _Codec] = {
    "list": _Codec(list),
    "tuple": _Codec(tuple),
    "deque": _Codec(list, lambda content, detail, owner: deque(content, detail), lambda value: value.maxlen),
    "set": _Codec(_sorted, partial(_made_by, set)),
    "frozenset": _Codec(_sorted, partial(_made_by, frozenset)),
    "dict": _Codec(dict),
    "OrderedDict": _Codec(dict, partial(_made_by, OrderedDict)),
    "Counter": _Codec(dict, partial(_made_by, Counter)),
    "Hyperparameters": _Codec(dict, partial(_made_by, Hyperparameters)),
    "Namespace": _Codec(vars, lambda content, detail, owner: Namespace(**content)),
    "SimpleNamespace": _Codec(vars, lambda content, detail, owner: SimpleNamespace(**content)),
    "path": _Codec(os.fspath, partial(_made_by, Path)),
    "PurePosixPath": _Codec(os.fspath, partial(_made_by, PurePosixPath)),
    "PureWindowsPath": _Codec(os.fspath, partial(_made_by, PureWindowsPath)),
    "range": _Codec(lambda value: (value.start, value.stop, value.step), lambda bounds, _, owner: range(*bounds)),
    "timedelta": _Codec(
        datetime.timedelta.total_seconds,
        lambda content, detail, owner: datetime.timedelta(*detail),
        lambda value: [value.days, value.seconds, value.microseconds],  # a float has not all digits
    ),
    "enum": _Codec(_content_of_enum, _enum_member, lambda value: [_full_name(value), value.name]),
    "dtype": _Codec(lambda value: str(value).removeprefix("torch."), _dtype),
    "device": _Codec(str, _device),
    "Size": _Codec(tuple, _size),
    "namedtuple": _Codec(
        tuple, lambda content, detail, owner: _class_named(owner, detail, tuple)(*content), _full_name
    ),
    "omegaconf": _Codec(_content_of_omegaconf, _omegaconf, _flags),
    "dataclass": _Codec(_fields_of, _dataclass, _full_name),
    "left out": _Codec(lambda value: value),  # a tensor that was imported with a checkpoint of Lightning's
}
_BY_CLASS: dict[type, str] = {
    type(Path()): "path",
    **{
        one: one.__name__
        for one in (
            *(list, tuple, deque, set, frozenset, range, datetime.timedelta, PurePosixPath, PureWindowsPath),
            *(dict, OrderedDict, Counter, Hyperparameters, Namespace, SimpleNamespace),
        )
    },
}
_DICTS = ("dict", "OrderedDict", "Counter", "Hyperparameters")


def _encoded_items(values: Iterable[Any], places: Iterable[str], depth: int) -> tuple[list[Any], dict[str, Any] | None]:
    """Return what is stored of several values, and their kinds by position; None where there is nothing to say."""
    encoded = [_encoded(value, where, depth) for value, where in zip(values, places, strict=True)]
    kinds = {str(position): kind for position, (_, kind) in enumerate(encoded) if kind is not None}
    return [stored for stored, _ in encoded], kinds or None


def _encoded_entries(
    name: str, detail: Any, content: dict[Any, Any], where: str, depth: int
) -> tuple[dict[Any, Any], Kind]:
    """Return what is stored of a dict, a namespace or a dataclass, and its kind."""
    keys, of_keys = _encoded_items(content, [where] * len(content), depth)
    items, of_items = _encoded_items(content.values(), [f"{where}[{key!r}]" for key in content], depth)
    try:
        stored = dict(zip(keys, items, strict=True))
    except TypeError:  # the key is a set, which is stored as a list
        stored = {}
    if len(stored) < len(content):
        raise _NotDataError(f"{where} (with keys that a checkpoint cannot store, or stores alike)")
    if name == "dict" and of_keys is None and of_items is None:
        return stored, None
    return stored, [name, of_keys if name in _DICTS else detail, of_items]


def as_given(value: Any, kind: Any, owner: type, where: str) -> Any:
    """Return a stored value in its original class, which the owner's annotations or modules have to name."""
    try:
        return _made(value, kind, lambda name, content, detail: CODECS[name].make(content, detail, owner))
    except (ImportError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"hyperparameter {where} cannot be made again from the checkpoint ({error})."
            f"{missing_package_advice(error)} Give it: load_from_checkpoint(path, {where}=...)."
        ) from error


def _made(value: Any, kind: Any, make: Callable[[str, Any, Any], Any]) -> Any:
    """Return `make(name, content, detail)` of a stored value's kind, after the same has been done with its items."""
    name, detail, items = kind
    if name == "omegaconf":
        value = value if items is None else _made(value, items, make)
    elif isinstance(value, dict):
        keys = _made_items(value, detail if name in _DICTS else None, make)
        value = dict(zip(keys, _made_items(value.values(), items, make), strict=True))
    elif items is not None:
        value = type(value)(_made_items(value, items, make))
    return make(name, value, detail)


def _made_items(items: Iterable[Any], kinds: Any, make: Callable[[str, Any, Any], Any]) -> list[Any]:
    kinds = kinds or {}
    return [
        _made(item, kinds[str(position)], make) if str(position) in kinds else item
        for position, item in enumerate(items)
    ]


def _class_named(owner: type, name: str, base: type) -> Any:
    """Return a class of the user's by its name, from an annotation or a module of the owner: nothing is imported."""
    found: list[Any] = []
    alike: list[Any] = []
    module, _, qualname = name.rpartition(":")
    for cls in owner.__mro__[:-1]:
        found += hints_of(cls.__init__, cls).values()  # type: ignore[misc]
        found += [*vars(cls).values(), *vars(sys.modules[cls.__module__]).values()]
    for one in found:  # grows
        if isinstance(one, type) and one.__qualname__ == qualname and issubclass(one, base):
            alike.append(one)
        inside = [*get_args(one)]
        if isinstance(one, type) and dataclasses.is_dataclass(one):
            inside += [*hints_of(one, one).values(), *one.__subclasses__()]
        found += [other for other in inside if not any(other is known for known in found)]
    if not alike:
        raise LookupError(f"no class {qualname} is known where {owner.__name__} is defined")
    # A module may have another name now, as one that was run as a script.
    return next((one for one in alike if one.__module__ == module), alike[0])


def as_annotated(owner: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a file with paths and enumerations where the constructor is annotated so, and with no text."""
    hints = hints_of(owner.__init__, owner)  # type: ignore[misc]
    values = dict(stored)
    for name, value in stored.items():
        options = options_of(hints.get(name))
        made: list[Any] = [Path(value)] if isinstance(value, str) and Path in options else []
        enumerations: list[Any] = [kind for kind in options if isinstance(kind, enum.EnumMeta)]
        made += [one for kind in enumerations for one in kind if as_stored(one) == value]
        if made and type(value) not in options:
            values[name] = made[0]
    return values


def with_paths(kept: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the stored hyperparameters of the module or the data, with paths in place of their texts."""

    def make(name: str, content: Any, detail: Any) -> Any:
        return Path(content) if name == "path" else content

    stored, kinds = kept.get(owner, {}), kept.get("kinds", {}).get(owner, {})
    return {name: _made(value, kinds[name], make) if name in kinds else value for name, value in stored.items()}


def read_hyperparameters(path: str | Path) -> dict[str, Any]:
    """Return the hyperparameters of a YAML or JSON file.

    Raises:
        CheckpointError: the file cannot be read, or is not a mapping of names to data.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"hparams_file={str(path)!r} cannot be read ({' '.join(str(error).split())}).") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"hparams_file={str(path)!r} has no names with values: give a YAML or JSON mapping.")
    return values
