"""AdvancedProfiler: the Python functions that take the time of `fit`; and the API that all profilers share."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainer.arguments import PositiveInt, local_path, make_folder, optional_path
from trainer.callback import Callback
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

_UNSAFE = re.compile(r'[\\/:*?"<>|\n\r\t]+')
"""Characters that a name of a file does not have everywhere."""


class Profiler(Callback):
    """Base class of profilers, `Trainer(profiler=)`: `with trainer.profiler.profile("my action")` measures a block.

    A subclass defines `start`, `stop` and `summary`. The phases of a run, such as "backward", are actions, too. The
    results are shown at the end of each run. Without a Trainer call `describe` to show them.

    Args:
        dirpath: folder of a file with the results of each process. Default: print rank 0's; with `filename` the folder
            is that of the run's logs.
        filename: the middle of the file's name: "fit-profile-0.txt" has the stage before it and the rank after it, if
            there are several processes. Default: "profile".
    """

    hears_phases: ClassVar[bool] = True
    """The phases of a run are actions."""
    dirpath: Path | None = None
    filename: str | None = None
    _stage: str | None = None
    _rank: int | None = None
    _log_dir: Path | None = None
    _show: Callable[[str], None] = print

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath = optional_path(dirpath, "dirpath")
        self.filename = None if filename is None else str(local_path(filename, "filename"))

    def start(self, action_name: str) -> None:
        """Begin an action."""

    def stop(self, action_name: str) -> None:
        """End an action."""

    def begin_phase(self, name: str) -> None:
        """Begin a phase of a run."""
        self.start(name)

    def end_phase(self, name: str) -> None:
        """End a phase of a run."""
        self.stop(name)

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
        """Print the results, or write them to the file."""
        text = self.summary()
        if not text:
            return
        if self.dirpath is None and (self.filename is None or self._log_dir is None):
            self._show(text)
            return
        self._file(self.filename or "profile", ".txt").write_text(text.removesuffix("\n") + "\n")

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._stage, self._rank = stage, trainer.rank if trainer.world_size > 1 else None
        self._log_dir, self._show = Path(trainer.log_dir), trainer.print

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self.describe()
        self._show = print

    def _file(self, name: str | None, ending: str, action: str | None = None) -> Path:
        """Return the path of a file of results, whose folder exists."""
        parts = [str(part) for part in (self._stage, name, self._rank, action) if part is not None]
        file = (self.dirpath or self._log_dir or Path()) / (_UNSAFE.sub("_", "-".join(parts)) + ending)
        make_folder(file.parent, f"{type(self).__name__}(dirpath=...)")
        return file

    def _refuse_to_stop(self, action_name: str) -> None:
        raise ConfigError(
            f"{type(self).__name__}.stop({action_name!r}): this action was not started. Call start first."
        )


class PassThroughProfiler(Profiler):
    """Measure nothing."""

    hears_phases = False


class AdvancedProfiler(Profiler):
    """Print, at the end of each run, the Python functions that took most time, by cProfile. Slows the run down.

    Your own actions, `with trainer.profiler.profile("name")`, have separate tables.

    Args:
        dirpath, filename: as in `Profiler`.
        line_count_restriction: the number of functions in a table, or their fraction of all functions (float).
        dump_stats: write a file for `pstats` for each action, too, such as `fit-0-name.prof`.
    """

    hears_phases = False

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: PositiveInt | float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self.profiled_actions: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        # Only one profile can be active in a process: the innermost action's.
        if self._running:
            self.profiled_actions[self._running[-1]].disable()
        self._running.append(action_name)
        self.profiled_actions.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        if action_name not in self._running:
            self._refuse_to_stop(action_name)
        self.profiled_actions[self._running[-1]].disable()
        while self._running.pop() != action_name:
            pass
        if self._running:
            self.profiled_actions[self._running[-1]].enable()

    def summary(self) -> str:
        tables = []
        for action, profile in self.profiled_actions.items():
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("cumulative").print_stats(self.line_count_restriction)
            tables.append(f"Profile of {action}:\n{text.getvalue()}")
        return "\n".join(tables)

    def describe(self) -> None:
        super().describe()
        for action, profile in self.profiled_actions.items() if self.dump_stats else ():
            profile.dump_stats(self._file(self.filename, ".prof", action))

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.profiled_actions.pop(stage, None)
        self.start(stage)

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage in self._running:
            self.stop(stage)
            super().teardown(trainer, pl_module, stage)
