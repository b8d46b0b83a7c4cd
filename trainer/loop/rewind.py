"""Go back to a checkpoint within a run, as a new process would go on from it."""

from __future__ import annotations

import logging

from trainer.checkpoint.hook_checkpoint import loaded_by_hooks
from trainer.checkpoint.storage import as_storage_path
from trainer.loop.callback_list import CallbackList
from trainer.loop.run import Run
from trainer.loop.training_state import load_training_state, load_weights, restore_data, restore_training

log = logging.getLogger("trainer")


def rewind(run: Run, path: str, loggers: CallbackList) -> None:
    """Restore weights, optimizers, counters, data and callbacks from a checkpoint of this run. Collective.

    Args:
        loggers: their hooks; they cut what they have of later steps, as in a resumed run.
    """
    strategy, before = run.strategy, run.progress.step
    run.watchdog.expect_slow_work()
    checkpoint = load_training_state(as_storage_path(path), True, strategy.shards_state, strategy.processes)
    strategy.release_gathered()
    run.forget_values()
    loggers.teardown(run.stage)
    loggers.setup(run.stage)
    with loaded_by_hooks(checkpoint) as shown:
        run.hooks.on_load_checkpoint(shown)
    load_weights(run, checkpoint)
    restore_data(run, checkpoint)
    restore_training(run, checkpoint)
    if run.train_loader is not None:
        run.train_loader.close()
    loggers.on_train_start()
    if strategy.processes.is_global_zero:
        log.warning("went back from step %d to step %d, to %s", before, run.progress.step, path)
