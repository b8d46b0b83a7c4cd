"""Serve the modules that Lightning has and this package has not, such as `trainer.loggers`, and their names."""

from __future__ import annotations

import os
import platform
import re
import sys
from abc import ABCMeta
from functools import cache, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from trainer.compat import accelerate
from trainer.compat.names import MODULES, NAMES, PACKAGES_IN_WORDS
from trainer.errors import ConfigError, did_you_mean, no_such_name, public_names

PACKAGE = "trainer"
NAMESAKE = "trainer.pytorch"
"""Another name of the package, for `lightning.pytorch`."""

ELSEWHERE = "the package that defines it, if Lightning's module only imported it; else see the page 'lightning-names'"
"""The words for a name that is not of Lightning 2."""

_LISTED = {name for names in MODULES.values() for name in names}
"""The names of all of Lightning's modules."""


class _Loader:
    """Makes modules of Lightning's."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return LightningPath(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Put this package's own module in the place of one below `trainer.pytorch`, or name what `import *` takes."""
        listed = MODULES.get(module.__name__.partition(".")[2], [])
        here = (name for name in listed if _is_object(NAMES.get(name, ":")))
        vars(module)["__all__"] = [name for name in here if not name.startswith("_")]
        if f"{module.__name__}.".startswith(f"{NAMESAKE}."):
            sys.modules[module.__name__] = import_module(PACKAGE + module.__name__.removeprefix(NAMESAKE))


def namesake(fullname: str) -> ModuleSpec:
    """Return the spec of a module below `trainer.pytorch`."""
    loader: Any = _Loader()
    return ModuleSpec(fullname, loader, is_package=True)


def module_of_lightning(fullname: str) -> ModuleSpec | None:
    """Return the spec of one of Lightning's modules, by its name in the table; None for any other name."""
    return namesake(fullname) if fullname.partition(".")[2] in MODULES else None


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
        AttributeError, ImportError: Lightning has no such name; see `errors.no_such_name`.
    """
    own = f"{package.__name__}.{name}"
    is_ours = hasattr(package, "__path__") and not isinstance(package, LightningPath)
    if is_ours and not name.startswith("_") and find_spec(own) is not None:
        return import_module(own)  # `from trainer.cli import main` asks here before it imports the module
    _set_rank_of_lightning_utilities()
    inside = own.partition(".")[2]
    target = NAMES.get(inside.removeprefix("fabric."), NAMES.get(name, ""))
    if _is_object(target):
        return named(target)
    if inside in MODULES:
        return import_module(f"{PACKAGE}.{inside}")
    if (value := flag(name)) is not None:
        return value
    packages = [import_module(f"{PACKAGE}.{one}") for one in ("callbacks", "strategies")]
    found = next((vars(one)[name] for one in packages if isinstance(vars(one).get(name), type)), None)
    of_our_files = package.__name__.startswith((f"{PACKAGE}.callbacks.", f"{PACKAGE}.strategies."))
    if not target and found is not None and (isinstance(package, LightningPath) or of_our_files):
        return found
    if words := target or _words_for(package, name):
        return answered_at_use(package.__name__, name, words)
    raise no_such_name(package, name, _advice(package, name, packages), depth=3)


def _is_object(target: str) -> bool:
    return ":" in target and " " not in target


def named(target: str) -> Any:
    """Return the object that a table names as "module:name"."""
    home, _, attribute = target.partition(":")
    return getattr(import_module(home), attribute)


def _words_for(package: ModuleType, name: str) -> str:
    """Return what to use instead of a name without its own row; empty if neither Lightning nor Accelerate has it."""
    if package.__name__ == PACKAGE:
        return accelerate.NAMES.get(name, "")
    if name not in _LISTED:
        return ""
    return _words_of_package(package, "names of the page 'lightning-names': this one has no equivalent")


def _words_of_package(package: ModuleType, otherwise: str) -> str:
    """Return what to use instead of names of a package of Lightning's."""
    inside = package.__name__.partition(".")[2]
    alike = inside.removeprefix("fabric.")  # its packages have the names of Lightning's
    rows = ((one, *row) for one in (alike, inside) for row in PACKAGES_IN_WORDS.items())
    return next((text for one, package, text in rows if f"{one}.".startswith(f"{package}.")), otherwise)


def _advice(package: ModuleType, name: str, packages: list[ModuleType]) -> str:
    """Return what to use instead of a name that Lightning lacks; empty where another one is suggested."""
    if package.__name__ == PACKAGE:
        return next((f"{one.__name__}.{name}" for one in packages if name in public_names(one)), "")
    of_a_file = not hasattr(package, "__path__")  # whose imports are not compared
    known = vars(package).get("__all__", ()) if of_a_file else public_names(package)
    return "" if name.startswith("__") or did_you_mean(name, known) else _words_of_package(package, ELSEWHERE)


# -- the rank of lightning_utilities ----------------------------------------------------------------------------------


def get_rank() -> int | None:
    """Return the rank that a launcher has set in the environment; None without one."""
    given = map(os.environ.get, ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"))
    return next((int(rank) for rank in given if rank is not None), None)


@cache
def _set_rank_of_lightning_utilities() -> None:
    """Do what the import of Lightning does, and programs with its names rely on, if that package is installed."""
    if find_spec("lightning_utilities") is not None:
        theirs = import_module("lightning_utilities.core.rank_zero").rank_zero_only
        theirs.rank = getattr(theirs, "rank", get_rank() or 0)


# -- names that are imported, subclassed and compared, and fail when they are used ------------------------------------

_BASES = {"Warning": Warning, "Exception": Exception, "Error": Exception}
"""The end of a name -> the base of its class, which `except` and warning filters ask for."""


def answered_at_use(module: str, name: str, words: str) -> Any:
    """Return what a name of Lightning's that is not here can be imported as: one class for all its paths.

    Args:
        module: where it was found first, for pickle.
        words: what to use instead.
    """
    if name not in _answered:
        base = next((kind for end, kind in _BASES.items() if name.endswith(end)), object)
        message = f"{name} is not here. Use {words}."
        members = {"__module__": module, "__doc__": message, "__class_getitem__": lambda cls, parameters: cls}
        _answered[name] = _AtUse(name, (base,), {**members, "not_here": message})
    return _answered[name]


class _AtUse(ABCMeta):
    """The class of a name that is not here: a base of others, which nothing is an instance of."""

    not_here: str
    """The words, which errors of a configuration show, too."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if options or len(args) != 1 or not isinstance(args[0], FunctionType):
            raise ConfigError(cls.not_here)

        @wraps(args[0])  # a decorator is called at the import
        def decorated(*args: Any, **options: Any) -> NoReturn:
            raise ConfigError(cls.not_here)

        return decorated

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(name if name.startswith("_") else f"{cls.__name__}.{name}: {cls.not_here}")


_answered: dict[str, _AtUse] = {}


# -- flags of packages and versions -----------------------------------------------------------------------------------

_AVAILABLE = re.compile("_([A-Z0-9_]+?)(_SIGNATURES|_SYNCHRONOUS)?_AVAILABLE")
_VERSION = re.compile(r"_([A-Z]+)_(GREATER_|LESS_|)EQUAL_(\d+(?:_\d+)*)")
_OF_FLAGS = {"kineto": "torch", "tensorboardx": "tensorboardX", "torch_trt": "torch_tensorrt", "xla": "torch_xla"}
"""Parts of names of constants -> the package that is meant, where it is another one."""


def flag(name: str) -> bool | None:
    """Return the value of a constant such as `_RICH_AVAILABLE` or `_TORCH_GREATER_EQUAL_2_4`; None: it is none."""
    if found := _AVAILABLE.fullmatch(name):
        return find_spec(_OF_FLAGS.get(found[1].lower(), found[1].lower())) is not None
    if not (found := _VERSION.fullmatch(name)):
        return None
    package, wanted = found[1].lower(), [*map(int, found[3].split("_"))]
    try:
        text = platform.python_version() if package == "python" else version(_OF_FLAGS.get(package, package))
    except PackageNotFoundError:
        return False
    has = [*map(int, re.findall(r"\d+", text))][:3]
    answers = {"GREATER_": has >= wanted, "LESS_": has <= [*wanted, 0, 0], "": has[: len(wanted)] == wanted}
    return answers[found[2]]
