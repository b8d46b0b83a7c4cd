"""GradientAccumulationScheduler: set the number of micro-batches of a window by epoch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.callback import AccumulationSchedule
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class GradientAccumulationScheduler(AccumulationSchedule):
    """Set `trainer.accumulate_grad_batches` at the start of epochs.

    Args:
        scheduling: `{epoch: n}`: from that epoch on (counted from 0), a window has `n` micro-batches. Before the first
            epoch named, the trainer's own `accumulate_grad_batches` holds.

    Raises:
        ConfigError: an epoch or a number of micro-batches is not a valid integer; the module uses manual
            optimization; or epoch 0 is scheduled and the trainer's `accumulate_grad_batches` has another value.
    """

    def __init__(self, scheduling: Mapping[int | str, int]) -> None:
        self.scheduling = _read_schedule(scheduling)

    def micro_batches(self, epoch: int, otherwise: int) -> int:
        """Return the micro-batches of a window in `epoch`; `otherwise` before the first epoch of the schedule."""
        started = [first for first in self.scheduling if first <= epoch]
        return self.scheduling[max(started)] if started else otherwise

    @property
    def epochs(self) -> list[int]:
        """The epochs of the schedule, in order."""
        return sorted(self.scheduling)

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the micro-batches of a window in `epoch`; 1 before the first epoch of the schedule."""
        return self.micro_batches(epoch, 1)

    def going_to_accumulate_grad_batches(self) -> bool:
        """Return True if a window of the schedule has several micro-batches."""
        return any(micro_batches > 1 for micro_batches in self.scheduling.values())

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "GradientAccumulationScheduler has no effect on a module with automatic_optimization = False, which "
                "decides itself when its optimizers step: remove the callback."
            )
        constant = trainer.settings.accumulate_grad_batches
        if constant == "auto":
            raise ConfigError(
                "GradientAccumulationScheduler and accumulate_grad_batches='auto' both say how many micro-batches a "
                "step has: remove one of them."
            )
        if 0 in self.scheduling and constant not in (1, self.scheduling[0]):
            raise ConfigError(
                f"accumulate_grad_batches={constant} and GradientAccumulationScheduler({self.scheduling}) both say how "
                "the run begins. Remove accumulate_grad_batches, or epoch 0 from the schedule."
            )
        first = min(self.scheduling)
        if first > 0 and constant != 1 and trainer.is_global_zero:
            log.warning(
                "accumulate_grad_batches=%d holds until epoch %d, and from there on GradientAccumulationScheduler(%s)",
                constant,
                first,
                self.scheduling,
            )
        self._apply(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._apply(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._apply(trainer)

    def _apply(self, trainer: Trainer) -> None:
        constant = trainer.settings.window
        trainer.accumulate_grad_batches = self.micro_batches(trainer.current_epoch, constant)


def _read_schedule(scheduling: Any) -> dict[int, int]:
    """Return the schedule, sorted. Epochs may be strings of digits, because the keys of a JSON object are."""
    name = "GradientAccumulationScheduler"
    if not isinstance(scheduling, Mapping) or not scheduling:
        raise ConfigError(f"{name} got {scheduling!r}: give {{epoch: micro-batches}}, for example {{0: 8, 4: 1}}.")
    schedule = {}
    for epoch, number in scheduling.items():
        first = int(epoch) if isinstance(epoch, str) and epoch.isdecimal() else epoch
        if type(first) is not int or first < 0 or type(number) is not int or number < 1:
            raise ConfigError(f"{name}: {epoch!r}: {number!r}: give an epoch from 0, and micro-batches from 1.")
        schedule[first] = number
    return dict(sorted(schedule.items()))
