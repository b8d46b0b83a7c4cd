"""The counters of a run: steps, and the cursor in the data."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainer.distributed.process_group import SingleProcess


@dataclass
class Progress:
    """Counters of a run. All are plain integers, saved in every checkpoint."""

    step: int = 0
    """Completed steps (`trainer.global_step`): one per window, for any number of optimizers."""
    epoch: int = 0
    """The epoch in progress, counted from 0."""
    batch: int = 0
    """Micro-batches of this epoch consumed (not merely fetched) by each process."""
    samples: int = 0
    """Samples consumed by all processes together since the start, if the loader knows their number."""
    epoch_ended: bool = False
    """True after the end of an epoch (validation, schedulers, metrics): a resumed run starts the next epoch."""
    validated_step: int = -1
    """The step of the last validation, so that a resumed run does not validate twice at the same step."""
    epoch_started: bool = False
    """True from `on_train_epoch_start` on: what that hook logs and draws does not count again in a resumed run."""
    window: int = 0
    """Micro-batches of the last step; 0: not known."""
    batches_before: int = 0
    """Micro-batches consumed in the epochs before this one."""

    @property
    def epoch_of_step(self) -> int:
        """The epoch of the last step: between two epochs, and after the last, the one that has ended."""
        return self.epoch - int(self.batch == 0 and self.epoch > 0)

    def validated(self) -> None:
        self.validated_step = self.step

    def split_batches(self, parts: int) -> None:
        """Count in parts of the batches that were counted so far."""
        self.batch *= parts
        self.window *= parts
        self.batches_before *= parts

    def count_in_batches(self, batch: int, before: int, now: int) -> None:
        """Count in micro-batches of `now` samples what was counted in those of `before`; `batch` are of this epoch."""
        self.batch, self.window, self.batches_before = batch, 0, self.batches_before * before // now

    def next_epoch(self) -> None:
        self.epoch += 1
        self.batches_before += self.batch
        self.batch = 0
        self.epoch_started = self.epoch_ended = False

    def resume(self, state: dict[str, Any]) -> None:
        """Take the counters of a checkpoint with which a run goes on: after an epoch's end those of the next one."""
        self.load_state_dict(state)
        if self.epoch_ended:
            self.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, state[field.name])


class ValidationClock:
    """Says, by the clock of rank 0, after which steps the time between two validations is over.

    Args:
        seconds: between two validations.
        processes: of the run; with several the clock is read every `every_n_steps` steps, since that is a collective.
    """

    def __init__(self, seconds: float, processes: SingleProcess, every_n_steps: int) -> None:
        self.seconds, self.processes = seconds, processes
        self.every_n_steps = every_n_steps if processes.world_size > 1 else 1
        self._last = time.monotonic()
        self._decided = (0, False)

    def is_up(self, step: int) -> bool:
        """Return True if a validation is due after `step`; the same answer however often it is asked. Collective."""
        if self._decided[0] != step:
            is_up = False
            if step % self.every_n_steps == 0:
                is_up = self.processes.broadcast_object(time.monotonic() - self._last >= self.seconds)
            if is_up:
                self._last = time.monotonic()
            self._decided = (step, is_up)
        return self._decided[1]
