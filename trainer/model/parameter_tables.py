"""Notice parameters that were replaced, added or removed since the module was set up."""

from __future__ import annotations

from itertools import chain
from operator import is_

from torch import nn


class ParameterTables:
    """The parameters and submodules of a module, compared by identity in torch's own tables.

    Going through `module.parameters()` would cost several times as much.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = dict(module.named_parameters())
        self._views = [table.values() for one in module.modules() for table in (one._modules, one._parameters)]
        self._objects = list(chain.from_iterable(self._views))

    def unchanged(self) -> bool:
        """Whether all tables hold the same objects as before."""
        objects = list(chain.from_iterable(self._views))
        return len(objects) == len(self._objects) and all(map(is_, objects, self._objects))

    def same_parameters(self) -> bool:
        """Whether the module has the same parameters as before, perhaps in other places and under other names."""
        return set(map(id, self._module.parameters())) == set(map(id, self._parameters.values()))

    def new(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the module did not have before, by name."""
        known = set(map(id, self._parameters.values()))
        return {name: p for name, p in self._module.named_parameters() if id(p) not in known}

    def changes(self) -> dict[str, list[str]]:
        """Return the names of parameters that were "added", "removed" and "replaced"."""
        before, new, now = self._parameters, self.new(), set(map(id, self._module.parameters()))
        return {
            "added": [name for name in new if name not in before],
            "removed": [name for name, p in before.items() if id(p) not in now and name not in new],
            "replaced": [name for name in new if name in before],
        }


def describe_changes(changes: dict[str, list[str]]) -> str:
    """Return changes, each with the names of its parameters, as a clause such as "a was added; b, c were removed"."""
    clauses = [
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {how}" for how, names in changes.items() if names
    ]
    return "; ".join(clauses)
