"""Import the modules of one project, although another project's have the same names."""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType

log = logging.getLogger("trainer")


@contextmanager
def project(root: Path) -> Iterator[None]:
    """Let the block import modules of `root`, also under names that modules of other folders have already.

    The others are not changed. Those of `root` get names of their own afterwards, `_1f2e3d4c_data` for `data`, by which
    pickle and later blocks find them. A warning names them, because an import inside a function finds the others.
    """
    prefix = f"_{zlib.crc32(os.fsencode(root)):08x}_"
    own = {name.removeprefix(prefix): module for name, module in sys.modules.items() if name.startswith(prefix)}
    taken = _names_in_use(root) | {name.partition(".")[0] for name in own}
    others = _remove_modules(taken)
    sys.modules.update(own)
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))
        found = _remove_modules(taken)
        for name, module in found.items():
            _rename(module, name, prefix)
        sys.modules.update(others)
        if found.keys() - own:
            names = ", ".join(sorted(map(repr, found.keys() - own)))
            log.warning(
                "%s: another project's modules are called %s, too: import them at the top of files", root, names
            )


def is_installed(path: Path) -> bool:
    """Whether a path is Python's own, an installed package's or ours."""
    ours = Path(__file__).parents[1]
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return any(folder in (path, *path.parents) for folder in [*installed, ours])


def _names_in_use(root: Path) -> set[str]:
    """Return the names of files and folders of `root` under which modules of another project have been imported."""
    found = sorted(root.iterdir()) if root.is_dir() else []
    paths = {path.stem: path for path in found if path.suffix == ".py" or path.is_dir()}
    paths.pop("__main__", None)
    in_use = set()
    for name, module in sys.modules.items():
        path = paths.get(name.partition(".")[0])
        if path is None or getattr(module, "__file__", None) is None:
            continue
        # A folder without __init__.py is a package only where no other module has its name.
        is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
        file = Path(str(module.__file__))
        others = root.resolve() not in file.resolve().parents and not is_installed(file)
        if others and (is_module or getattr(sys.modules[path.stem], "__file__", None) is None):
            in_use.add(path.stem)
    return in_use


def _remove_modules(tops: set[str]) -> dict[str, ModuleType]:
    """Remove the modules and packages of these names, and return them by their full names."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in tops}


def _rename(module: ModuleType, name: str, prefix: str) -> None:
    """Give a module, and the classes and functions that it defines, the name `prefix + name`."""
    if module.__name__ != name:
        sys.modules[module.__name__] = module
        return
    for value in vars(module).values():
        if isinstance(value, (type, FunctionType)) and value.__module__ == name:
            value.__module__ = prefix + name
    if module.__package__:
        module.__package__ = prefix + module.__package__
    if module.__spec__ is not None:
        module.__spec__.name = prefix + name
    module.__name__ = prefix + name
    sys.modules[module.__name__] = module
