"""ProgressBar: how far the run is, on a terminal or in a log."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from trainer.callback import Callback
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from tqdm import tqdm

    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class ProgressBar(Callback):
    """Shows epoch, batches, batches per second and the values logged with `prog_bar=True`, on rank 0.

    On a terminal it is a bar (of tqdm) on stderr; elsewhere plain lines: one at the end of each epoch and validation,
    one every 10 seconds in between, and fewer when epochs are short. It shows only values that the trainer has read
    already, and costs well under a microsecond per batch between two refreshes. Whatever goes wrong with the terminal
    switches it off; it never ends a run.

    Args:
        refresh_rate: batches between two refreshes, of which there are at most ten in a second; 0: show nothing.
        leave: keep the bar of every epoch on the screen, not only that of the last.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        if type(refresh_rate) is not int or refresh_rate < 0:
            raise ConfigError(f"ProgressBar(refresh_rate={refresh_rate!r}): give a number of batches, or 0 for no bar.")
        self.refresh_rate = refresh_rate
        self.leave = leave
        self._screen: _Display | None = None
        self._next = math.inf
        """When to draw again, by `time.monotonic`; infinity: never."""
        self._evaluated = 0

    def print_text(self, text: str, file: TextIO | None = None) -> bool:
        """Print above the bar. What the terminal cannot show is replaced, and a closed one is ignored."""
        stream: TextIO | None = sys.stdout if file is None else file
        self._draw(lambda screen: screen.clear())
        try:
            _write(stream, text)
        except BrokenPipeError:
            _give_up(stream)
        except Exception:
            pass
        self._draw(lambda screen: screen.redraw())
        return True

    # -- moments -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._switch_off()
        if trainer.is_global_zero and self.refresh_rate:
            with suppress(Exception):
                self._screen, self._next = _open_screen(sys.stderr, self.leave), 0.0

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._switch_off()

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._switch_off()

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        total, done = trainer.num_training_batches, trainer.progress.batch
        self._draw(lambda screen: screen.start(_epoch(trainer), total, done, keep=True))

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._next and (batch_idx + 1) % self.refresh_rate == 0:
            self._refresh(trainer, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        done = trainer.progress.batch
        self._draw(lambda screen: screen.finish(done, _shown(trainer), tell=True))

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        # An epoch that was left unfinished.
        done = trainer.progress.batch
        self._draw(lambda screen: screen.finish_all(done, _shown(trainer)))

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        counts = trainer.num_val_batches
        if trainer.sanity_checking:
            few = trainer.settings.num_sanity_val_steps
            counts = [few if count is None else min(count, few) for count in counts] if few >= 0 else counts
            self._start_evaluation("sanity check", counts, keep=False)
        elif trainer.stage == "fit":
            self._start_evaluation(f"{_epoch(trainer)} validation", counts, keep=False)
        else:
            self._start_evaluation("validate", counts)

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count_evaluated(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        # At the end of an epoch the epoch's own line, which comes next, tells the results.
        inside = trainer.stage == "fit" and trainer.progress.batch != trainer.num_training_batches
        self._end_evaluation(trainer, tell=not trainer.sanity_checking and (inside or trainer.stage != "fit"))

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation("test", trainer.num_test_batches)

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count_evaluated(trainer)

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation(trainer)

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation("predict", trainer.num_predict_batches)

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count_evaluated(trainer)

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation(trainer)

    # -- drawing -------------------------------------------------------------------------------------------------------

    def _start_evaluation(self, title: str, counts: Sequence[int | None], keep: bool = True) -> None:
        self._evaluated = 0
        known = [count for count in counts if count is not None]
        total = sum(known) if len(known) == len(counts) else None
        self._draw(lambda screen: screen.start(title, total, 0, keep))

    def _count_evaluated(self, trainer: Trainer) -> None:
        self._evaluated += 1
        if time.monotonic() >= self._next and self._evaluated % self.refresh_rate == 0:
            self._refresh(trainer, self._evaluated)

    def _end_evaluation(self, trainer: Trainer, tell: bool = True) -> None:
        self._draw(lambda screen: screen.finish(self._evaluated, _shown(trainer), tell))

    def _refresh(self, trainer: Trainer, done: int) -> None:
        self._draw(lambda screen: screen.update(done, _shown(trainer)))

    def _draw(self, action: Callable[[_Display], None]) -> None:
        """Do something on the screen; any error switches it off for good."""
        if self._screen is None:
            return
        try:
            action(self._screen)
            self._next = time.monotonic() + self._screen.seconds
        except BrokenPipeError:
            stream = self._screen.stream
            self._switch_off()
            _give_up(stream)
        except Exception:
            self._switch_off()

    def _switch_off(self) -> None:
        screen, self._screen, self._next = self._screen, None, math.inf
        if screen is not None:
            with suppress(Exception):
                screen.close()


def _epoch(trainer: Trainer) -> str:
    last = trainer.max_epochs
    return f"epoch {trainer.current_epoch}" + (f"/{last - 1}" if last is not None and last > 0 else "")


def _shown(trainer: Trainer) -> str:
    return ", ".join(f"{name}={value:.4g}" for name, value in trainer.progress_bar_metrics.items())


class _Display(Protocol):
    """Where progress is shown. Tasks nest: validation begins and ends inside an epoch."""

    stream: TextIO
    seconds: float
    """Time between two updates."""

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        """A task begins, with `done` of `total` batches; `keep`: its bar stays when it has ended."""

    def update(self, done: int, shown: str) -> None:
        """The innermost task has got so far."""

    def finish(self, done: int, shown: str, tell: bool) -> None:
        """The innermost task has ended; `tell`: worth a line in a log."""

    def finish_all(self, done: int, shown: str) -> None:
        """All tasks have ended, even those of which that was not said."""

    def clear(self) -> None:
        """Make room for a line of text."""

    def redraw(self) -> None:
        """That line is written."""

    def close(self) -> None:
        """Leave the cursor on a line of its own."""


def _open_screen(stream: TextIO, leave: bool) -> _Display:
    # A terminal of width 0 is a pseudo-terminal that nobody looks at.
    bars = stream.isatty() and os.environ.get("TERM") != "dumb" and os.get_terminal_size(stream.fileno()).columns > 0
    return _Bars(stream, leave) if bars else _Lines(stream)


class _Bars:
    """Bars of tqdm."""

    seconds = 0.1

    def __init__(self, stream: TextIO, leave: bool) -> None:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[type-arg]
            monitor_interval = 0
            """No watching thread: we draw by time ourselves."""

        self.stream = stream
        self.leave = leave
        self._new_bar = Bar
        self._running: list[tqdm[Any]] = []
        self._ended: tqdm[Any] | None = None
        """The bar of the last epoch, to be used again."""

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        if keep and self._ended is not None and not self.leave:
            bar, self._ended = self._ended, None
            bar.reset(total)
            bar.initial = bar.n = bar.last_print_n = done
            bar.set_description_str(title)
        else:
            if keep and self._ended is not None:
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

    def update(self, done: int, shown: str) -> None:
        bar = self._running[-1]
        bar.set_postfix_str(shown, refresh=False)
        if done > bar.n:
            bar.update(done - bar.n)
        else:
            bar.refresh()

    def finish(self, done: int, shown: str, tell: bool) -> None:
        self.update(done, shown)
        bar = self._running.pop()
        if bar.leave:
            self._ended = bar
        else:
            bar.close()
        if self._running:
            # Its batches per second shall not count the time of the task inside it.
            self._running[-1].unpause()
            self._running[-1].set_postfix_str(shown)

    def finish_all(self, done: int, shown: str) -> None:
        while self._running:
            self.finish(done, shown, tell=True)

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
    first: int
    """Batches done before it began (in a resumed epoch)."""
    began: float = field(default_factory=time.monotonic)


class _Lines:
    """Plain lines, for logs: a burst of them at first, and then one in `PAUSE` seconds on average."""

    seconds = 0.5
    PAUSE = 10.0
    BURST = 30

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._running: list[_Task] = []
        self._credit = float(self.BURST)
        self._last = time.monotonic()
        """When the last line was written."""
        self._suppressed_line: str | None = None
        """A result for which there was no credit; it is told if nothing follows it."""

    def start(self, title: str, total: int | None, done: int, keep: bool) -> None:
        self._running.append(_Task(title, total, done))

    def update(self, done: int, shown: str) -> None:
        if time.monotonic() - self._last >= self.PAUSE:
            self._tell(self._line(self._running[-1], done, shown))

    def finish(self, done: int, shown: str, tell: bool) -> None:
        task = self._running.pop()
        if self._running:
            self._running[-1].began += time.monotonic() - task.began
        if tell:
            self._tell(self._line(task, done, shown))

    def _line(self, task: _Task, done: int, shown: str) -> str:
        seconds = time.monotonic() - task.began
        rate = f", {(done - task.first) / seconds:.4g}/s" if seconds > 0 else ""
        of = "" if task.total is None else f"/{task.total}"
        return f"{task.title}: {done}{of} batches{rate}{', ' if shown else ''}{shown}"

    def _tell(self, line: str) -> None:
        now = time.monotonic()
        self._credit = min(self.BURST, self._credit + (now - self._last) / self.PAUSE)
        self._last = now
        if self._credit < 1:
            self._suppressed_line = line
            return
        self._credit -= 1
        self._suppressed_line = None
        _write(self.stream, line + "\n")

    def finish_all(self, done: int, shown: str) -> None:
        while self._running:
            self.finish(done, shown, tell=True)

    def clear(self) -> None: ...
    def redraw(self) -> None: ...

    def close(self) -> None:
        if self._suppressed_line is not None:
            _write(self.stream, self._suppressed_line + "\n")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


def _give_up(stream: Any) -> None:
    """The reader of a standard stream is gone. Python would fail once more when it flushes the stream at exit, and
    change the exit code, unless the stream leads nowhere
    (https://docs.python.org/3/library/signal.html#note-on-sigpipe)."""
    if any(stream is standard for standard in (sys.__stdout__, sys.__stderr__)):
        with suppress(Exception):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
