"""Manual optimization: a step in which the module itself calls backward and steps its optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.loader import Batch
from trainer.loop.accumulation import StepOutputs, loss_divisors
from trainer.profiling import FORWARD

if TYPE_CHECKING:
    from trainer.trainer import Trainer


def manual_step(trainer: Trainer, window: list[Batch]) -> StepOutputs:
    """Call `training_step` with the window's one batch; what it calls comes back through the trainer."""
    batch, batch_idx = window[0], trainer.progress.batch
    data = trainer.transfer(batch.data, 0)
    trainer.metrics.start_batch(data, batch.samples)
    (trainer.manual_loss_divisor,) = loss_divisors(
        window, trainer.module, trainer.strategy, trainer.weights_loss_by_items
    )
    trainer.hooks.on_train_batch_start(trainer, trainer.module, data, batch_idx)
    with trainer.phase(FORWARD):
        outputs = trainer.strategy.call("training_step", data, batch_idx)
    return outputs, data, []
