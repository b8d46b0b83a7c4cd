"""ProgressBar: the progress of a run, on a terminal, in a notebook or in a log."""

from __future__ import annotations

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from trainer.arguments import NonNegativeInt
from trainer.callback import Callback

if TYPE_CHECKING:
    from tqdm import tqdm

    from trainer.module import TrainModule
    from trainer.trainer import Trainer


LEAST_BAR = 5
"""Columns of the bar itself, at least."""


class ProgressBar(Callback):
    """Show epoch, batches, batches per second and the values logged with `prog_bar=True`, on rank 0.

    On a terminal it is a bar (of tqdm) on stderr, in a notebook with ipywidgets a widget; elsewhere plain lines: one at
    the end of each epoch and evaluation, and every 10 seconds in between. A narrow terminal shows fewer values, never a
    part of a number. The remaining time is the epoch's. It shows only values that the trainer has read already, and
    costs well under a microsecond per batch between two refreshes. An error of the terminal switches it off and never
    ends a run.

    Args:
        refresh_rate: batches between two refreshes, at most ten refreshes a second. 0: show nothing.
        leave: keep the bar of every epoch on the screen, not only the last one.
    """

    in_place_of = "enable_progress_bar"
    number_format = ".4g"
    """The format of the values."""

    def __init__(self, *, refresh_rate: NonNegativeInt = 1, leave: bool = False) -> None:
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._display: Display | None = None
        self._next = math.inf
        """The time of the next update, by `time.monotonic`; infinity: never."""
        self._evaluated = 0
        self._values: Mapping[str, float] = {}
        """The values as of the last flush, which the trainer has read from the device."""
        self._run: tuple[Trainer, TrainModule] | None = None

    def print_text(self, text: str, file: TextIO | None = None) -> bool:
        """Print above the bar. Replace characters that the terminal cannot show, and ignore a closed terminal."""
        stream: TextIO | None = sys.stdout if file is None else file
        self._draw(lambda display: display.clear())
        _attempt(stream, lambda: _write(stream, text))
        self._draw(lambda display: display.redraw())
        return True

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._switch_off()
        self._values = trainer.flushed_progress_bar_metrics
        self._run = trainer, pl_module
        if not trainer.is_global_zero:
            self.disable()
        elif self.refresh_rate:
            with suppress(Exception):
                bars = draws_bars(sys.stderr) or shows_widgets()
                self._display, self._next = self.open_bars(sys.stderr) if bars else _LineDisplay(sys.stderr), 0.0

    def open_bars(self, stream: TextIO) -> Display:
        """Return the display for a terminal or a notebook."""
        return _TqdmDisplay(stream, self.leave)

    def get_metrics(self, trainer: Trainer, pl_module: TrainModule) -> dict[str, Any]:
        """Return the values to show, numbers or texts by name. A subclass may leave some out, and add its own."""
        return dict(self._values)

    def disable(self) -> None:
        """Show nothing from now on. Called on other ranks than 0 before the first batch."""
        self._switch_off()

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._switch_off()
        self._run = None

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        self._switch_off()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        done, total, max_steps = trainer.progress.batch, trainer.num_training_batches, trainer.config.max_steps
        if max_steps is not None and max_steps >= 0:
            total = min(total, done + (max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        title = _epoch(trainer.current_epoch, trainer.config.max_epochs)
        self._draw(lambda display: display.start(title, _finite(total), done, keep=True))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._next:  # here, because a call in each step costs more than the question
            self._update(batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        done, metrics = trainer.progress.batch, self._metrics()
        self._draw(lambda display: display.finish(done, metrics, report=True))

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        # The epoch may have been left unfinished.
        done, metrics = trainer.progress.batch, self._metrics()
        self._draw(lambda display: display.finish_all(done, metrics))

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        counts = trainer.num_val_batches
        if trainer.sanity_checking:
            few = trainer.settings.num_sanity_val_steps
            title, counts = "sanity check", [min(count, few if few >= 0 else math.inf) for count in counts]
        elif trainer.stage == "fit":
            title = f"{_epoch(trainer.current_epoch, trainer.config.max_epochs)} validation"
        else:
            title = "validate"
        self._start_evaluation(title, counts, keep=trainer.stage != "fit")

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._evaluated += 1
        if time.monotonic() >= self._next:
            self._update(self._evaluated)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        # At the end of an epoch its own line comes next, with these results.
        ends_epoch = trainer.stage == "fit" and trainer.progress.batch == trainer.num_training_batches
        self._end_evaluation(report=not trainer.sanity_checking and not ends_epoch)

    def on_test_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start_evaluation("test", trainer.num_test_batches)

    def on_test_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end_evaluation()

    def on_predict_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start_evaluation("predict", trainer.num_predict_batches)

    def on_predict_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._end_evaluation()

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _start_evaluation(self, title: str, counts: Sequence[int | float], keep: bool = True) -> None:
        self._evaluated = 0
        total = sum(counts)
        self._draw(lambda display: display.start(title, _finite(total), 0, keep))

    def _end_evaluation(self, report: bool = True) -> None:
        metrics = self._metrics()
        self._draw(lambda display: display.finish(self._evaluated, metrics, report))

    def _update(self, done: int) -> None:
        if done % self.refresh_rate == 0:
            metrics = self._metrics()
            self._draw(lambda display: display.update(done, metrics))

    def _metrics(self) -> list[str]:
        # An error in a subclass's get_metrics ends the run: it is not the terminal's.
        shown = self.get_metrics(*self._run) if self._display is not None and self._run is not None else {}
        return [
            f"{name}={value:{'' if isinstance(value, str) else self.number_format}}" for name, value in shown.items()
        ]

    def _draw(self, action: Callable[[Display], None]) -> None:
        """Call `action` with the display; any error switches the display off for good."""
        display = self._display
        if display is None:
            return
        if _attempt(display.stream, lambda: action(display)):
            self._next = time.monotonic() + display.seconds
        else:
            self._switch_off()

    def _switch_off(self) -> None:
        display, self._display, self._next = self._display, None, math.inf
        if display is not None:
            with suppress(Exception):
                display.close()


def _epoch(epoch: int, max_epochs: int | None) -> str:
    return f"epoch {epoch}" + (f"/{max_epochs - 1}" if max_epochs is not None and max_epochs > 0 else "")


def _finite(batches: float) -> int | None:
    return None if batches == math.inf else int(batches)


def shows_widgets() -> bool:
    """Whether this is a notebook whose bars can be widgets."""
    # A program that executes notebooks has imported ipykernel, and not always IPython.
    if not sys.modules.keys() >= {"ipykernel", "IPython"} or find_spec("ipywidgets") is None:
        return False
    shell: Any = sys.modules["IPython"].get_ipython()
    return "IPKernelApp" in getattr(shell, "config", {})  # as tqdm.autonotebook decides


def draws_bars(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can do more than lines."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return False
    # A pseudo-terminal without a viewer may have no size, and tqdm hides its bar where there are up to two lines.
    size = os.get_terminal_size(stream.fileno())
    return size.columns > 0 and size.lines > 2


class Display(ABC):
    """A display of tasks, which nest: validation starts and ends inside an epoch."""

    seconds: float
    """Time between two updates."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.running: list[Any] = []
        """The tasks that have not ended, the innermost last."""

    @abstractmethod
    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        """Start a task with `done` of `total` batches; `keep`: its bar stays when it has ended."""

    @abstractmethod
    def update(self, done: int, metrics: Sequence[str]) -> None:
        """Show the progress of the innermost task."""

    @abstractmethod
    def finish(self, done: int, metrics: Sequence[str], report: bool) -> None:
        """End the innermost task; `report`: its result is worth a line in a log."""

    def finish_all(self, done: int, metrics: Sequence[str]) -> None:
        """End all tasks: training is over, possibly inside an epoch."""
        while self.running:
            self.finish(done, metrics, report=True)

    def clear(self) -> None:
        """Make room for a line of text."""

    def redraw(self) -> None:
        """Draw again after that."""

    def close(self) -> None:
        """Leave the cursor on an empty line."""


def fewer(metrics: Sequence[str]) -> Iterator[list[str]]:
    """Yield the values, then one less each time, with the number of those left out, to show as many as there is room
    for."""
    yield [*metrics]
    for number in range(len(metrics) - 1, -1, -1):
        yield [*metrics[:number], f"+{len(metrics) - number}"]


class TQDMProgressBar(ProgressBar):
    """`ProgressBar` under Lightning's name.

    Args:
        refresh_rate, leave: as in `ProgressBar`.
        process_position: no effect: the bar draws below what is printed.
    """

    def __init__(
        self, refresh_rate: NonNegativeInt = 1, process_position: NonNegativeInt = 0, leave: bool = False
    ) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)


class _TqdmDisplay(Display):
    """Bars of tqdm."""

    seconds = 0.1

    def __init__(self, stream: TextIO, leave: bool) -> None:
        super().__init__(stream)
        kind: Any
        if shows_widgets():
            from tqdm.auto import tqdm as kind
        else:
            from tqdm import tqdm as kind

        class Bar(kind):  # type: ignore[misc]
            monitor_interval = 0
            """No monitor thread: updates are timed here."""

            def __del__(self) -> None:
                with suppress(Exception):  # before 4.70 there is one where the terminal was gone when the bar was made
                    super().__del__()

        self.leave = leave
        self._new_bar: type[Any] = Bar
        self._started: list[float] = []
        """Start times of the running tasks."""
        self._ended: Any = None
        """The bar of the last epoch, which stays until the next one starts."""

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        self._started.append(time.monotonic())
        if keep and self._ended is not None:
            self._ended.leave = self.leave
            self._ended.close()
            self._ended = None
        bar = self._new_bar(
            total=total,
            initial=done,
            desc=title,
            bar_format="{desc}",  # until it is laid out
            file=self.stream,
            leave=keep,
            position=len(self.running),
            dynamic_ncols=True,
            mininterval=0,
            miniters=1,
        )
        self.running.append(bar)
        self._lay_out(bar, done, [])
        bar.refresh()

    def update(self, done: int, metrics: Sequence[str]) -> None:
        bar = self.running[-1]
        self._lay_out(bar, done, metrics)
        if done > bar.n:
            bar.update(done - bar.n)
        else:
            bar.refresh()

    def _lay_out(self, bar: tqdm[Any], done: int, metrics: Sequence[str]) -> None:
        """Set the parts of a bar's line to those for which the terminal has room."""
        from tqdm.utils import disp_len

        shown = bar.format_dict
        columns = shown["ncols"] or math.inf
        starts, count, left = [("{l_bar}{bar}| ", LEAST_BAR), ("{desc}: ", 0)], "{n_fmt}/{total_fmt} ", "<{remaining}"
        if bar.total is None:
            starts, count, left = [("{desc}: ", 0)], "{n_fmt}it ", ""
        for values in fewer(metrics):
            rest = "".join(f", {one}" for one in values).replace("{", "{{").replace("}", "}}")
            for start, bar_width in starts:  # numbers before a bar
                bar.bar_format = f"{start}{count}[{{elapsed}}{left}, {{rate_fmt}}{rest}]"
                without_bar = {"n": done, "ncols": None, "bar_format": bar.bar_format.replace("{bar}", "")}
                if disp_len(bar.format_meter(**{**shown, **without_bar})) + bar_width <= columns:
                    return
        bar.bar_format = "{desc}: " + count.rstrip()

    def finish(self, done: int, metrics: Sequence[str], report: bool) -> None:
        self.update(done, metrics)
        bar, started = self.running.pop(), self._started.pop()
        if bar.leave:
            self._ended = bar
        else:
            bar.close()
        if self.running:
            # The time of the inner task does not count in the outer task's batches per second. (`unpause` would also
            # leave out the time of the batches since the bar was drawn last.)
            outer = self.running[-1]
            outer.start_t += time.monotonic() - started
            outer.last_print_t += time.monotonic() - started
            self._lay_out(outer, int(outer.n), metrics)
            outer.refresh()

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
        return [bar for bar in (*self.running, self._ended) if bar is not None]


@dataclass
class _RunningTask:
    title: str
    total: int | None
    counted_from: int
    """Batches that do not count in the rate, because they were done before the run was resumed."""
    started: float = field(default_factory=time.monotonic)


class _LineDisplay(Display):
    """Plain lines for a log: one line every `PAUSE` seconds, and each result."""

    seconds = 0.5
    PAUSE = 10.0

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._due = time.monotonic() + self.PAUSE

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        self.running.append(_RunningTask(title, total, done))

    def update(self, done: int, metrics: Sequence[str]) -> None:
        if time.monotonic() >= self._due:
            self._write(self.running[-1], done, metrics)

    def finish(self, done: int, metrics: Sequence[str], report: bool) -> None:
        task = self.running.pop()
        if self.running:
            self.running[-1].started += time.monotonic() - task.started
        if report:
            self._write(task, done, metrics)

    def _write(self, task: _RunningTask, done: int, metrics: Sequence[str]) -> None:
        self._due = time.monotonic() + self.PAUSE
        rate = (done - task.counted_from) / max(time.monotonic() - task.started, 1e-9)
        of = "" if task.total is None else f"/{task.total}"
        values = "".join(f", {one}" for one in metrics)
        _write(self.stream, f"{task.title}: {done}{of} batches, {rate:.4g}/s{values}\n")


def _attempt(stream: TextIO | None, action: Callable[[], None]) -> bool:
    """Call `action`, which writes to a stream; return False if the stream cannot take it."""
    try:
        action()
    except BrokenPipeError:
        _give_up(stream)
        return False
    except Exception:
        return False
    return True


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
    with suppress(Exception):  # it may have no descriptor, or be closed
        if stream.fileno() in (1, 2):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
