"""Answer names that are not here by the tables of `compat`, which are imported at the first such name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import getattr_static, signature
from typing import TYPE_CHECKING, Any

from trainer.names.aliases import Alias


class Answers:
    """Base of classes that Lightning or Accelerate also has: the error for a name of theirs says what to use.

    `dir` shows none of these names. A name without words fails as it does with any other object.
    """

    if not TYPE_CHECKING:  # with it, a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a second time, for the error of the property
            if name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            bases = iter(type(self).__mro__)
            any(vars(base).get("__getattr__") is Answers.__getattr__ for base in bases)  # stops there
            for base in bases:  # a user's class may have another base that answers, such as nn.Module
                if "__getattr__" in vars(base) and base is not Answers:
                    try:  # not `suppress`, which torch 2.9 does not compile
                        return base.__getattr__(self, name)
                    except AttributeError:
                        continue
            from trainer.compat.answers import member

            return member(self, name)


def refuse_to_set(owner: object, name: str) -> None:
    """Raise for an attribute that follows from an argument or from the run, or that only Lightning's class has.

    Raises:
        AttributeError: says what to do instead.
    """
    kind = type(owner)
    found = getattr_static(kind, name, refuse_to_set)
    is_argument = False
    if isinstance(found, Alias):
        is_argument, reason = found.path.startswith("settings."), f"it is the same as {found.path}"
    elif isinstance(found, property) and found.fset is None and found.fget.__module__.startswith("trainer."):
        is_argument, reason = name in signature(kind.__init__).parameters, "it follows from the run"
    elif found is refuse_to_set and (words := member_words(kind, [name])):
        reason = f"it is Lightning's. Use {words[name]}"
    else:
        return
    if is_argument:
        reason = f"give {kind.__name__}({name}=...)"
    raise AttributeError(f"{kind.__name__}.{name} cannot be set: {reason}.")


def member_words(kind: type, names: Iterable[str]) -> dict[str, str]:
    """Return what to use instead of members that only a class's namesake has, for the given names."""
    if not (wanted := [*names]):
        return {}
    from trainer.compat import answers

    return {name: words for name in wanted if (words := answers.member_words(kind, name)) is not None}


def words_for(table: str, names: Iterable[str]) -> dict[str, str]:
    """Return what to use instead of others' names, for the given names that a table has.

    Args:
        table: "precision", "strategy", "hook", or "Trainer()" and the like: arguments of this class's constructor.
    """
    if not (wanted := {*names}):
        return {}
    from trainer.compat.answers import words_in

    return {name: words for name, words in words_in(table).items() if name in wanted}


def same_strategy(name: str) -> tuple[str, dict[str, bool]]:
    """Return the name here of a strategy that has another one in Lightning, and its options; else the name itself."""
    from trainer.compat.names import SAME_STRATEGIES

    return next((same for one, same in SAME_STRATEGIES.items() if re.fullmatch(one, name)), (name, {}))


def is_default(kind: str, name: object, value: object) -> bool:
    """Whether an argument that a class does not have is given with Lightning's default, which changes nothing."""
    from trainer.compat.names import DEFAULTS, THEIRS

    defaults = DEFAULTS.get(THEIRS.get(kind, kind), {}).get(str(name), ())
    return any(type(value) is type(one) and value == one for one in defaults)
