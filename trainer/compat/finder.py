"""Serve the modules that Lightning has and this package has not, such as `trainer.loggers`, and their names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

PACKAGE = "trainer"
NAMESAKE = "trainer.pytorch"
"""Another name of the package, for `lightning.pytorch`."""
OWN = (f"{PACKAGE}.callbacks.", f"{PACKAGE}.strategies.")
"""Packages with files of this package's whose names are Lightning's, too: these have further names in them."""
OWN_PACKAGES = tuple(f"{PACKAGE}.{name}" for name in ("metrics", "data", "trainer", "tuner", "tuner.lr_finder"))
"""Packages and files of this package's of which Lightning had, or has, others with further names."""
PACKAGES = ("callbacks", "strategies", "cli", "tuner")
"""Packages that are an attribute of `trainer`, though nothing has imported them yet."""

ELSEWHERE = (
    "the package that defines it, if Lightning's module only imported it; else a name of the docs' page "
    "'lightning-names', which has no such name"
)
"""The words for a name of which nothing else is known."""


class LightningModules:
    """Finds Lightning's modules by their names in the table.

    Args:
        namesakes: find modules below `trainer.pytorch`; False: all others.
    """

    def __init__(self, namesakes: bool) -> None:
        self.namesakes = namesakes

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of one of Lightning's modules; None for any other name."""
        if not fullname.startswith(f"{PACKAGE}.") or fullname.startswith(f"{PACKAGE}.compat"):
            return None
        if self.namesakes and (fullname.startswith(OWN) or fullname in OWN_PACKAGES):
            return _with_lightnings_names(fullname, path)
        if f"{fullname}.".startswith(f"{NAMESAKE}.") != self.namesakes:
            return None
        if not self.namesakes:
            from trainer.compat.names import MODULES

            if fullname.partition(".")[2] not in MODULES.split():
                return None
        loader: Any = self
        return ModuleSpec(fullname, loader, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return LightningPath(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put this package's own module in the place of one below `trainer.pytorch`, or name what `import *` takes."""
        from trainer.compat.names import EXPORTS

        if inside := EXPORTS.get(module.__name__.partition(".")[2]):
            vars(module)["__all__"] = inside.split()
        if f"{module.__name__}.".startswith(f"{NAMESAKE}."):
            sys.modules[module.__name__] = import_module(PACKAGE + module.__name__.removeprefix(NAMESAKE))


class _OwnFile(SourceFileLoader):
    """Loads a file of this package's, in which Lightning's names are found, too."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the file, and have the module answer for names that it lacks."""
        super().exec_module(module)

        def __getattr__(name: str) -> Any:  # noqa: N807
            if name.startswith("__"):
                raise AttributeError(name)
            return lightning_name(module, name)

        vars(module).setdefault("__getattr__", __getattr__)


def _with_lightnings_names(fullname: str, path: Any) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and spec.origin is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _OwnFile(fullname, spec.origin)
    return spec


class LightningPath(ModuleType):
    """A module of Lightning's: all names of the table can be imported from it."""

    def __getattr__(self, name: str) -> Any:
        from trainer.compat.names import NAMES

        if name.startswith("__") and name not in NAMES:
            raise AttributeError(name)
        return lightning_name(self, name)

    def __dir__(self) -> list[str]:
        return sorted(vars(self).get("__all__", vars(self)))


def install() -> None:
    """Serve Lightning's modules to `import`."""
    if not any(isinstance(finder, LightningModules) for finder in sys.meta_path):
        # Python would find the files of `trainer` below `trainer.pytorch`, too, and import them a second time.
        sys.meta_path.insert(0, LightningModules(namesakes=True))
        # Last, so that a file of this package comes first.
        sys.meta_path.append(LightningModules(namesakes=False))


def lightning_name(package: ModuleType, name: str) -> Any:
    """Return what one of Lightning's names stands for, for `__getattr__` of a module.

    Raises:
        AttributeError, ImportError: the name is not here; see `errors.no_such_name`.
    """
    from trainer.compat import accelerate
    from trainer.compat.names import MODULES, NAMES
    from trainer.errors import RENAMED, did_you_mean, no_such_name, public_names

    inside = f"{package.__name__}.{name}".partition(".")[2]
    target = NAMES.get(inside, NAMES.get(name, ""))
    home, _, attribute = target.partition(":")
    if attribute and " " not in target:
        return getattr(import_module(home), attribute)
    if inside in MODULES.split() or (package.__name__ == PACKAGE and name in PACKAGES):
        return import_module(f"{PACKAGE}.{inside}")
    if not target:
        packages = [import_module(f"{PACKAGE}.{one}") for one in ("callbacks", "strategies")]
        found = next((vars(one)[name] for one in packages if isinstance(vars(one).get(name), type)), None)
        current = RENAMED.get(name, name)
        if package.__name__ == PACKAGE:
            target = next((f"{one.__name__}.{current}" for one in packages if current in public_names(one)), "")
            target = target or accelerate.NAMES.get(name, "")
        if found is not None and (isinstance(package, LightningPath) or package.__name__.startswith(OWN)):
            return found
        target = target or _words_of_package(package.__name__.partition(".")[2])
        of_a_file = not hasattr(package, "__path__")  # such as what the file imports, to which nothing is compared
        known = vars(package).get("__all__", ()) if of_a_file else public_names(package)
        unlike_ours = not name.startswith("__") and not did_you_mean(name, known)
        if not target and unlike_ours and package.__name__ != PACKAGE:
            target = ELSEWHERE
    raise no_such_name(package, name, target, depth=3)


def _words_of_package(inside: str) -> str:
    """Return what to use instead of names of a package of Lightning's; empty if that is not known."""
    from trainer.compat.names import PACKAGES_IN_WORDS

    alike = inside.removeprefix("fabric.")  # its packages have the names of Lightning's
    rows = ((one, *row) for one in (alike, inside) for row in PACKAGES_IN_WORDS.items())
    return next((text for one, package, text in rows if f"{one}.".startswith(f"{package}.")), "")
