"""Compute the running statistics of BatchNorms again, for other weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.metrics.metric_log import MetricScope
from trainer.state.no_trace import no_trace

if TYPE_CHECKING:
    from trainer.loop.run import Run

log = logging.getLogger("trainer")


@torch.no_grad()
def redo_batch_statistics(run: Run) -> dict[str, torch.Tensor]:
    """Return the running means and variances by name, as means over the batches of an epoch and over all readers.

    The module, the place in the data and the random numbers stay unchanged. Collective.
    """
    module, strategy, loader = run.module, run.strategy, run.train_loader
    assert loader is not None
    norms = {name: one for name, one in module.named_modules() if keeps_statistics(one)}
    if loader.one_shot:
        log.warning("the data can be read only once, so BatchNorms keep the statistics of the training")
        return {}
    run.clock.watchdog.expect_slow_work()
    found: dict[str, torch.Tensor] = {}
    readers, transfer = strategy.processes.readers, run.transfer()
    with no_trace(run), loader.kept_place(), run.metrics.recording(MetricScope(batches=True, steps=False)):
        for one in norms.values():
            one.reset_running_stats()
            one.momentum = None  # the mean over all batches
        # Of the last epoch that was trained: a resumed run with nothing left to train is in the one after it.
        epoch = max(0, run.progress.epoch - (run.progress.batch == 0))
        for number, batch in enumerate(loader.iterate(epoch)):
            run.metrics.start_batch(batch.data, batch.samples)
            data = transfer(batch.data)
            strategy.call_step("training_step", data, number)
            run.clock.watchdog.heartbeats += 1
        strategy.release_gathered()
        for name, one in norms.items():
            for kind, statistic in (("running_mean", one.running_mean), ("running_var", one.running_var)):
                assert statistic is not None
                found[f"{name}.{kind}"] = strategy.processes.sum_over_readers(statistic) / readers
    return found


def keeps_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a BatchNorm with running statistics."""
    return isinstance(module, _BatchNorm) and module.track_running_stats and module.running_mean is not None
