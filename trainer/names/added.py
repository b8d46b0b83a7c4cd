"""Names of callbacks, loggers, strategies and precisions that installed packages add by entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from trainer.errors import ConfigError

V = TypeVar("V")


class Table(dict[str, V]):
    """This package's own values by name; a name that is none of them is looked for among a group's entry points.

    Nothing is imported, and no metadata is read, before such a name is asked for.
    """

    def __init__(self, own: dict[str, V], group: str) -> None:
        super().__init__(own)
        self._group = group

    def __missing__(self, name: str) -> V:
        if name not in added_names(self._group):
            raise KeyError(name)
        value: V = _loaded(added_names(self._group)[name])
        self[name] = value
        return value

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in added_names(self._group)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, or the default where there is none."""
        try:
            return self[name]
        except KeyError:
            return default


@cache
def added_names(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name: "trainer.callbacks", "trainer.strategies" or "trainer.precisions"."""
    return {one.name: one for one in entry_points(group=group)}


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"{entry.name!r} is of the package {entry.dist.name if entry.dist else entry.value}, which cannot be "
            f"imported: {type(error).__name__}: {error}"
        ) from error
