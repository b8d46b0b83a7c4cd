"""Print the modules of the installed Lightning, with the names that each defines or exports.

`python -m tests.compat.modules_of_lightning > trainer/compat/modules.txt`; a test compares them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = {"pytorch_lightning": "", "lightning_fabric": "fabric"}
"""Lightning's packages -> their place in `lightning`, without that name."""
LEFT_OUT = ("_graveyard", "__setup__", "__version__")  # the last would replace the text of that name


def modules() -> dict[str, list[str]]:
    """Return the names of each module, without the name of Lightning's package; `pytorch` is the package itself."""
    found = {}
    for package, place in PACKAGES.items():
        spec: Any = find_spec(package)
        folder = Path(spec.submodule_search_locations[0])
        for file in folder.rglob("*.py"):
            parts = [place, *file.relative_to(folder).with_suffix("").parts]
            name = ".".join(part for part in parts if part and part != "__init__") or "pytorch"
            if not {*parts} & {*LEFT_OUT}:
                statements = ast.parse(file.read_text()).body
                names = {*_defined(statements)} or {*_passed_on(statements)}
                found[name] = sorted(one for one in names if not one.startswith("__"))
    return dict(sorted(found.items()))


def _defined(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements define, and those in `__all__`."""
    for one in statements:
        if isinstance(one, (ast.ClassDef, ast.FunctionDef)):
            yield one.name
        for target in [*getattr(one, "targets", []), getattr(one, "target", None)]:
            if isinstance(target, ast.Name) and isinstance(one, (ast.Assign, ast.AnnAssign)):
                yield target.id
                if target.id == "__all__" and isinstance(one.value, ast.List):
                    yield from (element.value for element in one.value.elts if isinstance(element, ast.Constant))
        for block in ("body", "orelse", "handlers"):
            if isinstance(one, (ast.If, ast.Try, ast.ExceptHandler)):
                yield from _defined(getattr(one, block, []))


def _passed_on(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module without any of its own imports from Lightning's others."""
    for one in statements:
        if isinstance(one, ast.ImportFrom) and (one.module or "").partition(".")[0] in PACKAGES:
            yield from (alias.name for alias in one.names)


def text() -> str:
    """Return what `trainer/compat/modules.txt` contains."""
    return "".join(f"{' '.join([module, *names])}\n" for module, names in modules().items())


if __name__ == "__main__":
    print(text(), end="")
