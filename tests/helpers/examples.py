"""Import the examples' files as modules, even where other modules have the same names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from tests.helpers.processes import ROOT

NAMES = ("data", "model", "module")
"""Names under which the files of an example import each other."""


def example_module(example: str, name: str) -> ModuleType:
    """Import `examples/<example>/<name>.py` and what it imports from its own folder."""
    folder = str(ROOT / "examples" / example)
    former = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
    sys.path.insert(0, folder)
    try:
        return import_module(name)
    finally:
        sys.path.remove(folder)
        for own in NAMES:
            sys.modules.pop(own, None)
        sys.modules.update(former)


@contextmanager
def restored_imports() -> Iterator[None]:
    """Remove, after the block, the folders that it put on the path and the examples and files that it imported."""
    path, before = list(sys.path), set(sys.modules)
    folders = (os.getcwd(), str(ROOT / "examples"))
    try:
        yield
    finally:
        # Of all before one is removed: a folder without __init__.py looks for its place in the path and in its parent.
        places = {name: _place_of(sys.modules[name]) for name in set(sys.modules) - before}
        sys.path[:] = path
        for name, place in places.items():
            if place.startswith(folders) and "site-packages" not in place:  # of an environment in the folder
                del sys.modules[name]


def _place_of(module: object) -> str:
    """Return the file of a module, or the folder of one without __init__.py; empty if it has none."""
    return str(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), ""))
