"""GradientAccumulationScheduler: set the number of micro-batches of a window by epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.arguments import NonNegativeInt, PositiveInt, whole_number
from trainer.callback import AccumulationSchedule
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer


class GradientAccumulationScheduler(AccumulationSchedule):
    """Set `trainer.accumulate_grad_batches` at the start of epochs.

    Args:
        scheduling: `{epoch: n}`: from that epoch on (counted from 0), a window has `n` micro-batches. Before the first
            epoch named, the trainer's own `accumulate_grad_batches` holds.

    Raises:
        ConfigError: an epoch or a number of micro-batches is not a valid integer; the module uses manual
            optimization; or the schedule has epoch 0, and the trainer's `accumulate_grad_batches` differs from it.
    """

    def __init__(self, scheduling: Mapping[NonNegativeInt | str, PositiveInt]) -> None:
        super().__init__()
        # The keys of a JSON object are strings.
        epochs: list[Any] = [whole_number(one) if isinstance(one, str) else one for one in scheduling]
        if not epochs or None in epochs:
            raise ConfigError(
                f"GradientAccumulationScheduler got {scheduling!r}: give {{epoch: micro-batches}}, for example "
                "{0: 8, 4: 1}."
            )
        self.scheduling: dict[int, int] = dict(sorted(zip(epochs, scheduling.values(), strict=True)))

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
                "GradientAccumulationScheduler has no effect with automatic_optimization = False: remove the callback."
            )
        constant = trainer.settings.accumulate_grad_batches
        if constant == "auto":
            raise ConfigError(
                "GradientAccumulationScheduler and accumulate_grad_batches='auto' both set the window: remove one."
            )
        if 0 in self.scheduling and constant not in (1, self.scheduling[0]):
            raise ConfigError(
                f"accumulate_grad_batches={constant} and GradientAccumulationScheduler({self.scheduling}) both say how "
                "the run begins. Remove accumulate_grad_batches, or epoch 0 from the schedule."
            )
        self._apply(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._apply(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._apply(trainer)

    def _apply(self, trainer: Trainer) -> None:
        constant = trainer.settings.window
        trainer.accumulate_grad_batches = self.micro_batches(trainer.current_epoch, constant)
