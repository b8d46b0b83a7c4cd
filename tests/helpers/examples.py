"""Import the examples' files as modules, even where other modules have the same names."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from tests.helpers.processes import ROOT

NAMES = ("data", "model", "module")
"""As the files of an example import each other."""


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
