"""Find what has the import name of this package: a file of the user's, and another distribution."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import trainer


def shadow() -> Path | None:
    """Return the user's `trainer.py` (or package) in the current folder, which Python would import in place of ours."""
    ours = Path(trainer.__file__).resolve()
    found = (Path.cwd() / name for name in ("trainer.py", "trainer/__init__.py"))
    return next((path for path in found if path.is_file() and path.resolve() != ours), None)


def other_distribution() -> Path | None:
    """Return the metadata of PyPI's distribution `trainer`, whose files are installed over ours, or ours over its."""
    return next(Path(sysconfig.get_path("purelib")).glob("trainer-*.dist-info"), None)


def collisions() -> list[str]:
    """Return a sentence for each collision."""
    found = []
    if (own := shadow()) is not None:
        name = own.name if own.name == "trainer.py" else "the folder trainer"
        words = (
            "scripts and `python -m trainer` in this folder import it in place of this package: give it another name."
        )
        found.append(f"{name} in {own.parent if own.name == 'trainer.py' else own.parents[1]}: {words}")
    if (other := other_distribution()) is not None:
        words = "it has the import name of this package, and their files are mixed."
        fix = "Uninstall both (pip uninstall trainer exact-trainer), and install this one again."
        found.append(f"{other.stem} is installed: {words} {fix}")
    return found
