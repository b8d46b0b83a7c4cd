"""How far a run has come: the one step counter and the cursor in the data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Progress:
    """Counters of a run. All are plain integers, saved in every checkpoint."""

    step: int = 0
    """Steps wholly done (`trainer.global_step`): one per window, however many optimizers there are."""
    epoch: int = 0
    """The epoch in progress, counted from 0."""
    batch: int = 0
    """Micro-batches of this epoch consumed (not merely fetched) by each process."""
    samples: int = 0
    """Samples consumed by all processes together since the start, where the loader tells their number."""
    epoch_ended: bool = False
    """The epoch's closing work (validation, schedulers, metrics) is done: a resumed run starts the next one."""
    validated_step: int = -1
    """The step at which validation last ended: a resumed run does not validate twice at the same step."""

    def next_epoch(self) -> None:
        self.epoch += 1
        self.batch = 0
        self.epoch_ended = False

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, state[field.name])
