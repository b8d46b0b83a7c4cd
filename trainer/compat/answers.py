"""Answer a name that is not here: by the value that it has in Lightning, or by an error that names the fix."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

from trainer.compat.names import (
    ALIASES,
    COLLECTIVES,
    ENGINE_ARGUMENTS,
    FORMER_HOOKS,
    OTHER_PRECISIONS,
    OTHER_STRATEGIES,
    STRATEGY_OPTIONS,
    THEIRS,
    TRAINER_ARGUMENTS,
    WORDS,
)


def member(owner: Any, name: str) -> Any:
    """Return the value of a member of Lightning's class that an object does not have.

    Raises:
        AttributeError: it has no value here; the message says what to use, if that is known.
    """
    theirs = [THEIRS.get(kind.__name__, kind.__name__) for kind in _ours(type(owner))]
    path = next((ALIASES[one][name] for one in theirs if name in ALIASES.get(one, {})), None)
    if path is not None:
        return attrgetter(path)(owner)
    if "ParallelStrategy" in theirs and name in COLLECTIVES:
        from trainer.compat import collectives

        return partial(getattr(collectives, name), owner.processes)
    words = member_words(type(owner), name)
    kind = type(owner).__name__
    if words is None:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    raise AttributeError(f"{kind} has no attribute {name!r}. Use {words}.")


def member_words(kind: type, name: str) -> str | None:
    """Return what to use instead of a member of a class's namesakes in Lightning and Accelerate; None: not known."""
    for one in _ours(kind):
        theirs = THEIRS.get(one.__name__, one.__name__)
        if name in WORDS.get(theirs, {}):
            return WORDS[theirs][name]
        if theirs == "ParallelStrategy" and name in COLLECTIVES:
            return COLLECTIVES[name]
        if name in ALIASES.get(theirs, {}):
            return f"strategy.{ALIASES[theirs][name]}"
    return None


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


def _ours(kind: type) -> list[type]:
    return [one for one in kind.__mro__ if one.__module__.startswith("trainer.")]
