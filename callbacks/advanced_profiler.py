"""AdvancedProfiler: the Python functions that take the time of `fit`; and the API that all profilers share."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.arguments import PositiveInt, local_path, make_folder, optional_path
from trainer.callback import Callback

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class Profiler(Callback):
    """Base class of profilers, `Trainer(profiler=)`: `with trainer.profiler.profile("my action")` measures a block.

    Args:
        dirpath, filename: the place of a file of results, for a subclass that writes one.
    """

    dirpath: Path | None = None
    filename: str | None = None

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = optional_path(dirpath, "dirpath")
        self.filename = None if filename is None else str(local_path(filename, "filename"))

    def start(self, action_name: str) -> None:
        """Begin an action."""

    def stop(self, action_name: str) -> None:
        """End an action."""

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """Measure the block as an action."""
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def summary(self) -> str:
        """Return the results as text; empty without any."""
        return ""

    def describe(self) -> None:
        """Print the results."""
        if text := self.summary():
            print(text)

    def report(self, text: str, show: Callable[[str], None]) -> None:
        """Show the results, or write them to the file of a profiler with a `dirpath`; called on rank 0."""
        if self.dirpath is None:
            show(text)
            return
        file = self.dirpath / f"{self.filename or 'profile'}.txt"
        make_folder(file.parent, f"{type(self).__name__}(dirpath=..., filename=...)")
        file.write_text(text.removesuffix("\n") + "\n")


class PassThroughProfiler(Profiler):
    """Measure nothing."""


class AdvancedProfiler(Profiler):
    """Print, at the end of `fit`, the Python functions that took most time on rank 0, by cProfile. Slows the run down.

    Your own actions, `with trainer.profiler.profile("name")`, have separate tables.

    Args:
        dirpath: folder of a file with the tables. Default: print them.
        filename: name of the file, without its suffix. Default: "profile".
        line_count_restriction: the number of functions in a table, or their fraction of all functions (float).
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: PositiveInt | float = 1.0,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction = line_count_restriction
        self.profiles: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        # Only one profile can be active in a process: the innermost action's.
        if self._running:
            self.profiles[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiles.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            return
        self.profiles[self._running[-1]].disable()
        while self._running.pop() != action_name:
            pass
        if self._running:
            self.profiles[self._running[-1]].enable()

    def summary(self) -> str:
        tables = []
        for action, profile in self.profiles.items():
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(self.line_count_restriction)
            tables.append(f"Profile of {action}:\n{text.getvalue()}")
        return "\n".join(tables)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.profiles.clear()
        self._running.clear()
        if trainer.is_global_zero:
            self.start("fit")

    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end(trainer.print)

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self._end(trainer.print)

    def _end(self, show: Callable[[str], None]) -> None:
        if "fit" in self._running:
            self.stop("fit")
            self.report(self.summary(), show)
