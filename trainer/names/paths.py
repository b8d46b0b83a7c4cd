"""Find Lightning's modules, such as `trainer.loggers`, and names that modules here lack, by asking `compat`."""

from __future__ import annotations

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMESAKE = "trainer.pytorch."
"""Another name of the package, for `lightning.pytorch`."""


class NamesakeFinder:
    """Finds the modules below `trainer.pytorch` before Python does, which would import the files of `trainer` again."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of such a module; None for any other name."""
        if not fullname.startswith(NAMESAKE):
            return None
        from trainer.compat.finder import namesake

        return namesake(fullname)


class LightningFinder:
    """Finds modules of Lightning's, after Python has not found them."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of one of Lightning's modules; None for any other name."""
        if not fullname.startswith("trainer."):
            return None
        from trainer.compat.finder import module_of_lightning

        finders: list[Any] = sys.meta_path
        if f"{fullname}." == NAMESAKE and NamesakeFinder not in finders:
            finders.insert(0, NamesakeFinder)
        return module_of_lightning(fullname)


def install() -> None:
    """Serve Lightning's modules to `import`."""
    finders: list[Any] = sys.meta_path
    if LightningFinder not in finders:
        finders.append(LightningFinder)


def answer_further_names(package: str, *files: str) -> None:
    """Have a package, and these files in it, answer for names that only Lightning's module of the same name has."""
    for file in ("", *files):
        module = sys.modules[f"{package}.{file}".removesuffix(".")]
        vars(module)["__getattr__"] = partial(_further_name, module)


def _further_name(module: ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from trainer.compat.finder import lightning_name

    return lightning_name(module, name)
