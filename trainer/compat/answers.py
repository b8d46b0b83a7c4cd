"""Answer Lightning's names that are not here: by the attribute with the value, or by an error that names the fix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from inspect import getattr_static, signature
from operator import attrgetter
from types import FunctionType
from typing import Any, TypeVar

from trainer.compat.names import (
    ALIASES,
    COLLECTIVES,
    DEFAULTS,
    FORMER_HOOKS,
    SURFACE,
    THEIRS,
    TRAINER_ARGUMENTS,
    WORDS,
)
from trainer.errors import ArgumentError

Class = TypeVar("Class", bound=type)


class Alias:
    """An attribute whose value is at the path `path` of its object."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        self._read = attrgetter(path)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self._read(instance)

    def __set__(self, instance: object, value: object) -> None:
        kind = type(instance).__name__
        fix = f"give {kind}({self.name}=...)" if self.path.startswith("settings.") else f"it is that of {self.path}"
        raise AttributeError(f"{kind}.{self.name} cannot be set: {fix}.")


class Absent:
    """An attribute of Lightning's or of an earlier version that is not here. An object may have its own of the name."""

    def __init__(self, name: str, words: str) -> None:
        self.name, self.words = name, words

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no attribute {self.name!r}. Use {self.words}.")


class Former(Absent):
    """A hook of Lightning 0 or 1 only: subclasses may have a method of this name for themselves."""


class NotToSet(Absent):
    """An attribute that is not here, and whose assignment would change nothing."""

    def __set__(self, instance: object, value: object) -> None:
        raise AttributeError(f"{type(instance).__name__}.{self.name} cannot be set: it is not here. Use {self.words}.")


def answer_members(kind: Class, lightning: str) -> Class:
    """Give a class an answer for each member of Lightning's class `lightning` that it does not have."""
    absent = NotToSet if lightning == "Trainer" else Absent
    hooks = FORMER_HOOKS if lightning == "Callback" else {}
    answers: dict[str, object] = {name: Former(name, words) for name, words in hooks.items()}
    answers |= {name: absent(name, words) for name, words in _words_of(lightning).items() if name.isidentifier()}
    answers |= {name: Alias(name, path) for name, path in ALIASES.get(lightning, {}).items()}
    own = set(dir(kind))
    for name, answer in answers.items():
        if name not in own:
            setattr(kind, name, answer)
    for name, found in [*vars(kind).items()] if lightning == "Trainer" else ():
        if isinstance(found, property) and found.fset is None:
            setattr(kind, name, found.setter(partial(_refuse_to_set, name)))
    return kind


def _refuse_to_set(name: str, instance: Any, value: object) -> None:
    kind = type(instance)
    if name in signature(kind.__init__).parameters:
        raise AttributeError(f"{kind.__name__}.{name} cannot be set: give {kind.__name__}({name}=...).")
    raise AttributeError(f"{kind.__name__}.{name} cannot be set: it follows from the run.")


def member_words(lightning: str, name: str) -> str | None:
    """Return what to use instead of a member of Lightning's class; None for a name without words."""
    if lightning == "ParallelStrategy" and name in COLLECTIVES:
        return COLLECTIVES[name]
    if lightning == "ParallelStrategy" and name in ALIASES["Strategy"]:
        return f"strategy.{ALIASES['Strategy'][name]}"
    return _words_of(lightning).get(name)


def strategy_member(strategy: Any, name: str) -> Any:
    """Return the value of a member of Lightning's strategies that a strategy does not have.

    Raises:
        AttributeError: it has no value here; the message says what to use.
    """
    if name in ALIASES["Strategy"]:
        return attrgetter(ALIASES["Strategy"][name])(strategy)
    if name in COLLECTIVES:
        from trainer.compat import collectives

        return partial(getattr(collectives, name), strategy.processes)
    kind = type(strategy).__name__
    if any(name in vars(one).get("__annotations__", {}) for one in type(strategy).__mro__):
        raise AttributeError(f"{kind}.{name} exists from the start of a run: fit and the like set it.")
    words = member_words("ParallelStrategy", name)
    raise AttributeError(
        f"{kind!r} object has no attribute {name!r}"
        if words is None
        else f"{kind} has no attribute {name!r}. Use {words}."
    )


def uncalled_overrides(plug: object) -> list[str]:
    """Return a problem for each method of a user's class that overrides one of Lightning's that is not here."""
    kinds = type(plug).__mro__
    answers = {name: one for kind in kinds for name, one in vars(kind).items() if isinstance(one, Absent)}
    return [
        f"{type(plug).__name__}.{name} would never be called. Use {answer.words}."
        for name, answer in sorted(answers.items())
        if isinstance(getattr_static(plug, name), FunctionType) and not isinstance(answer, Former)
    ]


def is_default(lightning: str, name: object, value: object) -> bool:
    """Whether an argument that the class does not have is given with Lightning's default, which changes nothing."""
    defaults = DEFAULTS.get(THEIRS.get(lightning, lightning), {}).get(str(name), ())
    return any(type(value) is type(one) and value == one for one in defaults)


def argument_words(lightning: str) -> dict[str, str]:
    """Return what to use instead of arguments of the constructor of Lightning's class, by name."""
    of_class = {name[1:-1]: words for name, words in _words_of(lightning).items() if name.startswith("(")}
    return {**TRAINER_ARGUMENTS, **of_class} if lightning == "Trainer" else of_class


def by_name(kind: str, own: Sequence[str], given: Sequence[object], options: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with the arguments given by position beyond those of the constructor of the class `kind`.

    Their names are those that Lightning's class has at these places.

    Args:
        own: the arguments that the constructor takes by position.
        given: the arguments by position.

    Raises:
        ArgumentError: Lightning's class takes none at such a place, or the argument is in `options` too.
    """
    rows = SURFACE.get(THEIRS.get(kind, kind), "").split()
    theirs = [row[1:-1] for row in rows if row.startswith("(")]
    for place, value in enumerate(given[len(own) :], len(own)):
        if place >= len(theirs):
            taken = f"({', '.join(own)}), give others as name=value" if own else "no argument"
            raise ArgumentError(f"{kind}() takes {taken} by position; {len(given)} were given.")
        if theirs[place] in options:
            raise ArgumentError(f"{kind}() got {theirs[place]} twice, by position and by name: give it once.")
        options[theirs[place]] = value
    return options


def _words_of(lightning: str) -> dict[str, str]:
    return WORDS.get(THEIRS.get(lightning, lightning), {})
