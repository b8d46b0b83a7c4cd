"""ValidationClock: validate after so much time, `Trainer(val_check_interval="00:01:00:00")`."""

from __future__ import annotations

import time

from trainer.distributed.process_group import SingleProcess


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
