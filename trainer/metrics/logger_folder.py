"""The folder of a logger: the run directory, or Lightning's `save_dir/name/version`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.arguments import local_path, optional_path


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
        """The version of a run whose folder would otherwise be an earlier run's."""
        self.chosen = self.goes_on = False

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

    def begin(self, run_dir: Path | None) -> None:
        """Choose a new run's folder, without files of earlier runs."""
        self.number = None
        while self.depends_on_files and self._has_files(run_dir):
            version = self.version_in(run_dir) if self.name or self.number is not None else 0
            self.number = version + 1 if isinstance(version, int) else 1

    def _has_files(self, run_dir: Path | None) -> bool:
        folder = self.folder(run_dir)
        return folder is not None and any(folder.glob(self.files))

    def folder(self, run_dir: Path | None) -> Path | None:
        """Return the folder of the files; None before a run that gives it."""
        place = self.given or run_dir
        if place is None:
            return None
        if self.name or self.version is not None or self.number is not None:
            version, root = self.version_in(run_dir), self.root_dir(run_dir)
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
        """Return the given version, or the run directory's where no earlier run has it."""
        given = self.version if self.number is None else self.number
        if given is not None:
            return given
        if run_dir is None:
            return None if self.given is None else 0
        number = run_dir.name.removeprefix("version_")
        return int(number) if number.isdecimal() else run_dir.name


def plain_number(value: Any) -> float:
    """Return a number, or a tensor of one element, as a number."""
    return value if isinstance(value, (int, float)) else float(value)
