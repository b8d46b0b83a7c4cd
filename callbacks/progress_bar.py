"""ProgressBar: the progress of a run, on a terminal or in a log."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trainer.arguments import NonNegativeInt
from trainer.callback import Callback

if TYPE_CHECKING:
    from tqdm import tqdm

    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class ProgressBar(Callback):
    """Show epoch, batches, batches per second and the values logged with `prog_bar=True`, on rank 0.

    On a terminal it is a bar (of tqdm) on stderr; elsewhere a plain line every 10 seconds, and one at the end. It shows
    only values that the trainer has read already, and costs well under a microsecond per batch between two refreshes.
    An error of the terminal switches it off and never ends a run.

    Args:
        refresh_rate: batches between two refreshes, of which there are at most ten in a second; 0: show nothing.
        leave: keep the bar of every epoch on the screen, not only that of the last.
    """

    in_place_of = "enable_progress_bar"

    def __init__(self, refresh_rate: NonNegativeInt = 1, leave: bool = False) -> None:
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._display: Display | None = None
        self._next = math.inf
        """The time of the next update, by `time.monotonic`; infinity: never."""
        self._evaluated = 0
        self._values: Mapping[str, float] = {}
        """The values as of the last flush, which the trainer has read from the device."""

    def print_text(self, text: str, file: TextIO | None = None) -> bool:
        """Print above the bar. What the terminal cannot show is replaced, and a closed one is ignored."""
        stream: TextIO | None = sys.stdout if file is None else file
        self._draw(lambda display: display.clear())
        try:
            _write(stream, text)
        except BrokenPipeError:
            _give_up(stream)
        except Exception:
            pass
        self._draw(lambda display: display.redraw())
        return True

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._switch_off()
        self._values = trainer.flushed_progress_bar_metrics
        if trainer.is_global_zero and self.refresh_rate:
            with suppress(Exception):
                bars = draws_bars(sys.stderr)
                self._display, self._next = self.open_bars(sys.stderr) if bars else _Lines(sys.stderr), 0.0

    def open_bars(self, stream: TextIO) -> Display:
        """Return the display for a terminal."""
        return _Bars(stream, self.leave)

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._switch_off()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._switch_off()

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        total, done = trainer.num_training_batches, trainer.progress.batch
        self._draw(
            lambda display: display.start(_epoch(trainer.current_epoch, trainer.max_epochs), total, done, keep=True)
        )

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._update(batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        done = trainer.progress.batch
        self._draw(lambda display: display.finish(done, self._metrics(), report=True))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        # The epoch may have been left unfinished.
        done = trainer.progress.batch
        self._draw(lambda display: display.finish_all(done, self._metrics()))

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        counts = trainer.num_val_batches
        if trainer.sanity_checking:
            few = trainer.settings.num_sanity_val_steps
            counts = [few if count is None else min(count, few) for count in counts] if few >= 0 else counts
            self._start_evaluation("sanity check", counts, keep=False)
        elif trainer.stage == "fit":
            self._start_evaluation(
                f"{_epoch(trainer.current_epoch, trainer.max_epochs)} validation", counts, keep=False
            )
        else:
            self._start_evaluation("validate", counts)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluated += 1
        self._update(self._evaluated)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        # At the end of an epoch its own line comes next, with these results.
        inside = trainer.stage == "fit" and trainer.progress.batch != trainer.num_training_batches
        report = not trainer.sanity_checking and (inside or trainer.stage != "fit")
        self._end_evaluation(report)

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation("test", trainer.num_test_batches)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation()

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation("predict", trainer.num_predict_batches)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation()

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _start_evaluation(self, title: str, counts: Sequence[int | None], keep: bool = True) -> None:
        self._evaluated = 0
        known = [count for count in counts if count is not None]
        total = sum(known) if len(known) == len(counts) else None
        self._draw(lambda display: display.start(title, total, 0, keep))

    def _end_evaluation(self, report: bool = True) -> None:
        self._draw(lambda display: display.finish(self._evaluated, self._metrics(), report))

    def _update(self, done: int) -> None:
        if time.monotonic() >= self._next and done % self.refresh_rate == 0:
            self._draw(lambda display: display.update(done, self._metrics()))

    def _metrics(self) -> str:
        return ", ".join(f"{name}={value:.4g}" for name, value in self._values.items())

    def _draw(self, action: Callable[[Display], None]) -> None:
        """Call `action` with the display; any error switches the display off for good."""
        if self._display is None:
            return
        try:
            action(self._display)
            self._next = time.monotonic() + self._display.seconds
        except BrokenPipeError:
            stream = self._display.stream
            self._switch_off()
            _give_up(stream)
        except Exception:
            self._switch_off()

    def _switch_off(self) -> None:
        display, self._display, self._next = self._display, None, math.inf
        if display is not None:
            with suppress(Exception):
                display.close()


def _epoch(epoch: int, max_epochs: int | None) -> str:
    return f"epoch {epoch}" + (f"/{max_epochs - 1}" if max_epochs is not None and max_epochs > 0 else "")


def draws_bars(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can do more than lines."""
    # A terminal of width 0 is a pseudo-terminal without a viewer.
    return stream.isatty() and os.environ.get("TERM") != "dumb" and os.get_terminal_size(stream.fileno()).columns > 0


class Display(Protocol):
    """A display of tasks, which nest: validation starts and ends inside an epoch."""

    seconds: float
    """Time between two updates."""
    stream: TextIO

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        """Start a task with `done` of `total` batches; `keep`: its bar stays when it has ended."""

    def update(self, done: int, metrics: str) -> None:
        """Show the progress of the innermost task."""

    def finish(self, done: int, metrics: str, report: bool) -> None:
        """End the innermost task; `report`: its result is worth a line in a log."""

    def finish_all(self, done: int, metrics: str) -> None:
        """End all tasks: training is over, possibly inside an epoch."""

    def clear(self) -> None:
        """Make room for a line of text."""

    def redraw(self) -> None:
        """Draw again after that."""

    def close(self) -> None:
        """Leave the cursor on a line of its own."""


class TQDMProgressBar(ProgressBar):
    """`ProgressBar` under Lightning's name.

    Args:
        refresh_rate, leave: as in `ProgressBar`.
        process_position: no effect: the bar draws below what is printed.
    """

    def __init__(
        self, refresh_rate: NonNegativeInt = 1, process_position: NonNegativeInt = 0, leave: bool = False
    ) -> None:
        super().__init__(refresh_rate, leave)


class _Bars:
    """Bars of tqdm."""

    seconds = 0.1

    def __init__(self, stream: TextIO, leave: bool) -> None:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[type-arg]
            monitor_interval = 0
            """No monitor thread: updates are timed here."""

        self.stream = stream
        self.leave = leave
        self._new_bar = Bar
        self._running: list[tqdm[Any]] = []
        self._ended: tqdm[Any] | None = None
        """The bar of the last epoch, which stays until the next one starts."""

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        if keep and self._ended is not None:
            self._ended.leave = self.leave
            self._ended.close()
            self._ended = None
        bar = self._new_bar(
            total=total,
            initial=done,
            desc=title,
            file=self.stream,
            leave=keep,
            position=len(self._running),
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
        )
        self._running.append(bar)

    def update(self, done: int, metrics: str) -> None:
        bar = self._running[-1]
        bar.set_postfix_str(metrics, refresh=False)
        if done > bar.n:
            bar.update(done - bar.n)
        else:
            bar.refresh()

    def finish(self, done: int, metrics: str, report: bool) -> None:
        self.update(done, metrics)
        bar = self._running.pop()
        if bar.leave:
            self._ended = bar
        else:
            bar.close()
        if self._running:
            # The time of the inner task does not count in the outer task's batches per second.
            self._running[-1].unpause()
            self._running[-1].set_postfix_str(metrics)

    def finish_all(self, done: int, metrics: str) -> None:
        while self._running:
            self.finish(done, metrics, report=True)

    def clear(self) -> None:
        for bar in self._all():
            bar.clear()

    def redraw(self) -> None:
        for bar in self._all():
            bar.refresh()

    def close(self) -> None:
        for bar in reversed(self._all()):
            bar.leave = bar.pos == 0
            bar.close()

    def _all(self) -> list[tqdm[Any]]:
        return [*self._running, *([] if self._ended is None else [self._ended])]


@dataclass
class _Task:
    title: str
    total: int | None
    resumed_at: int
    """Batches done before the task started (in a resumed epoch)."""
    started: float = field(default_factory=time.monotonic)


class _Lines:
    """Plain lines for a log, with the methods of `_Bars`: one line every `PAUSE` seconds, and the last result."""

    seconds = 0.5
    PAUSE = 10.0

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._running: list[_Task] = []
        self._due = time.monotonic() + self.PAUSE
        self._result = ""
        """The newest result, until a line is written."""

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        self._running.append(_Task(title, total, done))

    def update(self, done: int, metrics: str) -> None:
        self._write_if_due(self._line(self._running[-1], done, metrics))

    def finish(self, done: int, metrics: str, report: bool) -> None:
        task = self._running.pop()
        if self._running:
            self._running[-1].started += time.monotonic() - task.started
        if report:
            self._result = self._line(task, done, metrics)
            self._write_if_due(self._result)

    def finish_all(self, done: int, metrics: str) -> None:
        while self._running:
            self.finish(done, metrics, report=True)
        self.close()

    def clear(self) -> None: ...
    def redraw(self) -> None: ...

    def close(self) -> None:
        _write(self.stream, self._result)
        self._result = ""

    def _write_if_due(self, line: str) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self.PAUSE
            self._result = ""
            _write(self.stream, line)

    @staticmethod
    def _line(task: _Task, done: int, metrics: str) -> str:
        seconds = time.monotonic() - task.started
        rate = f", {(done - task.resumed_at) / seconds:.4g}/s" if seconds > 0 else ""
        of = "" if task.total is None else f"/{task.total}"
        return f"{task.title}: {done}{of} batches{rate}{', ' if metrics else ''}{metrics}\n"


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


def _give_up(stream: Any) -> None:
    """Redirect a standard stream whose reader is gone: Python would fail again when it flushes the stream at exit, and
    change the exit code (https://docs.python.org/3/library/signal.html#note-on-sigpipe)."""
    if any(stream is standard for standard in (sys.__stdout__, sys.__stderr__)):
        with suppress(Exception):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
