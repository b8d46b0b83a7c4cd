"""Find a class by a short name, `package.module.Class`, `file.py:Class`, or `folder:package.module.Class`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
import textwrap
import traceback
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.arguments import local_path
from trainer.config.tree import Source
from trainer.errors import ConfigError, did_you_mean, missing_package_advice, unknown_name_error


@dataclass(frozen=True)
class ResolvedClass:
    """A class, or a function, and the name under which it is found from any folder."""

    cls: Any
    name: str


def extend_sys_path(sources: list[Source]) -> None:
    """Let modules be imported from the current folder and from the configuration files' folders."""
    for folder in filter(None, [Path.cwd(), *(source.folder for source in sources)]):
        _extend_sys_path(folder)


def _extend_sys_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def find_class(
    name: str, bases: tuple[type, ...], table: Mapping[str, type], source: Source, functions: bool = False
) -> ResolvedClass:
    """Return the class that `name` means, which must be derived from one of `bases` and be complete.

    Args:
        table: short names that are known for this kind of class.
        source: where the name was written; files are looked for in that folder first.
        functions: also a function, or a method of a class, whose result is checked when it is called.

    Raises:
        ConfigError: there is no such class; or the import failed: then with the first line of the error.
    """
    if name in table:
        return ResolvedClass(table[name], name)
    if not re.search("[.:]", name):
        known = unknown_name_error(_names(bases), name, table)
        raise ConfigError(f"{known} Or package.module.Class, or file.py:Class.")
    if match := re.fullmatch(r"(.+\.py)(?::|$)([^:]*)", name):
        file, attribute = find_file(match[1], source), match[2]  # without a class, the message lists them
        module, where = _import_file(file), f"{file}:"
    else:
        module, where, attribute = _from_package(name)
    found = _attribute(module, attribute, bases, where)
    if not isinstance(found, type):
        if not (functions and callable(found)):
            raise ConfigError(f"{getattr(found, '__qualname__', found)!r} is a {type(found).__name__}, not a class.")
    elif not issubclass(found, bases):
        parents = _names(found.__bases__)
        words = vars(found).get("not_here")  # of a name that only Lightning has
        raise ConfigError(words or f"{found.__qualname__} is not derived from {_names(bases)} (but from {parents}).")
    return ResolvedClass(found, f"{where}{attribute}")


def is_subclass(cls: Any, bases: type | tuple[type, ...]) -> bool:
    """Whether a value is a class that is derived from one of the `bases`."""
    return isinstance(cls, type) and issubclass(cls, bases)


def _names(classes: tuple[type, ...]) -> str:
    return " or ".join(cls.__name__ for cls in classes)


def _attribute(module: ModuleType, name: str, bases: tuple[type, ...], where: str) -> Any:
    with suppress(AttributeError):
        return attrgetter(name)(module)
    classes = [value for value in vars(module).values() if is_subclass(value, bases)]
    here = ", ".join(sorted(cls.__name__ for cls in classes if cls.__module__ == module.__name__))
    close = f"{name!r}.{did_you_mean(name, [*vars(module)])}"
    raise ConfigError(f"{where.rstrip(':.')} has no class {close} It has: {here or 'none'}. Write file.py:Class.")


# -- importing --------------------------------------------------------------------------------------------------------


def find_file(name: str, source: Source) -> Path:
    """Return the Python file of this name, beside the configuration or in the current folder.

    Raises:
        ConfigError: there is none.
    """
    folders = filter(None, (source.folder, Path.cwd()))
    files = list(dict.fromkeys(Path(os.path.abspath(folder / local_path(name))) for folder in folders))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        close = did_you_mean(files[0].name, [path.name for path in files[0].parent.glob("*.py")])
        raise ConfigError(f"there is no file {name!r} in {' or '.join(str(path.parent) for path in files)}.{close}")
    return file


def _import_file(file: Path) -> ModuleType:
    """Import a file under the name that the other files of its package use: they share it then, and the worker
    processes of a DataLoader find it."""
    module = file.parent if file.name == "__init__.py" else file.with_suffix("")
    root, parts = module.parent, [module.name]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    _extend_sys_path(root)
    top = file if len(parts) == 1 else root / parts[0] / "__init__.py"
    return _import(".".join(parts), str(file)) if _origin(parts[0]) == top else _import_under_own_name(file)


def _import_under_own_name(file: Path) -> ModuleType:
    """Import a file that is called like an installed module."""
    name = f"_file_{zlib.crc32(str(file).encode()):08x}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"importing {file} failed: {one_line_error(error)}") from error
    return module


def _origin(name: str) -> Path | None:
    """Return the file that a module's name stands for; None where there is none."""
    with suppress(ImportError, ValueError):  # __main__ has no spec
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin:
            return Path(os.path.abspath(spec.origin))
    return None


def _from_package(name: str) -> tuple[ModuleType, str, str]:
    """Return a module, the text in front of its attributes' names, and the attribute, which may be `Class.method`."""
    before, colon, path = name.rpartition(":")  # folder:package.module.Class
    location, _, attribute = path.rpartition(".")
    folder = Path(os.path.abspath(local_path(before)))
    if colon:
        if not folder.is_dir():
            raise ConfigError(f"{name!r}: there is no folder {before!r}. Write package.module.Class, or file.py:Class.")
        _extend_sys_path(folder)
    try:
        module = _import(location, name)
    except ConfigError:
        package, _, cls = location.rpartition(".")
        if not isinstance(getattr(sys.modules.get(package), cls, None), type):
            raise
        module, location, attribute = sys.modules[package], package, f"{cls}.{attribute}"
    root = _user_folder(module)
    if colon and root != folder:
        raise ConfigError(f"{name!r}: {location} is imported from {root} already. Load each project in a new process.")
    return module, f"{root}:{location}." if root is not None else f"{location}.", attribute


def _import(module: str, name: str) -> ModuleType:
    """Import a module for the class that was given as `name`."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{name!r}: {_not_found(str(error.name))}") from None
        raise ConfigError(f"importing {module} failed: {one_line_error(error)}") from error


def _not_found(module: str) -> str:
    parent, _, missing = module.rpartition(".")
    path = getattr(sys.modules[parent], "__path__", []) if parent else [str(Path.cwd())]
    close = did_you_mean(missing, [module.name for module in pkgutil.iter_modules(path)])
    place = parent or f"the environment and {Path.cwd()}"
    return f"there is no module {missing!r} in {place}.{close}"


def _user_folder(module: ModuleType) -> Path | None:
    """Return the folder that a module was imported from; None for an installed module."""
    top = sys.modules[module.__name__.partition(".")[0]]
    # Only packages have a path, and Python's built-in modules have no file.
    places = [*getattr(top, "__path__", ()), getattr(top, "__file__", None)]
    if places[0] is None or is_installed(Path(os.path.abspath(places[0]))):
        return None
    return Path(os.path.abspath(places[0])).parent


def is_installed(path: Path) -> bool:
    """Whether a path is Python's own, an installed package's or ours."""
    ours = Path(__file__).parents[1]
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(folder in (path, *path.parents) for folder in [*installed, ours])


# -- the user's own errors --------------------------------------------------------------------------------------------


def one_line_error(error: BaseException) -> str:
    """Return an exception in one line: the last place in the user's own code, its type, its message, and what to
    install if a package is missing."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    message = textwrap.shorten(str(error), 300, placeholder="...")
    advice = missing_package_advice(error)
    what = f"{type(error).__name__}: {message}{'.' if advice else ''}{advice}"
    where = user_frame(error)
    return f"{where}: {what}" if where else what


def user_frame(error: BaseException) -> str:
    """Return `file.py:12` of the innermost frame that is not Python's, an installed package's or ours; or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and not is_installed(Path(frame.filename)):
            return f"{frame.filename}:{frame.lineno}"
    return ""
