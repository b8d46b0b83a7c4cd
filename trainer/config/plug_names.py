"""Names of precisions, plugs, their arguments and optimizers, read from the source: importing them takes seconds."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PRECISION = re.compile(r'\bPrecision\("(.+?)", torch\.(\w+)(?:, autocast=torch\.(\w+))?')
IMPORT = r"^from (trainer\.{}\.\S+) import (\w+) as \2$"
CLASS = re.compile(r"^class (\w+)\((.*)\):", re.MULTILINE)
STRATEGY = r'^class {}\([^)]*\):\n    """(.+?)\.?(?:"""|\n\n).*?^    name(?:: ClassVar\[str\])? = "(.+?)"'


@cache
def precisions() -> dict[str, str]:
    """Return the precisions of `trainer.precision.PRECISIONS`, with descriptions of their dtypes."""
    found = {}
    for name, weights, autocast in PRECISION.findall(_source("trainer.precision")):
        forward = f", the forward in {autocast} where it suffices" if autocast else ""
        found[name] = f"weights in {weights}{forward}"
    return found


@cache
def strategies() -> dict[str, str]:
    """Return the strategies of `trainer.strategies.STRATEGIES`, with the first sentences of their docstrings."""
    return dict(_strategies().values())


@cache
def strategy_classes() -> dict[str, str]:
    """Return the names of strategies by their classes' names."""
    return {kind: name for kind, (name, _) in _strategies().items()}


@cache
def _strategies() -> dict[str, tuple[str, str]]:
    found = {}
    for kind, module in _exported("strategies").items():
        words, name = re.findall(STRATEGY.format(kind), _source(module), re.MULTILINE | re.DOTALL)[0]
        found[kind] = name, " ".join(words.split())
    return found


@cache
def callbacks(base: str) -> list[str]:
    """Return the classes of `trainer.callbacks` that are derived from `base`: "Callback" or "Logger"."""
    exported = _exported("callbacks")
    modules = {"trainer.callback", "trainer.logger", *exported.values()}
    classes = [found for module in modules for found in CLASS.findall(_source(module))]
    bases = {name: re.findall(r"\w+", of) for name, of in classes}

    def is_derived(name: str) -> bool:
        return name == base or any(map(is_derived, bases.get(name, ())))

    return [name for name in exported if is_derived(name)]


def _exported(package: str) -> dict[str, str]:
    """Return the names that a package exports from its own modules, with these modules."""
    found = re.findall(IMPORT.format(package), _source(f"trainer.{package}"), re.MULTILINE)
    return {name: module for module, name in found}


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
    """Return the text of a file of torch; empty where torch is not installed, which others report."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    return Path(spec.origin).parent.joinpath(*parts).read_text(encoding="utf-8")


@cache
def _source(module: str) -> str:
    path = Path(__file__).parent.parent.parent.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
