"""The counters of a run: steps, and the cursor in the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


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

    def validated(self) -> None:
        self.validated_step = self.step

    def split_batches(self, parts: int) -> None:
        """Count in parts of the batches that were counted so far."""
        self.batch *= parts

    def next_epoch(self) -> None:
        self.epoch += 1
        self.batch = 0
        self.epoch_ended = False

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, state[field.name])
