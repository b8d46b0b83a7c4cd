"""Evaluation and prediction: one pass over loaders, without gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.loader import Batch, BatchLoader
from trainer.errors import ConfigError
from trainer.metrics.metric_log import MetricScope, ReducedMetrics
from trainer.metrics.state import preserve_torchmetrics
from trainer.module import TrainModule
from trainer.profiling import EVALUATION, EVALUATION_DATA, each_wait
from trainer.seed import isolated_rng
from trainer.strategy import eval_mode, synchronize_buffers

if TYPE_CHECKING:
    from trainer.trainer import Trainer


@dataclass(frozen=True)
class StageHooks:
    """The hooks of one kind of pass, callbacks' and module's."""

    step: str
    model_eval: Callable[[], None]
    model_train: Callable[[], None]
    start: Callable[..., None]
    end: Callable[..., None]
    epoch_start: Callable[..., None]
    epoch_end: Callable[..., None]
    batch_start: Callable[..., None]
    batch_end: Callable[..., None]


def validation_moments(trainer: Trainer) -> StageHooks:
    hooks, module = trainer.hooks, trainer.module
    return StageHooks(
        "validation_step",
        module.on_validation_model_eval,
        module.on_validation_model_train,
        hooks.on_validation_start,
        hooks.on_validation_end,
        hooks.on_validation_epoch_start,
        hooks.on_validation_epoch_end,
        hooks.on_validation_batch_start,
        hooks.on_validation_batch_end,
    )


def test_moments(trainer: Trainer) -> StageHooks:
    hooks, module = trainer.hooks, trainer.module
    return StageHooks(
        "test_step",
        module.on_test_model_eval,
        module.on_test_model_train,
        hooks.on_test_start,
        hooks.on_test_end,
        hooks.on_test_epoch_start,
        hooks.on_test_epoch_end,
        hooks.on_test_batch_start,
        hooks.on_test_batch_end,
    )


def predict_moments(trainer: Trainer) -> StageHooks:
    hooks, module = trainer.hooks, trainer.module
    return StageHooks(
        "predict_step",
        module.on_predict_model_eval,
        module.on_predict_model_train,
        hooks.on_predict_start,
        hooks.on_predict_end,
        hooks.on_predict_epoch_start,
        hooks.on_predict_epoch_end,
        hooks.on_predict_batch_start,
        hooks.on_predict_batch_end,
    )


def validate_during_fit(trainer: Trainer) -> None:
    """Validation inside `fit`: afterwards training goes on as if nothing had happened."""
    trainer.validating, trainer.training = True, False
    evaluate(trainer, validation_moments(trainer), trainer.val_loaders, torch.no_grad())
    trainer.validating, trainer.training = False, True


def sanity_check(trainer: Trainer) -> None:
    """A few validation batches before training, to find errors early; nothing of it is logged or remembered."""
    batches = trainer.settings.num_sanity_val_steps
    if not trainer.val_loaders or batches == 0:
        return
    trainer.sanity_checking = True
    with isolated_rng(trainer.device):
        trainer.hooks.on_sanity_check_start(trainer, trainer.module)
        few = None if batches == -1 else batches
        evaluate(
            trainer,
            validation_moments(trainer),
            trainer.val_loaders,
            torch.no_grad(),
            log_results=False,
            max_batches=few,
        )
        trainer.hooks.on_sanity_check_end(trainer, trainer.module)
    trainer.sanity_checking = False


def evaluate(
    trainer: Trainer,
    moments: StageHooks,
    feeds: dict[str, BatchLoader],
    no_gradients: AbstractContextManager[Any],
    log_results: bool = True,
    max_batches: int | None = None,
) -> dict[str, float]:
    """One pass of validation or test over all loaders.

    Every sample counts once, on any number of processes. Returns the reductions over the pass by name; with several
    loaders `name/loader` for each, and `name` over all of them (not for torchmetrics objects, which start afresh with
    each loader). `log_results=False` leaves no trace of them. `max_batches`: of each loader.
    """
    module, metrics = trainer.module, trainer.metrics
    scope = MetricScope(batches=True, steps=False)
    trainer.dataloader_names = list(feeds)
    synchronize_buffers(trainer.strategy)
    results: dict[str, float] = {}

    def read(values: ReducedMetrics) -> None:
        if log_results:
            results.update(trainer.log_to_loggers(values))

    if trainer.stage == "fit":
        module.on_validation_model_zero_grad()
    with eval_mode(module), no_gradients:
        with metrics.recording(scope):
            moments.model_eval()
            moments.start(trainer, module)
            moments.epoch_start(trainer, module)
            for dataloader_idx, (name, feed) in enumerate(feeds.items()):
                scope.loader = name if len(feeds) > 1 else ""
                for _ in run_batches(trainer, moments, feed, dataloader_idx, max_batches):
                    pass
                read(metrics.read_epoch(scope))
            read(metrics.read_overall(scope))
        with metrics.recording(metrics.hook_metrics):
            moments.epoch_end(trainer, module)
            read(metrics.read_epoch(metrics.hook_metrics))
            if trainer.stage == "fit" and log_results:
                trainer.progress.validated_step = trainer.progress.step
            moments.end(trainer, module)
            read(metrics.read_epoch(metrics.hook_metrics))
    moments.model_train()
    return results


def predict(trainer: Trainer, feeds: dict[str, BatchLoader]) -> Iterator[Any]:
    """The outputs of `predict_step`, batch by batch, loader by loader."""
    module, moments = trainer.module, predict_moments(trainer)
    trainer.dataloader_names = list(feeds)
    with eval_mode(module), no_gradients(trainer):
        moments.model_eval()
        moments.start(trainer, module)
        moments.epoch_start(trainer, module)
        for dataloader_idx, feed in enumerate(feeds.values()):
            yield from run_batches(trainer, moments, feed, dataloader_idx)
        moments.epoch_end(trainer, module)
        moments.end(trainer, module)
    moments.model_train()


def run_batches(
    trainer: Trainer, moments: StageHooks, feed: BatchLoader, dataloader_idx: int, max_batches: int | None = None
) -> Iterator[Any]:
    """The outputs of the step method over one loader."""
    module, metrics = trainer.module, trainer.metrics
    with_idx = takes_dataloader_idx(module, moments.step)
    for batch_idx, batch in enumerate(islice(_batches(trainer, feed), max_batches)):
        data = trainer.transfer(batch.data, dataloader_idx)
        metrics.start_batch(data, batch.samples)
        arguments = (data, batch_idx, dataloader_idx) if with_idx else (data, batch_idx)
        if batch.is_padding:
            with preserve_torchmetrics(metrics):
                trainer.strategy.call(moments.step, *arguments)
            continue
        moments.batch_start(trainer, module, data, batch_idx, dataloader_idx)
        with trainer.phase(EVALUATION):
            outputs = trainer.strategy.call(moments.step, *arguments)
        trainer.watchdog.heartbeats += 1
        moments.batch_end(trainer, module, outputs, data, batch_idx, dataloader_idx)
        yield outputs


def _batches(trainer: Trainer, feed: BatchLoader) -> Iterator[Batch]:
    """A loader's batches. Where every forward needs all processes, those that have fewer repeat one as padding."""
    batches = each_wait(trainer.phase, EVALUATION_DATA, feed.iterate(epoch=0))
    strategy = trainer.strategy
    if not strategy.collective_forward or strategy.processes.world_size == 1 or feed.samples_per_epoch is not None:
        yield from batches  # A plain DataLoader brings its padding along.
        return
    last: Batch | None = None
    while True:
        batch = next(batches, None)
        last = batch if batch is not None else last and last._replace(samples=0)
        there = strategy.processes.all_gather_object((batch is not None, last is not None))
        if not any(has for has, _ in there):
            return
        if not all(has_one for _, has_one in there):
            without = [rank for rank, (_, has_one) in enumerate(there) if not has_one]
            raise ConfigError(
                f"the loader gives rank {without[0]} no batch at all, but others have some, and strategy "
                f"{strategy.name!r} needs all processes in each forward: give every process at least one batch."
            )
        assert last is not None
        yield last


def no_gradients(trainer: Trainer) -> AbstractContextManager[Any]:
    """`torch.inference_mode`, or `torch.no_grad` if the settings say so."""
    return torch.inference_mode() if trainer.settings.inference_mode else torch.no_grad()


def takes_dataloader_idx(module: TrainModule, step: str) -> bool:
    """Whether the module's step method wants to know which loader a batch is from."""
    parameters = inspect.signature(getattr(module, step)).parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional for p in parameters.values()) > 2
