"""SimpleProfiler: a table of the time in each part of a run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.arguments import number_of
from trainer.callbacks.advanced_profiler import Profiler
from trainer.errors import ConfigError
from trainer.metrics.phases import DATA, PhaseClock

if TYPE_CHECKING:
    from trainer.data.loader import BatchLoader
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

LOOP = "the loop itself"


class SimpleProfiler(Profiler):
    """Print, at the end of each run, the time in each part of it: waiting for data, transfer, forward, backward,
    optimizer, logging, checkpoints, and every hook of a callback by name.

    Time belongs to the innermost part, so that the parts add up to the total: a checkpoint that ModelCheckpoint writes
    is `checkpoint`, and the rest of that hook `ModelCheckpoint.on_train_epoch_end`.

    It is the host's time. A device works asynchronously: `forward` is how long the host took to launch the kernels, and
    a host that waits for results (reading logged values, a `.item()`) waits for all of them.

    If the wait for data takes a fifth of the time or more, a line below the table says what to change.

    Args:
        synchronize: synchronize with the device at each end of a part, so that its work counts in the right part. The
            run gets slower, as host and device no longer overlap; the table shows the device's proportions.
        clock: function that returns the time, in seconds.
        dirpath, filename: as in `Profiler`.
        extended: no effect: the table always has calls, totals, means and shares.
    """

    MUCH = 0.2
    """The least share of waiting for data that prints a hint."""

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        extended: bool = True,
        *,
        synchronize: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        number_of("SimpleProfiler(clock", clock)  # raises where it is not a clock
        self._phases = PhaseClock(self._now, LOOP)
        self.seconds = self._phases.seconds
        """Seconds by part."""
        self.calls: dict[str, int] = {}
        """Number of times each part was entered."""
        self.recorded_durations: dict[str, list[float]] = {}
        """The seconds that your own actions took, each time."""
        self.current_actions: dict[str, float] = {}
        """The times at which the actions in progress began."""
        self.synchronize = synchronize
        super().__init__(dirpath, filename)
        self._clock = clock

    def summary(self) -> str:
        """Return the table of the parts so far, the largest first; empty without any."""
        if not self.seconds:
            return ""
        parts = sorted(self.seconds, key=lambda part: -self.seconds[part])
        width = max([24, *(len(part) for part in parts)])
        total = sum(self.seconds.values())
        title = "part" if self._stage is None else f"part of {self._stage}"
        lines = [f"{title:<{width}}{'calls':>10}{'total s':>12}{'mean ms':>12}{'share':>8}"]
        for part in parts:
            seconds, calls = self.seconds[part], self.calls[part]
            lines.append(
                f"{part:<{width}}{calls:>10,}{seconds:>12.3f}{1000 * seconds / calls:>12.3f}"
                f"{seconds / (total or 1.0):>8.1%}"
            )
        lines.append(f"{'total':<{width}}{'':>10}{total:>12.3f}")
        return "\n".join(lines)

    def start(self, action_name: str) -> None:
        if action_name in self.current_actions:
            raise ConfigError(f"SimpleProfiler.start({action_name!r}): this action is in progress. Call stop first.")
        self._begin(action_name)
        self.current_actions[action_name] = self._now()

    def stop(self, action_name: str) -> None:
        if action_name not in self.current_actions:
            self._refuse_to_stop(action_name)
        seconds = self._now() - self.current_actions.pop(action_name)
        self.recorded_durations.setdefault(action_name, []).append(seconds)
        self._phases.end(action_name)

    # -- the clock -----------------------------------------------------------------------------------------------------

    def begin_phase(self, name: str) -> None:
        """Count what follows as time of the phase, until another one begins inside it."""
        if self._phases.runs:
            self._begin(name)

    def end_phase(self, name: str) -> None:
        """Count what follows as time of the phase around this one."""
        if self._phases.runs:
            self._phases.end(name)

    def _begin(self, part: str) -> None:
        self._phases.begin(part)
        self.calls[part] = self.calls.get(part, 0) + 1

    def _now(self) -> float:
        if self.synchronize and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return self._clock()

    # -- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._start()

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._start()  # without the set-up

    def _start(self) -> None:
        self.calls.clear()
        self.calls[LOOP] = 1
        self._phases.start()

    def teardown(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        """Show the time until the end, or until an error."""
        if not self._phases.runs:
            return
        self._phases.stop()
        super().teardown(trainer, pl_module, stage)
        share = self.seconds.get(DATA, 0.0) / (sum(self.seconds.values()) or 1.0)
        if share >= self.MUCH and trainer.train_loader is not None and self.dirpath is None:
            advice = faster_loading(trainer.train_loader)
            trainer.print(f"{share:.0%} of the time went into waiting for training data. {advice}")


def faster_loading(loader: BatchLoader) -> str:
    """Return a sentence that says how a loader may become faster."""
    if loader.num_workers is None:
        return "The data come from your own iterable: load ahead in it, or give a DataLoader with num_workers=4."
    return (
        f"The DataLoader has num_workers={loader.num_workers}, and this machine {os.cpu_count()} cores: try more "
        "workers, with persistent_workers=True if epochs are short; a larger prefetch_factor; or less work in the "
        "dataset's __getitem__ (decode and resize once, beforehand)."
    )
