"""Serve the modules that Lightning has and this package has not, such as `trainer.loggers`, and their names."""

from __future__ import annotations

import re
import sys
from abc import ABCMeta
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from trainer.compat import accelerate
from trainer.compat.names import EXPORTS, MODULES, NAMES, PACKAGES_IN_WORDS
from trainer.errors import ConfigError, did_you_mean, no_such_name, public_names
from trainer.names.states import runs_as_lightning

PACKAGE = "trainer"
NAMESAKE = "trainer.pytorch"
"""Another name of the package, for `lightning.pytorch`."""
PACKAGES = ("callbacks", "strategies", "cli", "tuner")
"""Packages that are an attribute of `trainer`, though nothing has imported them yet."""

ELSEWHERE = "the package that defines it, if Lightning's module only imported it; else see the page 'lightning-names'"
"""The words for a name that is otherwise unknown."""


class _Loader:
    """Makes modules of Lightning's."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return LightningPath(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put this package's own module in the place of one below `trainer.pytorch`, or name what `import *` takes."""
        if inside := EXPORTS.get(module.__name__.partition(".")[2]):
            vars(module)["__all__"] = inside.split()
        if f"{module.__name__}.".startswith(f"{NAMESAKE}."):
            sys.modules[module.__name__] = import_module(PACKAGE + module.__name__.removeprefix(NAMESAKE))


def namesake(fullname: str) -> ModuleSpec:
    """Return the spec of a module below `trainer.pytorch`."""
    loader: Any = _Loader()
    return ModuleSpec(fullname, loader, is_package=True)


def module_of_lightning(fullname: str) -> ModuleSpec | None:
    """Return the spec of one of Lightning's modules, by its name in the table; None for any other name."""
    inside = fullname.partition(".")[2]
    return namesake(fullname) if {inside, inside.removeprefix("fabric.")} & {*MODULES.split()} else None


class LightningPath(ModuleType):
    """A module of Lightning's: all names of the table can be imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in NAMES:
            raise AttributeError(name)
        return lightning_name(self, name)

    def __dir__(self) -> list[str]:
        return sorted(vars(self).get("__all__", vars(self)))


def lightning_name(package: ModuleType, name: str) -> Any:
    """Return what one of Lightning's names stands for, for `__getattr__` of a module.

    Raises:
        AttributeError, ImportError: the name is not here; see `errors.no_such_name`.
    """
    inside = f"{package.__name__}.{name}".partition(".")[2]
    target = NAMES.get(inside, NAMES.get(name, ""))
    if ":" in target and " " not in target:
        return named(target)
    if inside in MODULES.split() or (package.__name__ == PACKAGE and name in PACKAGES):
        return import_module(f"{PACKAGE}.{inside}")
    if not target:
        packages = [import_module(f"{PACKAGE}.{one}") for one in ("callbacks", "strategies")]
        found = next((vars(one)[name] for one in packages if isinstance(vars(one).get(name), type)), None)
        of_our_files = package.__name__.startswith((f"{PACKAGE}.callbacks.", f"{PACKAGE}.strategies."))
        if found is not None and (isinstance(package, LightningPath) or of_our_files):
            return found
        target = _words_for(package, name, packages)
    if target not in ("", ELSEWHERE) and runs_as_lightning():
        return answered_at_use(name, target)
    raise no_such_name(package, name, target, depth=3)


def named(target: str) -> Any:
    """Return the object that a table names as "module:name"."""
    home, _, attribute = target.partition(":")
    return getattr(import_module(home), attribute)


def _words_for(package: ModuleType, name: str, packages: list[ModuleType]) -> str:
    """Return what to use instead of a name that is in no table of Lightning's; empty if that is not known."""
    if package.__name__ == PACKAGE:
        home = next((one.__name__ for one in packages if name in public_names(one)), "")
        return f"{home}.{name}" if home else accelerate.NAMES.get(name, "")
    if words := _words_of_package(package.__name__.partition(".")[2]):
        return words
    of_a_file = not hasattr(package, "__path__")  # whose imports are not compared
    known = vars(package).get("__all__", ()) if of_a_file else public_names(package)
    return "" if name.startswith("__") or did_you_mean(name, known) else ELSEWHERE


def _words_of_package(inside: str) -> str:
    """Return what to use instead of names of a package of Lightning's; empty if that is not known."""
    alike = inside.removeprefix("fabric.")  # its packages have the names of Lightning's
    rows = ((one, *row) for one in (alike, inside) for row in PACKAGES_IN_WORDS.items())
    return next((text for one, package, text in rows if f"{one}.".startswith(f"{package}.")), "")


# -- names that are imported, subclassed and compared, and fail when they are used ------------------------------------

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

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if cls.mro()[1].__name__ == "Accelerator":  # packages make one of their own at import, for its name
            return super().__call__(*args, **options)
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
