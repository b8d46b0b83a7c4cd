"""StragglerMonitor: compare the step times of the processes, and name one that is slower than the others."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

from trainer.arguments import Limit, PositiveInt, number_of
from trainer.callback import Callback
from trainer.distributed.devices import has_streams
from trainer.distributed.sendable import sendable
from trainer.metrics.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, TRANSFER

if TYPE_CHECKING:
    from trainer.distributed.process_group import SingleProcess
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

PARTS = (DATA, TRANSFER, FORWARD, BACKWARD, OPTIMIZER)
EVENTS = 64
"""Maximum number of forward passes timed on the device between two comparisons."""


@sendable
class Times(NamedTuple):
    """Seconds that the steps of a process took in total."""

    rank: int
    host: str
    steps: int
    data: float
    """Waiting for data and moving it to the device."""
    forward: float
    rest: float
    """Backward and update, in which processes wait for each other."""

    @property
    def own(self) -> float:
        """Seconds of local work per step, excluding waits for other ranks."""
        return (self.data + self.forward) / max(self.steps, 1)

    @property
    def step(self) -> float:
        """Seconds per step."""
        return (self.data + self.forward + self.rest) / max(self.steps, 1)


class StragglerMonitor(Callback):
    """Compare the step times of the processes, and name one that is consistently slower than the others.

    In a step processes wait for each other, so that all their steps take the same time. They differ in the work before
    the wait: loading data and the forward pass. These times are gathered every `every_n_steps`, in one small exchange;
    in between nothing is sent, and no device is synchronized. On an accelerator the forward is timed on the device.
    With fsdp and ZeRO-3 the forward contains waits, too, so that only the data is compared reliably.

    A process is slow when its local work takes more than `factor` times the (lower) median of all, and more than the
    median by a twentieth of the step. After `patience` slow comparisons in a row one warning names the process, its
    machine, and whether the data or the forward is slow. At the end of `fit` rank 0 prints the table of the slowest
    processes. The first step is left out.

    Args:
        every_n_steps: steps between two comparisons; the end of an epoch brings one, too.
        factor: multiple of the median above which a process counts as slow.
        patience: slow comparisons in a row before the warning.
        max_rows: rows of the table.
        clock: function that returns the time, in seconds.
    """

    agree_on = ("every_n_steps",)

    def __init__(
        self,
        every_n_steps: PositiveInt = 500,
        factor: Annotated[float, Limit("above", 1)] = 1.5,
        patience: PositiveInt = 3,
        max_rows: PositiveInt = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        number_of("StragglerMonitor(clock", clock)  # raises where it is not a clock
        self.every_n_steps, self.factor, self.patience, self.max_rows = every_n_steps, factor, patience, max_rows
        self.total: dict[int, Times] = {}
        """The times since the start of `fit` by rank, as of the last comparison."""
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._inside: list[str] = []
        self._last = 0.0
        self._steps = 0
        self._forwards = 0
        self._events: deque[tuple[Any, Any]] = deque(maxlen=EVENTS)
        self._device = torch.device("cpu")
        self._slow: dict[int, int] = {}
        self._reported: set[int] = set()

    # -- the clock -----------------------------------------------------------------------------------------------------

    def begin_phase(self, part: str) -> None:
        """Count what follows as time of the phase, until another one begins inside it."""
        self._count_time()
        self._inside.append(part)
        if part == FORWARD:
            self._forwards += 1
            if has_streams(self._device.type):
                self._events.append((self._event(), None))

    def end_phase(self, part: str) -> None:
        """Count what follows as time of the phase around this one."""
        self._count_time()
        while self._inside and self._inside.pop() != part:
            pass
        if part == FORWARD and self._events and self._events[-1][1] is None:
            self._events[-1] = (self._events[-1][0], self._event())

    def _event(self) -> Any:
        return torch.accelerator.current_stream(self._device).record_event(
            torch.Event(self._device, enable_timing=True)
        )

    def _count_time(self) -> None:
        now = self._clock()
        if self._inside and self._inside[-1] in self._seconds:
            self._seconds[self._inside[-1]] += now - self._last
        self._last = now

    # -- the run -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.total.clear()
        self._slow.clear()
        self._reported.clear()
        self._inside.clear()
        self._device = trainer.device
        self._reset()
        self._steps = -1  # the first one does not count

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._steps += 1
        if self._steps == 0:
            self._reset()
        elif self._steps == self.every_n_steps:
            self._gather_times(trainer.strategy.processes)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._steps > 0:
            self._gather_times(trainer.strategy.processes)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._steps > 0:
            self._gather_times(trainer.strategy.processes)
        if self.total:
            trainer.print(self.table())

    # -- the comparison ------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Return the milliseconds per step, with the processes that have most local work first."""
        rows = sorted(self.total.values(), key=lambda times: -times.own)
        shown = rows[: self.max_rows]
        width = max([7, *(len(times.host) for times in shown)])
        heads = "".join(f"{name:>10}" for name in ("data", "forward", "the rest", "step", "own"))
        lines = [f"{'ms of a step':<14}{'machine':<{width}}{heads}"]
        for times in shown:
            parts = (times.data, times.forward, times.rest)
            cells = [1000 * part / max(times.steps, 1) for part in parts] + [1000 * times.step, 1000 * times.own]
            lines.append(f"rank {times.rank:<9}{times.host:<{width}}{''.join(f'{cell:>10.3f}' for cell in cells)}")
        if len(rows) > len(shown):
            lines.append(f"and {len(rows) - len(shown)} faster ones")
        middle = _median(times.own for times in rows)
        lines.append(f"own: data and forward, before a process waits for the others; the median is {1000 * middle:.3f}")
        return "\n".join(lines)

    def _gather_times(self, processes: SingleProcess) -> None:
        """Gather the times since the last comparison, on every process, and compare them."""
        own = self._times(processes.rank)
        self._reset()
        every = processes.all_gather_object(own)
        for times in every:
            before = self.total.get(times.rank)
            if before is not None:
                sums = [mine + former for mine, former in zip(times[2:], before[2:], strict=True)]
                times = Times(times.rank, times.host, int(sums[0]), *sums[1:])
            self.total[times.rank] = times
        if len(every) > 1:
            self._compare(every)
        if processes.is_global_zero:
            for text in self._warnings(every):
                log.warning("%s", text)

    def _times(self, rank: int) -> Times:
        seconds, forward = self._seconds, self._seconds[FORWARD]
        pairs = [(start, end) for start, end in self._events if end is not None]
        if pairs:
            pairs[-1][1].synchronize()
            on_device = sum(start.elapsed_time(end) for start, end in pairs) / 1000 / len(pairs)
            forward = max(forward, on_device * self._forwards)
        rest = seconds[BACKWARD] + seconds[OPTIMIZER]
        return Times(rank, socket.gethostname(), self._steps, seconds[DATA] + seconds[TRANSFER], forward, rest)

    def _reset(self) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._events.clear()
        self._steps = self._forwards = 0

    def _compare(self, every: list[Times]) -> None:
        middle = _median(times.own for times in every)
        for times in every:
            much = max(self.factor * middle, middle + times.step / 20)
            self._slow[times.rank] = self._slow.get(times.rank, 0) + 1 if times.own > much else 0

    def _warnings(self, every: list[Times]) -> list[str]:
        """Return one for each process that has been slow for long enough, and was not named before."""
        middle = _median(times.own for times in every)
        data = _median(times.data / max(times.steps, 1) for times in every)
        forward = _median(times.forward / max(times.steps, 1) for times in every)
        texts = []
        for times in every:
            if self._slow.get(times.rank, 0) < self.patience or times.rank in self._reported:
                continue
            self._reported.add(times.rank)
            steps = max(times.steps, 1)
            loading = times.data / steps - data > times.forward / steps - forward
            what = (
                f"waiting for data ({1000 * times.data / steps:.1f} ms, the median is {1000 * data:.1f}): look at its "
                "disk and its num_workers"
                if loading
                else f"the forward ({1000 * times.forward / steps:.1f} ms, the median is {1000 * forward:.1f}): look "
                "at its clock and temperature, and at what else runs there"
            )
            texts.append(
                f"rank {times.rank} on {times.host} keeps the others waiting: its part of a step takes "
                f"{1000 * times.own:.1f} ms, the median of all is {1000 * middle:.1f} ms. Most of it is {what}."
            )
        return texts


def _median(values: Iterable[float]) -> float:
    """Return the lower median; the module `statistics` takes as long to import as all of the callbacks."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
