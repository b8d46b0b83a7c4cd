"""Names of precisions, plugs, their arguments and optimizers, read from the source: importing them takes seconds."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def precisions() -> dict[str, str]:
    """Return the precisions of `trainer.precision.PRECISIONS`, with descriptions of their dtypes."""
    found = {}
    for node in ast.walk(_source("trainer.precision")):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "Precision":
            continue
        given = [*zip(("name", "weights", "autocast", "loss_scaling"), node.args, strict=False)]
        given += [(str(keyword.arg), keyword.value) for keyword in node.keywords]
        values = {name: ast.unparse(value).removeprefix("torch.") for name, value in given}
        words = f"weights in {values['weights']}"
        if values.get("autocast", "None") != "None":
            words += f", the forward in {values['autocast']} where it suffices"
        found[str(ast.literal_eval(values["name"]))] = words
    return found


@cache
def strategies() -> dict[str, str]:
    """Return the strategies of `trainer.strategies.STRATEGIES`, with the first sentences of their docstrings."""
    return {
        name: (ast.get_docstring(kind) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".")
        for name, kind in _strategies().items()
    }


@cache
def strategy_classes() -> dict[str, str]:
    """Return the names of strategies by their classes' names, and of several the first."""
    return {kind.name: name for name, kind in reversed(_strategies().items())}


@cache
def _strategies() -> dict[str, ast.ClassDef]:
    exported = _exported("strategies").items()
    kinds = [kind for name, module in exported for kind in _source(module).body if getattr(kind, "name", "") == name]
    return {str(name): kind for kind in kinds if isinstance(kind, ast.ClassDef) and (name := _name_of(kind))}


@cache
def callbacks(base: str) -> list[str]:
    """Return the classes of `trainer.callbacks` that are derived from `base`: "Callback" or "Logger"."""
    imported = _imported("callbacks")
    texts = [_path(module).read_text(encoding="utf-8") for module in {*imported.values()}]
    bases = {
        name: re.findall(r"\w+", of) for text in texts for name, of in re.findall(r"^class (\w+)\((.*)\):", text, re.M)
    }

    def is_derived(name: str) -> bool:
        return name == base or any(map(is_derived, bases.get(name, ())))

    return [name for name in _exported("callbacks") if is_derived(name)]


@cache
def _imported(package: str) -> dict[str, str]:
    """Return the names that a package imports from this one, and their modules."""
    imports = (node for node in _source(f"trainer.{package}").body if isinstance(node, ast.ImportFrom))
    names = ((alias.name, str(node.module)) for node in imports for alias in node.names)
    return {name: module for name, module in names if module.startswith("trainer.")}


def _exported(package: str) -> dict[str, str]:
    """Return the names of its own modules that a package exports, and these modules."""
    return {name: module for name, module in _imported(package).items() if module.startswith(f"trainer.{package}.")}


@cache
def optimizers() -> list[str]:
    """Return the optimizers that torch.optim exports."""
    return sorted({*re.findall(r"\b([A-Z]\w+) as \1\b", _torch_text("optim", "__init__.py"))} - {"Optimizer"})


@cache
def schedulers() -> list[str]:
    """Return the classes of torch.optim.lr_scheduler that are schedulers."""
    found = re.findall(r"^class ([A-Z]\w*)\(", _torch_text("optim", "lr_scheduler.py"), re.M)
    return [name for name in found if name != "LRScheduler"]


def _torch_text(*parts: str) -> str:
    """Return the text of a file of torch; empty where torch cannot be found, of which others report."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).parent.joinpath(*parts).read_text(encoding="utf-8")


def _name_of(kind: ast.ClassDef) -> str | None:
    """Return the value of the class attribute `name`."""
    for node in kind.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if "name" in map(ast.unparse, targets):
                return str(node.value.value)
    return None


@cache
def _source(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text(encoding="utf-8"))


def _path(module: str) -> Path:
    path = Path(__file__).parent.parent.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
