"""Answer a name that is not here: by the value that it has in Lightning, or by an error that names the fix."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

from trainer.compat.names import (
    ALIASES,
    COLLECTIVES,
    DEFAULTS,
    ENGINE_ARGUMENTS,
    FORMER_HOOKS,
    FURTHER_ARGUMENTS,
    OTHER_PRECISIONS,
    OTHER_STRATEGIES,
    STRATEGY_OPTIONS,
    THEIRS,
    TRAINER_ARGUMENTS,
    WORDS,
)

__all__ = ["DEFAULTS", "FURTHER_ARGUMENTS"]


def their_name(kind: str) -> str:
    """Return Lightning's name for a class of ours."""
    return THEIRS.get(kind, kind)


def member(owner: Any, name: str) -> Any:
    """Return the value of a member of Lightning's class that an object does not have.

    Raises:
        AttributeError: it has no value here; the message says what to use, if that is known.
    """
    theirs = [their_name(kind.__name__) for kind in _ours(type(owner))]
    path = next((ALIASES[one][name] for one in theirs if name in ALIASES.get(one, {})), None)
    if path is not None:
        return attrgetter(path)(owner)
    if "ParallelStrategy" in theirs and name in COLLECTIVES:
        from trainer.compat import collectives

        return partial(getattr(collectives, name), owner.processes)
    words = words_of_members(type(owner)).get(name)
    if words is None:
        return object.__getattribute__(owner, name)  # raises Python's own error
    raise AttributeError(f"{type(owner).__name__} has no attribute {name!r}. Use {words}.")


def words_of_members(kind: type) -> dict[str, str]:
    """Return what to use instead of the members of a class's namesakes in Lightning and Accelerate, by name."""
    found: dict[str, str] = {}
    for one in reversed(_ours(kind)):
        theirs = their_name(one.__name__)
        found |= {name: words for name, words in WORDS.get(theirs, {}).items() if name.isidentifier()}
        if theirs == "ParallelStrategy":
            found |= COLLECTIVES | {name: f"strategy.{path}" for name, path in ALIASES[theirs].items()}
    return found


def words_in(table: str) -> dict[str, str]:
    """Return what to use instead of others' names, by name; `table` as in `names.misses.words_for`."""
    if table.endswith("()"):
        return argument_words(table.removesuffix("()"))
    return {"precision": OTHER_PRECISIONS, "strategy": OTHER_STRATEGIES, "hook": FORMER_HOOKS}[table]


def argument_words(kind: str) -> dict[str, str]:
    """Return what to use instead of arguments of the constructor of a class's namesakes, by name."""
    more = {"Trainer": TRAINER_ARGUMENTS, "Engine": ENGINE_ARGUMENTS, "Strategy": STRATEGY_OPTIONS}
    rows = WORDS.get(their_name(kind), {}).items()
    return {**{name[1:-1]: words for name, words in rows if name.startswith("(")}, **more.get(kind, {})}


def _ours(kind: type) -> list[type]:
    return [one for one in kind.__mro__ if one.__module__.startswith("trainer.")]
