"""Stand in for names that are not here: they are imported, subclassed and compared, and fail when they are used."""

from __future__ import annotations

import re
from abc import ABCMeta
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NoReturn

from trainer.errors import ConfigError

_AVAILABLE = re.compile("_(.+)_AVAILABLE")
_GREATER_EQUAL = re.compile(r"_([A-Z_]+)_GREATER_EQUAL_(\d+(?:_\d+)*)")


def answered_at_use(name: str, words: str) -> Any:
    """Return what a name of Lightning's that is not here can be imported as.

    Args:
        words: what to use instead.
    """
    if found := _AVAILABLE.fullmatch(name):
        return find_spec(found[1].lower()) is not None
    if found := _GREATER_EQUAL.fullmatch(name):
        return _is_at_least(found[1].lower(), [*map(int, found[2].split("_"))])
    if name.endswith(("Registry", "_REGISTRY")):
        return _Registry()
    base = next((kind for end, kind in _BASES.items() if name.endswith(end)), object)
    message = f"{name} is not here. Use {words}."
    return _AtUse(name, (base,), {"__module__": __name__, "__doc__": message, "_message": message})


_BASES = {"Warning": Warning, "Exception": Exception, "Error": Exception}


class _AtUse(ABCMeta):
    """The class of a name that is not here: a base of others, which nothing is an instance of."""

    _message: str

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        raise ConfigError(cls._message)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(name if name.startswith("_") else f"{cls.__name__}.{name}: {cls._message}")

    def __getitem__(cls, parameters: Any) -> type:
        return cls


class _Registry(dict[str, Any]):
    """Takes what packages register for Lightning to find; nothing here looks for it."""

    def register(self, name: str, target: Any = None, *args: Any, **options: Any) -> Callable[[Any], Any] | Any:
        """Register a class; without one, return the decorator that does."""
        if target is None:
            return lambda decorated: self.setdefault(name, decorated)
        return self.setdefault(name, target)


def _is_at_least(package: str, least: list[int]) -> bool:
    try:
        return [*map(int, re.findall(r"\d+", version(package)))] >= least
    except PackageNotFoundError:
        return False
