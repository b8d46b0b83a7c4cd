"""The folder of a logger: the run directory, or Lightning's `save_dir/name/version`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trainer.arguments import local_path, optional_path

T = TypeVar("T")


class LoggerFolder:
    """The folder into which a logger writes.

    Args:
        files: a pattern for the names of the logger's files.
        save_dir: a folder; None: the run directory.
        name, version: folders in it; a number n is the version `version_n`.
        sub_dir: a folder below them.
    """

    def __init__(
        self,
        files: str,
        save_dir: str | Path | None,
        name: str | None = None,
        version: int | str | None = None,
        sub_dir: str | Path | None = None,
    ) -> None:
        self.files = files
        self.given = optional_path(save_dir, "save_dir")
        for argument, value in {"name": name, "version": version}.items():
            if isinstance(value, str):
                local_path(value, argument)  # raises where no file system has such a folder
        self.name, self.version = name, version
        self.sub_dir = None if sub_dir is None else str(local_path(sub_dir, "sub_dir"))
        self.number: int | None = None
        """The version of the run, if none was given; None: the files are in `save_dir` itself."""
        self.chosen = self.announced = self.goes_on = False
        """True once the number is that of a run; of the next run, which has not begun; and if a run is continued."""

    @property
    def depends_on_files(self) -> bool:
        """Whether the folder of a new run depends on what earlier runs have left."""
        return self.given is not None and self.version is None

    def state(self) -> dict[str, int]:
        """Return the state with which a resumed run finds the folder again."""
        return {} if self.number is None else {"version": self.number}

    def restore(self, state: dict[str, Any]) -> None:
        """Find the folder of a checkpoint's run again, unless this is another run."""
        if self.goes_on:
            self.number = state.get("version")

    def begin(self) -> None:
        """Choose a new run's folder: the announced one, unless it has files by now."""
        self.announce()
        if self.depends_on_files and any(self._numbered(self.number).glob(self.files)):
            self.number = self._next_number()
        self.announced = False

    def announce(self) -> None:
        """Choose the folder of the next run, so that its name can be read before the run."""
        if self.depends_on_files and not self.chosen:
            told = os.environ.pop(self._variable, None)
            self.number = int(told) if told else self._next_number()
            self.chosen = self.announced = True

    def tell_children(self) -> None:
        """Have the processes that this one starts announce the same folder, although there may be files by then."""
        if self.announced and self.number is not None:
            os.environ[self._variable] = str(self.number)

    @property
    def _variable(self) -> str:
        """The environment variable with the announced version."""
        return f"TRAINER_VERSION_OF {self.files} {self._numbered(None).absolute()}"

    def earlier(self, paths: Mapping[T, str | Path]) -> Iterator[dict[T, Path]]:
        """Yield the places that paths in the announced folder had in each earlier run, of the newest run first."""
        own = self._numbered(self.number).absolute()
        for number in reversed(self._numbers()) if self.announced else ():
            moved = {one: os.path.relpath(path, own) for one, path in paths.items()}
            yield {one: self._numbered(number) / path for one, path in moved.items() if ".." not in Path(path).parts}

    def _next_number(self) -> int | None:
        first, taken = 0 if self.name else None, self._numbers()
        return (taken[-1] or 0) + 1 if taken else first

    def _numbers(self) -> list[int | None]:
        """Return the versions that earlier runs have taken. Without a name, the folder may hold what is not of them."""
        folders = {one.name.removeprefix("version_"): one for one in Path(self.root_dir(None) or "").glob("version_*")}
        taken = {int(number): one for number, one in folders.items() if number.isdecimal() and one.is_dir()}
        if self.name:
            return [*sorted(taken)]
        return [number for number in (None, *sorted(taken)) if any(self._numbered(number).glob(self.files))]

    def _numbered(self, number: int | None) -> Path:
        """Return the folder of the files of a version."""
        return Path(self.root_dir(None) or "", "" if number is None else f"version_{number}", self.sub_dir or "")

    def folder(self, run_dir: Path | None) -> Path | None:
        """Return the folder of the files; None before a run that gives it."""
        place = self.given or run_dir
        if place is None:
            return None
        version = self.version_in(run_dir)
        if self.name or self.version is not None or self.number is not None:
            root = self.root_dir(run_dir)
            assert root is not None
            place = Path(root, f"version_{version}" if isinstance(version, int) else str(version))
        return place / (self.sub_dir or "")

    def log_dir(self, run_dir: Path | None) -> str | None:
        """Return the folder of the files as a text, as Lightning's loggers give it."""
        folder = self.folder(run_dir)
        return None if folder is None else str(folder)

    def root_dir(self, run_dir: Path | None) -> str | None:
        """Return the folder that has the versions."""
        save_dir = self.save_dir(run_dir)
        return None if save_dir is None else str(Path(save_dir, self.name or ""))

    def save_dir(self, run_dir: Path | None) -> str | None:
        """Return the folder that has the names."""
        if self.given is None:
            return None if run_dir is None else str(run_dir.parent)
        return str(self.given)

    def name_in(self, run_dir: Path | None) -> str | None:
        """Return the given name, or the name of the run directory's parent folder."""
        return self.name if self.name is not None or run_dir is None else run_dir.parent.name

    def version_in(self, run_dir: Path | None) -> int | str | None:
        """Return the version: given, chosen, or the run directory's; before a run it is announced."""
        if run_dir is None:
            self.announce()
        given = self.version if self.number is None else self.number
        if given is not None:
            return given
        if run_dir is None or (self.given is not None and not self.name):
            return None if self.given is None else 0
        number = run_dir.name.removeprefix("version_")
        return int(number) if number.isdecimal() else run_dir.name


def plain_number(value: Any) -> float:
    """Return a number, or a tensor of one element, as a number."""
    return value if isinstance(value, (int, float)) else float(value)
