"""RichProgressBar: the progress of a run, drawn by rich."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from trainer.arguments import NonNegativeInt
from trainer.callbacks.progress_bar import Display, ProgressBar, fewer
from trainer.errors import require_package

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


@dataclass(frozen=True)
class RichProgressBarTheme:
    """Styles of rich (https://rich.readthedocs.io/en/stable/style.html) for the parts of a `RichProgressBar`; the text
    between two values, and the format of a number."""

    description: str = ""
    progress_bar: str = "#6206E0"
    progress_bar_finished: str = "#6206E0"
    progress_bar_pulse: str = "#6206E0"
    batch_progress: str = ""
    time: str = "dim"
    processing_speed: str = "dim underline"
    metrics: str = "italic"
    metrics_text_delimiter: str = ", "
    metrics_format: str = ".4g"


class RichProgressBar(ProgressBar):
    """`ProgressBar` with rich's bars on a terminal; elsewhere the same plain lines.

    Args:
        refresh_rate: batches between two refreshes, at most ten refreshes a second. 0: show nothing.
        leave: keep the bar of every epoch on the screen, not only the last one.
        theme: styles of the parts.
        console_kwargs: arguments of `rich.console.Console`.

    Raises:
        MissingPackageError: at the start of a run, when rich is not installed.
    """

    def __init__(
        self,
        refresh_rate: NonNegativeInt = 1,
        leave: bool = False,
        theme: RichProgressBarTheme = RichProgressBarTheme(),
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self.theme, self.number_format = theme, theme.metrics_format
        self.console_kwargs = dict(console_kwargs or {})

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        require_package("rich", "RichProgressBar")
        super().setup(trainer, pl_module, stage)

    def open_bars(self, stream: TextIO) -> Display:
        return _RichDisplay(stream, self.leave, self.theme, self.console_kwargs)


class _RichDisplay(Display):
    """Bars of rich."""

    seconds = 0.1

    def __init__(
        self, stream: TextIO, leave: bool, theme: RichProgressBarTheme, console_kwargs: dict[str, Any]
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.style import Style

        super().__init__(stream)
        self.leave, self._delimiter = leave, theme.metrics_text_delimiter
        console = Console(**{"file": stream, **console_kwargs})
        self._bar_width = 40 if console.width > 100 else 10
        self._progress = Progress(
            TextColumn("[progress.description]{task.description}", style=theme.description or "none"),
            BarColumn(
                bar_width=self._bar_width,
                complete_style=Style.parse(theme.progress_bar),
                finished_style=Style.parse(theme.progress_bar_finished),
                pulse_style=Style.parse(theme.progress_bar_pulse),
            ),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}", style=theme.processing_speed),
            TextColumn("{task.fields[metrics]}", style=theme.metrics),
            console=console,
            auto_refresh=False,  # no thread: updates are timed by the callback
        )
        self._counted_from: dict[Any, int] = {}
        """Batches that do not count in the rate, by the task's number."""
        self._ended: Any = None
        self._progress.start()

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        if keep and self._ended is not None:
            if not self.leave:
                self._progress.remove_task(self._ended)
            self._ended = None
        task = self._progress.add_task(title, total=total, completed=done, rate="", metrics="")
        self.running.append((task, keep))
        self._counted_from[task] = done
        self._progress.refresh()

    def update(self, done: int, metrics: Sequence[str]) -> None:
        number, _ = self.running[-1]
        before = self._counted_from[number]
        seconds = self._progress.tasks[self._progress.task_ids.index(number)].elapsed
        rate = f"{(done - before) / seconds:.2f}/s" if done > before and seconds else ""
        self._progress.update(number, completed=done, rate=rate, metrics=self._fitting(metrics), refresh=True)

    def _fitting(self, metrics: Sequence[str]) -> str:
        """Return as many of the values as the terminal has room for next to the bar."""
        task = self._progress.tasks[-1]
        count = len(f"{task.completed:.0f}/{task.total}")
        taken = len(task.description) + self._bar_width + count + len("0:00:00 1000.00/s") + 5
        room = self._progress.console.width - taken
        return next((text for text in map(self._delimiter.join, fewer(metrics)) if len(text) <= room), "")

    def finish(self, done: int, metrics: Sequence[str], report: bool) -> None:
        self.update(done, metrics)
        number, keep = self.running.pop()
        self._progress.stop_task(number)
        if keep:
            self._ended = number
        else:
            self._progress.remove_task(number)
        if self.running:
            self._progress.update(self.running[-1][0], metrics=self._fitting(metrics))
        self._progress.refresh()

    def clear(self) -> None:
        self._progress.stop()
        sys.stderr.flush()

    def redraw(self) -> None:
        self._progress.start()

    def close(self) -> None:
        self._progress.stop()
