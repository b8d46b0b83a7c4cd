"""Run a program that was written for Lightning unchanged: import this module before any of Lightning's.

`lightning`, `pytorch_lightning`, `lightning_fabric` and all modules below them are this package's from then on, in this
process and in those that it starts, whether or not Lightning is installed. `trainer run-as-lightning SCRIPT` does the
same for a program that does not import it.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import trainer.compat.finder  # noqa: F401 - which sets the rank of lightning_utilities
from trainer import __version__
from trainer.names.states import AS_LIGHTNING, LIGHTNING_VERSION

PLACE = Path(__file__).parent / "as_lightning"
"""A folder with modules under Lightning's names, and the metadata of its packages, found before installed ones."""
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")
_WITH_VERSION = (*PACKAGES, "lightning.pytorch", "lightning.fabric")


def our_name(name: str) -> str:
    """Return the name of the module here that a module of Lightning's leads to."""
    name = re.sub(r"^lightning_fabric\b", "trainer.fabric", name)
    return re.sub(r"^(lightning\.pytorch|lightning|pytorch_lightning)\b", "trainer", name)


class _Package(ModuleType):
    """One of Lightning's packages: this package's names, and Lightning's version."""

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["ours"], name)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["ours"])


class _Finder:
    """Finds Lightning's modules, and loads this package's in their place."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of Lightning's that is here; None for any other name."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        is_here = fullname in _WITH_VERSION or find_spec(our_name(fullname)) is not None
        return ModuleSpec(fullname, cast(Any, _Finder), is_package=True) if is_here else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType | None:
        """Return the module of a package; None for a module below one, which `exec_module` replaces."""
        if spec.name not in _WITH_VERSION:
            return None
        package, ours = _Package(spec.name), import_module(our_name(spec.name))
        exported = sorted({*vars(ours).get("__all__", ())} - {"__version__"})
        vars(package).update(ours=ours, __version__=LIGHTNING_VERSION, __all__=exported)
        return package

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Put this package's module in the place of Lightning's."""
        if not isinstance(module, _Package):
            sys.modules[module.__name__] = import_module(our_name(module.__name__))


def _install() -> None:
    loaded = [name for name in PACKAGES if name in sys.modules]
    for name in loaded:
        if not str(sys.modules[name].__file__).startswith(str(PLACE)):
            raise ImportError(f"{name} is imported already. Import trainer.compat.lightning before it.")
        del sys.modules[name]
    finders: list[Any] = sys.meta_path
    finders.insert(0, _Finder)
    for name in loaded:
        import_module(name)
    sys.path.insert(0, str(PLACE))  # for `multiprocessing` and `importlib.metadata`
    if AS_LIGHTNING not in os.environ:
        for_children = [str(PLACE), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update({AS_LIGHTNING: "1", "PYTHONPATH": os.pathsep.join(for_children)})
        print(
            f"running as Lightning {LIGHTNING_VERSION}: {', '.join(PACKAGES)} are trainer {__version__}",
            file=sys.stderr,
        )


_install()
