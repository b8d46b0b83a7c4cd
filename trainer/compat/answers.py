"""Answer a name that is not here: by the value that it has in Lightning, or by an error that names the fix."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

from trainer.compat.finder import named
from trainer.compat.names import (
    BESIDE_VIEWS,
    COLLECTIVES,
    ENGINE_ARGUMENTS,
    FORMER_HOOKS,
    OTHER_PRECISIONS,
    OTHER_STRATEGIES,
    STRATEGY_ALIASES,
    STRATEGY_OPTIONS,
    THEIRS,
    TRAINER_ARGUMENTS,
    VIEWED,
    WORDS,
)


def member(owner: Any, name: str) -> Any:
    """Return the value of a member of Lightning's class that an object does not have.

    Raises:
        AttributeError: it has no value here; the message says what to use, if that is known.
    """
    kind = type(owner).__name__
    theirs = _namesakes(type(owner))
    if "ParallelStrategy" in theirs:
        if name in STRATEGY_ALIASES:
            return attrgetter(STRATEGY_ALIASES[name])(owner)
        if name in COLLECTIVES:
            from trainer.compat import collectives

            return partial(getattr(collectives, name), owner.processes)
    if VIEWED.get(name) in theirs:
        return named("trainer.compat.inside:VIEWS")[name](owner)
    words = _words_of(theirs, name)
    if words is None:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    raise AttributeError(f"{kind} has no attribute {name!r}. Use {words}.")


def member_words(kind: type, name: str) -> str | None:
    """Return what to use instead of a member of a class's namesakes in Lightning and Accelerate; None: not known."""
    return _words_of(_namesakes(kind), name)


def _words_of(theirs: list[str], name: str) -> str | None:
    for one in theirs:
        if name in WORDS.get(one, ()):
            return WORDS[one][name]
    if "Trainer" in theirs and VIEWED.get(name) == "Trainer":
        return BESIDE_VIEWS
    if "ParallelStrategy" not in theirs:
        return None
    return f"strategy.{STRATEGY_ALIASES[name]}" if name in STRATEGY_ALIASES else COLLECTIVES.get(name)


def words_in(table: str) -> dict[str, str]:
    """Return what to use instead of others' names, by name; `table` as in `names.misses.words_for`."""
    if table.endswith("()"):
        return argument_words(table.removesuffix("()"))
    return {"precision": OTHER_PRECISIONS, "strategy": OTHER_STRATEGIES, "hook": FORMER_HOOKS}[table]


def argument_words(kind: str) -> dict[str, str]:
    """Return what to use instead of arguments of the constructor of a class's namesakes, by name."""
    more = {"Trainer": TRAINER_ARGUMENTS, "Engine": ENGINE_ARGUMENTS}
    of_kind = STRATEGY_OPTIONS if kind.endswith("Strategy") else more.get(kind, {})
    rows = WORDS.get(THEIRS.get(kind, kind), {})
    if kind.endswith("Strategy"):
        rows = {**rows, **WORDS["ParallelStrategy"]}
    return {**{name[1:-1]: words for name, words in rows.items() if name.startswith("(")}, **of_kind}


def _namesakes(kind: type) -> list[str]:
    """Return the names that Lightning has for a class and its bases."""
    ours = [one.__name__ for one in kind.__mro__ if one.__module__.startswith("trainer.")]
    return [THEIRS.get(name, name) for name in ours]
