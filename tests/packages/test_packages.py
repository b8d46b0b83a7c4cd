"""Packages that are built on Lightning compute the same here, unchanged, in an environment laid over this one."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROGRAMS = Path(__file__).parent
ROOT = PROGRAMS.parents[1]
ENVIRONMENT = ROOT / ".venv-packages"

LIGHT = ("neuralforecast", "pytorch-forecasting")
"""Run by `make test-long`, too: one that makes its own Trainer, and one of modules for a Trainer."""
OTHERS = (
    *("anomalib", "chemprop", "gluonts", "lightly", "optuna-integration", "pytorch-tabular", "scvi-tools"),
    *("torch-uncertainty", "torchgeo"),
)


class Near(NamedTuple):
    """Numbers that are equal but for a relative difference."""

    names: str  # a pattern
    difference: float
    why: str


MEANS = "Lightning adds up the values of an epoch in float32"
NEAR: dict[str, tuple[Near, ...]] = {
    "anomalib": (Near("*", 1e-4, "its one batch is shuffled: the sums over it have another order"),),
    "gluonts": (
        Near("drawn_windows/*", 0.3, "numpy's generator, which draws the windows, is seeded again for each epoch"),
    ),
    "lightly": (Near("*metrics/*", 1e-6, MEANS),),
    "optuna-integration": (Near("values/*", 1e-6, MEANS),),
    "pytorch-tabular": (Near("*", 1e-4, "its one batch is shuffled: the sums over it have another order"),),
    "scvi-tools": (Near("*", 0.1, "batches are shuffled in another order, and so are the numbers that it draws"),),
    "torchgeo": (Near("metrics/*", 1e-6, MEANS),),
}
"""Everything else is equal to the last bit."""


def test_a_package_that_makes_its_own_trainer(tmp_path: Path) -> None:
    compare(LIGHT[0], tmp_path, "light")


def test_a_package_of_modules_for_a_trainer(tmp_path: Path) -> None:
    compare(LIGHT[1], tmp_path, "light")


@pytest.mark.parametrize("package", OTHERS)
def test_further_packages(package: str, tmp_path: Path) -> None:
    compare(package, tmp_path, "all")


def compare(package: str, folder: Path, installed: str) -> None:
    """Run the program of a package with Lightning and as Lightning, and compare what they have written."""
    if not (ENVIRONMENT / installed).exists():
        target = f".venv-packages/{installed}"
        pytest.fail(f"{package} is not installed. Run `make {target}`, which needs a package registry.", pytrace=False)
    theirs = numbers(run(package, folder / "lightning"))
    ours = numbers(run(package, folder / "here", "-m", "trainer", "run-as-lightning"))
    assert theirs.keys() == ours.keys()
    differ = {name: (theirs[name], ours[name]) for name in theirs if not equal(package, name, theirs[name], ours[name])}
    assert not differ, f"{package}, of {len(theirs)} values: {differ}"


def run(package: str, folder: Path, *prefix: str) -> Any:
    """Return what the program of a package writes in a folder."""
    folder.mkdir()
    paths = [PROGRAMS / "cpu_torchvision", *([ROOT] if prefix else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONWARNINGS": "ignore"}
    program = PROGRAMS / f"train_{package.replace('-', '_')}.py"
    command = [str(ENVIRONMENT / "bin" / "python"), *prefix, str(program)]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, f"{package} {prefix}: {said[-5000:]}"
    assert ("running as Lightning" in said) == bool(prefix), said
    return json.loads((folder / "result.json").read_text())


def numbers(tree: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of what a program has written, by their paths."""
    if isinstance(tree, dict | list):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {path: leaf for key, part in parts for path, leaf in numbers(part, f"{name}/{key}").items()}
    return {name[1:]: tree}


def equal(package: str, name: str, theirs: Any, ours: Any) -> bool:
    """Whether two leaves are equal, as nearly as they can be."""
    near = next((near for near in NEAR.get(package, ()) if fnmatchcase(name, near.names)), None)
    if near is None or isinstance(theirs, bool):
        return bool(theirs == ours)
    if isinstance(theirs, str):
        return name.endswith("/sha256") or theirs == ours
    return math.isclose(theirs, ours, rel_tol=near.difference, abs_tol=near.difference)


def test_the_page_has_the_packages_and_the_versions_that_are_run() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    rows = dict(re.findall(r"^\| \[([\w-]+)\]\(\S+\) ([\d.]+) \|", page, re.MULTILINE))
    pins = dict(versions("constraints-packages.txt"))
    assert rows == {package: pins[package] for package in (*LIGHT, *OTHERS)}
    assert {f"train_{package.replace('-', '_')}.py" for package in rows} == {
        path.name for path in PROGRAMS.glob("train_*.py")
    }


def test_nothing_of_the_project_is_installed_again() -> None:
    theirs, ours = dict(versions("constraints-packages.txt")), dict(versions("constraints.txt"))
    assert not theirs.keys() & ours.keys()
    assert not [name for name in theirs if name == "torch" or name.startswith(("nvidia-", "cuda-", "triton"))]


def versions(file: str) -> Iterator[tuple[str, str]]:
    """Yield the names, as the registry compares them, and versions of a file of constraints."""
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(), re.MULTILINE):
        yield re.sub(r"[-_.]+", "-", name).lower(), version
