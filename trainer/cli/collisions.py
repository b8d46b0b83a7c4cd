"""Find what has the import name of this package: a file of the user's, and another distribution."""

from __future__ import annotations

import sys
import sysconfig
from itertools import takewhile
from pathlib import Path

import trainer

_OURS = Path(trainer.__file__).resolve()


def shadow(folders: list[Path]) -> Path | None:
    """Return the user's `trainer.py` (or package) in one of the folders, which Python would import in place of ours."""
    others = [folder for folder in folders if not _is_checkout(folder)]
    found = (folder / name for folder in others for name in ("trainer/__init__.py", "trainer.py"))
    return next((path for path in found if path.is_file() and path.resolve() != _OURS), None)


def _is_checkout(folder: Path) -> bool:
    """Whether a folder is a checkout of this package, which may be installed elsewhere."""
    project = folder / "pyproject.toml"
    return project.is_file() and 'name = "exact-trainer"' in project.read_text(encoding="utf-8", errors="replace")


def other_distribution() -> Path | None:
    """Return the metadata of another distribution with a package `trainer`, whose files are mixed with ours.

    The package index has two: `trainer`, and `coqui-tts-trainer`, which continues it.
    """
    for folder in dict.fromkeys([_OURS.parents[1], Path(sysconfig.get_path("purelib"))]):
        for record in sorted(folder.glob("*trainer*.dist-info/RECORD")):
            path, files = record.parent, record.read_text(encoding="utf-8", errors="replace")
            if not path.name.startswith("exact_trainer-") and "\ntrainer/__init__.py," in f"\n{files}":
                return path
    return None


def collisions(folders: list[Path] | None = None) -> list[str]:
    """Return a sentence for each collision, in `folders` or in those that Python searches before this package's."""
    if folders is None:
        entries = (Path(entry) for entry in sys.path if entry)
        searched = takewhile(lambda folder: (folder / "trainer/__init__.py").resolve() != _OURS, entries)
        folders = [Path.cwd(), *searched]
    found = []
    if (own := shadow(folders)) is not None:
        who = "scripts, spawned workers and `python -m trainer` in this folder"
        found.append(f"{own.absolute()}: {who} import it in place of this package: give it another name.")
    if (other := other_distribution()) is not None:
        words = "it has the import name of this package, and their files are mixed."
        package = other.name.partition("-")[0].replace("_", "-")
        fix = f"Uninstall both (pip uninstall {package} exact-trainer), and install this one again."
        found.append(f"{other.stem} is installed: {words} {fix}")
    return found
