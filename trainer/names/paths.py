"""Find Lightning's modules, such as `trainer.loggers`, and names that modules here lack, by asking `compat`."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

NAMESAKE = "trainer.pytorch."
"""Another name of the package, for `lightning.pytorch`."""
WITH_ANSWERS = ("callbacks", "strategies", "cli", "data", "trainer", "tuner", "tuner.lr_finder")
"""Packages and files of this package's of which Lightning has others with further names."""
FOLDERS_WITH_ANSWERS = ("trainer.callbacks.", "trainer.strategies.")
"""Packages of which each file is such a file."""


class ThemBefore:
    """Finds modules before Python does: those below `trainer.pytorch`, and files that have answers for further names.

    Python would find the files of `trainer` below `trainer.pytorch`, too, and import them a second time.
    """

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of such a module; None for any other name."""
        if f"{fullname}.".startswith(NAMESAKE):
            from trainer.compat.finder import namesake

            return namesake(fullname)
        if fullname.startswith(FOLDERS_WITH_ANSWERS) or fullname.removeprefix("trainer.") in WITH_ANSWERS:
            spec = PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin is not None and type(spec.loader) is SourceFileLoader:
                spec.loader = _FileWithAnswers(fullname, spec.origin)
            return spec
        return None


class ThemAfter:
    """Finds modules that Python does not: Lightning's."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of one of Lightning's modules; None for any other name."""
        if not fullname.startswith("trainer."):
            return None
        from trainer.compat.finder import module_of_lightning

        return module_of_lightning(fullname)


class _FileWithAnswers(SourceFileLoader):
    """Loads a file of this package's."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the file, and have the module answer for names that it lacks."""
        super().exec_module(module)

        def __getattr__(name: str) -> Any:  # noqa: N807
            if name.startswith("__"):
                raise AttributeError(name)
            from trainer.compat.finder import lightning_name

            return lightning_name(module, name)

        vars(module).setdefault("__getattr__", __getattr__)


def install() -> None:
    """Serve Lightning's modules to `import`."""
    finders: list[Any] = sys.meta_path
    if ThemBefore not in finders:
        finders.insert(0, ThemBefore)
        finders.append(ThemAfter)
