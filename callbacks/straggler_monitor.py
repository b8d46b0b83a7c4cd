"""StragglerMonitor: compare the step times of the processes, and name one that is slower than the others."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch

from trainer.arguments import Limit, PositiveInt, number_of
from trainer.callback import Callback
from trainer.distributed.devices import has_streams
from trainer.distributed.sendable import sendable
from trainer.metrics.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, TRANSFER, PhaseClock

if TYPE_CHECKING:
    from trainer.distributed.process_group import SingleProcess
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

PARTS = (DATA, TRANSFER, FORWARD, BACKWARD, OPTIMIZER)
EVENTS = 64
"""Maximum number of forward passes timed on the device between two comparisons."""


@sendable
class StepTimes(NamedTuple):
    """Seconds that the steps of a process took in total."""

    rank: int
    host: str
    steps: int
    data: float
    """Waiting for data and moving it to the device."""
    forward: float
    rest: float
    """Backward and update; processes wait for each other there."""

    def per_step(self) -> dict[str, float]:
        """Return the milliseconds of a step, of its parts, and of local work, which excludes waits for other ranks."""
        ms = 1000 / max(self.steps, 1)
        own, step = self.data + self.forward, self.data + self.forward + self.rest
        parts = {"data": self.data, "forward": self.forward, "the rest": self.rest, "step": step, "own": own}
        return {name: seconds * ms for name, seconds in parts.items()}


class StragglerMonitor(Callback):
    """Compare the step times of the processes, and name one that is consistently slower than the others.

    Processes wait for each other in every step, so their steps take the same time. They differ in the work before the
    wait: loading data and the forward pass. These times are gathered every `every_n_steps`, in one small exchange;
    between two exchanges nothing is sent, and no device is synchronized. On an accelerator the forward is timed on the
    device. With fsdp and ZeRO-3 the forward contains waits, so only the data times can be compared.

    A process is slow if its local work takes more than `factor` times the (lower) median of all processes, and exceeds
    the median by a twentieth of the step. After `patience` slow comparisons in a row, one warning names the process,
    its machine, and the slow part: data or forward. At the end of `fit`, rank 0 prints a table of the slowest
    processes. The first step does not count.

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
        self.total: dict[int, StepTimes] = {}
        """The times since the start of `fit` by rank, as of the last comparison."""
        self._phases = PhaseClock(clock, "outside")
        self._steps = 0
        self._forwards = 0
        self._events: deque[tuple[Any, Any]] = deque(maxlen=EVENTS)
        self._device = torch.device("cpu")
        self._slow: dict[int, int] = {}
        self._reported: set[int] = set()

    # -- the clock -----------------------------------------------------------------------------------------------------

    def begin_phase(self, part: str) -> None:
        """Count what follows as time of the phase, until another one begins inside it."""
        self._phases.begin(part)
        if part == FORWARD:
            self._forwards += 1
            if has_streams(self._device.type):
                self._events.append((self._event(), None))

    def end_phase(self, part: str) -> None:
        """Count what follows as time of the phase around this one."""
        self._phases.end(part)
        if part == FORWARD and self._events and self._events[-1][1] is None:
            self._events[-1] = (self._events[-1][0], self._event())

    def _event(self) -> Any:
        return torch.accelerator.current_stream(self._device).record_event(
            torch.Event(self._device, enable_timing=True)
        )

    # -- the run -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self.total.clear()
        self._slow.clear()
        self._reported.clear()
        self._phases.start()
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
        self.on_train_epoch_end(trainer, pl_module)  # a stop inside an epoch
        if self.total:
            trainer.print(self.table())

    # -- the comparison ------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Return the milliseconds per step, with the processes that have most local work first."""
        rows = sorted(self.total.values(), key=lambda times: -times.per_step()["own"])
        width = max([7, *(len(times.host) for times in rows)])
        heads = "".join(f"{name:>10}" for name in rows[0].per_step())
        lines = [f"{'ms of a step':<14}{'machine':<{width}}{heads}"]
        for times in rows[: self.max_rows]:
            cells = "".join(f"{cell:>10.3f}" for cell in times.per_step().values())
            lines.append(f"rank {times.rank:<9}{times.host:<{width}}{cells}")
        middle = _medians(rows)["own"]
        lines.append(f"own: data and forward, before a process waits for the others; the median is {middle:.3f}")
        return "\n".join(lines)

    def _gather_times(self, processes: SingleProcess) -> None:
        """Gather the times since the last comparison, on every process, and compare them."""
        own = self._times(processes.rank)
        self._reset()
        every = processes.all_gather_object(own)
        for rank, host, *now in every:
            before = self.total.get(rank, (rank, host, 0, 0.0, 0.0, 0.0))[2:]
            steps, *seconds = (one + other for one, other in zip(now, before, strict=True))
            self.total[rank] = StepTimes(rank, host, int(steps), *seconds)
        warnings = self._compare(every)
        if processes.is_global_zero:
            for text in warnings:
                log.warning("%s", text)

    def _compare(self, every: list[StepTimes]) -> list[str]:
        """Return a warning for each process that has been slow for long enough, and was not named before."""
        middle, texts = _medians(every), []
        for times in every:
            rank, ms = times.rank, times.per_step()
            much = max(self.factor * middle["own"], middle["own"] + ms["step"] / 20)
            self._slow[rank] = self._slow.get(rank, 0) + 1 if ms["own"] > much else 0
            if self._slow[rank] >= self.patience and rank not in self._reported:
                self._reported.add(rank)
                texts.append(_warning(times, middle))
        return texts

    def _times(self, rank: int) -> StepTimes:
        seconds = dict.fromkeys(PARTS, 0.0) | self._phases.seconds
        forward = seconds[FORWARD]
        pairs = [(start, end) for start, end in self._events if end is not None]
        if pairs:
            pairs[-1][1].synchronize()
            on_device = sum(start.elapsed_time(end) for start, end in pairs) / 1000 / len(pairs)
            forward = max(forward, on_device * self._forwards)
        rest = seconds[BACKWARD] + seconds[OPTIMIZER]
        return StepTimes(rank, socket.gethostname(), self._steps, seconds[DATA] + seconds[TRANSFER], forward, rest)

    def _reset(self) -> None:
        self._phases.seconds.clear()
        self._events.clear()
        self._steps = self._forwards = 0


def _warning(times: StepTimes, middle: dict[str, float]) -> str:
    """Return a sentence about a slow process, given the medians of all processes."""
    advice = {
        "data": ("waiting for data", "its disk and its num_workers"),
        "forward": ("the forward", "its clock and temperature, and at what else runs there"),
    }
    ms = times.per_step()
    most = max(advice, key=lambda part: ms[part] - middle[part])
    what, look = advice[most]
    return (
        f"rank {times.rank} on {times.host} keeps the others waiting: its part of a step takes {ms['own']:.1f} ms, the "
        f"median of all is {middle['own']:.1f} ms. Most of it is {what} ({ms[most]:.1f} ms, the median is "
        f"{middle[most]:.1f}): look at {look}."
    )


def _medians(every: Sequence[StepTimes]) -> dict[str, float]:
    """Return the lower median of each column."""
    return {name: median_low(times.per_step()[name] for times in every) for name in every[0].per_step()}
