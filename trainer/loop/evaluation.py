"""Evaluation and prediction: one pass over loaders, without gradients."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch

from trainer.data.loader import Batch, BatchLoader
from trainer.errors import ConfigError
from trainer.guards.host_times import VALIDATION
from trainer.loop.run import Run
from trainer.metrics.metric_log import MetricScope, ReducedMetrics
from trainer.metrics.phases import EVALUATION, EVALUATION_DATA, Phase, during, each_wait
from trainer.metrics.state import never_reset, preserve_torchmetrics, updates_of
from trainer.runs.hook_checks import takes
from trainer.runs.monitors import refuse_misspelt_monitors
from trainer.state.leaving import Leaving, Staying
from trainer.state.no_trace import keeps_an_iterator, no_trace
from trainer.strategy import Strategy, eval_mode, synchronize_buffers

log = logging.getLogger("trainer")

_COMPLETE = Staying()


class StageHooks:
    """The hooks of one stage, of callbacks and module, with the trainer and the module bound."""

    def __init__(self, run: Run, stage: Literal["validation", "test", "predict"]) -> None:
        hooks, module = run.hooks, run.module
        self.step = f"{stage}_step"
        self.model_eval: Callable[[], None] = getattr(module, f"on_{stage}_model_eval")
        self.model_train: Callable[[], None] = getattr(module, f"on_{stage}_model_train")
        self.start, self.end = getattr(hooks, f"on_{stage}_start"), getattr(hooks, f"on_{stage}_end")
        self.epoch_start: Callable[[], None] = getattr(hooks, f"on_{stage}_epoch_start")
        self.epoch_end: Callable[[], None] = getattr(hooks, f"on_{stage}_epoch_end")
        self.batch_start: Callable[..., None] = getattr(hooks, f"on_{stage}_batch_start")
        self.batch_end: Callable[..., None] = getattr(hooks, f"on_{stage}_batch_end")


def run_evaluation(run: Run) -> list[dict[str, float]]:
    """Run `Trainer.validate` or `Trainer.test`; return the reductions by name, of each loader."""
    hooks = StageHooks(run, "test" if run.stage == "test" else "validation")
    return evaluate(run, hooks, run.loaders.evaluated, no_gradients(run.settings.inference_mode))


def validate_during_fit(run: Run) -> bool:
    """Validate inside `fit`, without an effect on the training that follows.

    Returns:
        False if a signal has stopped the run before the end: nothing was validated.
    """
    recording, updates = run.metrics.recording(run.metrics.hook_metrics), updates_of(run.metrics)
    with (
        run.saves.delayed(),
        run.activity.during("validating"),
        recording,
        run.times.during(VALIDATION),
        run.optimizer_averages.evaluated(),
    ):
        leaving = Leaving(run)
        evaluate(run, StageHooks(run, "validation"), run.loaders.val, torch.no_grad(), leaving=leaving)
        if leaving.left:
            leaving.restore()
            run.saves.drop(leaving.logged)
    if not leaving.left:
        run.values.report_once(never_reset(run.metrics, updates))
    return not leaving.left


def sanity_check(run: Run) -> None:
    """Run a few validation batches before training, to find errors early. Logged values are dropped at its end."""
    batches = run.settings.num_sanity_val_steps
    if not run.loaders.val or batches == 0 or run.settings.fast_dev_run:
        return
    if any(one.one_shot or any(map(keeps_an_iterator, one.streams())) for one in run.loaders.val.values()):
        log.info("no sanity check: it would use up the validation data, which can be read only once")
        return
    with run.saves.delayed(), run.activity.during("sanity checking"), no_trace(run), run.session.latest.dropping():
        run.hooks.on_sanity_check_start()
        few = None if batches == -1 else batches
        hooks = StageHooks(run, "validation")
        with run.optimizer_averages.evaluated(), ExitStack() as places:
            for loader in run.loaders.val.values():
                places.enter_context(loader.kept_data())
            leaving = Leaving(run)
            evaluate(run, hooks, run.loaders.val, torch.no_grad(), log_results=False, max_batches=few, leaving=leaving)
        run.hooks.on_sanity_check_end()
    refuse_misspelt_monitors(run)


def evaluate(
    run: Run,
    hooks: StageHooks,
    loaders: dict[str, BatchLoader],
    no_gradients: AbstractContextManager[Any],
    log_results: bool = True,
    max_batches: int | None = None,
    leaving: Staying = _COMPLETE,
) -> list[dict[str, float]]:
    """Run validation or test over all loaders; return the reductions by name, in a dict for each loader.

    Values that hooks at the end log are in each dict. Every sample counts once, on any number of processes. With
    several loaders, `name/loader` is the reduction over one loader and `name` that over all loaders (except for
    torchmetrics objects, which are reset after each loader).

    Args:
        run: the current run.
        hooks: of the stage.
        loaders: the loaders by name.
        no_gradients: the context without gradients.
        log_results: send the values to the loggers; False: only callbacks see them.
        max_batches: of each loader; None: all.
        leaving: may end the evaluation early, without results, if the run is stopped.
    """
    module, metrics, scope = run.module, run.metrics, MetricScope(batches=True, steps=False)
    for loader in loaders.values():
        loader.measure()
    synchronize_buffers(run.strategy)
    results: list[dict[str, float]] = [{} for _ in loaders]

    publish = partial(_publish, run, log_results)
    if run.stage == "fit":
        module.on_validation_model_zero_grad()
    with eval_mode(module), no_gradients:
        with metrics.recording(scope):
            hooks.model_eval()
            hooks.start()
            hooks.epoch_start()
            leaving.begin()
            found: list[ReducedMetrics] = []
            for dataloader_idx, (name, loader) in enumerate(loaders.items()):
                scope.loader = name if len(loaders) > 1 else ""
                deque(run_batches(run, hooks, loader, dataloader_idx, max_batches, leaving), maxlen=0)
                if leaving.left:
                    run.strategy.release_gathered()
                    return []
                found.append(metrics.read_epoch(scope))
                if len(loaders) > 1:
                    metrics.reset_computed()
            # Only when all loaders are done, because an evaluation that is left is repeated.
            for number, values in enumerate((*found, metrics.read_overall(scope))):
                publish(values, results[number : number + 1])
        run.strategy.release_gathered()
        if run.strategy.processes.world_size > 1:
            metrics.fill_empty_lists()
        # Separate from the values of the training around the evaluation.
        closing = metrics.begin_evaluation_end()
        with metrics.latest_including(closing), metrics.recording(closing):
            hooks.epoch_end()
            publish(metrics.read_epoch(closing), results)
            if run.stage == "fit" and log_results:
                run.progress.validated()
                run.saves.end_delay()
            hooks.end()
            publish(metrics.read_epoch(closing), results)
            metrics.reset_computed()
    hooks.model_train()
    return results


def _publish(run: Run, log_results: bool, values: ReducedMetrics, results: list[dict[str, float]]) -> None:
    if not log_results:
        run.session.latest.store(values)
        run.session.latest.announce(values.all)
        return
    run.values.send(values)
    for one in results:
        one.update(values.results)
    if run.stage == "fit":
        run.guards.nonfinite.check_validation(values.results)


def run_prediction(run: Run, keep: bool) -> list[list[Any]]:
    """Run `predict_step` over all loaders; return its outputs, batch by batch, in a list for each loader.

    `keep`: False to keep no outputs in memory, and return empty lists.
    """
    hooks, loaders = StageHooks(run, "predict"), run.loaders.predict
    with eval_mode(run.module), no_gradients(run.settings.inference_mode):
        hooks.model_eval()
        hooks.start()
        hooks.epoch_start()
        kept: list[list[Any]] = []
        for dataloader_idx, loader in enumerate(loaders.values()):
            outputs = run_batches(run, hooks, loader, dataloader_idx)
            kept.append([*deque(outputs, maxlen=None if keep and run.strategy.processes.reports else 0)])
        run.strategy.release_gathered()
        hooks.epoch_end()
        hooks.end()
    hooks.model_train()
    return kept


def run_batches(
    run: Run,
    hooks: StageHooks,
    loader: BatchLoader,
    dataloader_idx: int,
    max_batches: int | None = None,
    leaving: Staying = _COMPLETE,
) -> Iterator[Any]:
    """Yield the outputs of the step method over one loader."""
    metrics, transfer = run.metrics, run.transfer(dataloader_idx)
    call_step = during(run.phase, EVALUATION, run.strategy.call_step)
    step, several = getattr(run.module, hooks.step), len(run.loaders.evaluated) > 1
    # As in Lightning: without the index of the only loader, unless the step has to have it.
    index = (dataloader_idx,) if several else ()
    step_index = (dataloader_idx,) if (takes(step, 3) if several else not takes(step, 2)) else ()
    batches = leaving.until_stopped(islice(_batches(run.strategy, run.phase, loader), max_batches), loader, max_batches)
    for batch_idx, batch in enumerate(batches):
        run.activity.batch = dataloader_idx, batch_idx
        metrics.start_batch(batch.data, batch.samples)
        data = metrics.batch = transfer(batch.data)
        arguments = (data, batch_idx, *step_index)
        if batch.is_padding:
            with preserve_torchmetrics(metrics):
                run.strategy.call_step(hooks.step, *arguments)
            continue
        hooks.batch_start(data, batch_idx, *index)
        outputs = call_step(hooks.step, *arguments)
        run.clock.watchdog.heartbeats += 1
        hooks.batch_end(outputs, data, batch_idx, *index)
        # Nothing of this batch may stay in memory during the next forward.
        del data, arguments, batch
        metrics.batch = None
        kept = [outputs]
        del outputs
        yield kept.pop()
    run.activity.batch = None


def _batches(strategy: Strategy, phase: Phase, loader: BatchLoader) -> Iterator[Batch]:
    """Yield a loader's batches. With collectives in the forward, processes with fewer batches repeat one as padding."""
    loader.measure(epoch=0)  # again, after the hooks
    batches = each_wait(phase, EVALUATION_DATA, loader.iterate(epoch=0))
    if not strategy.collective_forward or strategy.processes.world_size == 1 or loader.samples_per_epoch is not None:
        yield from batches  # the loader of a plain DataLoader pads already
        return
    last: Batch | None = None
    while True:
        batch = next(batches, None)
        last = batch if batch is not None else last and last._replace(samples=0)
        ranks = strategy.processes.all_gather_object((batch is not None, last is not None))
        has_next, has_any = zip(*ranks, strict=True)
        if not any(has_next):
            return
        if not all(has_any):
            raise ConfigError(
                f"the loader gives rank {has_any.index(False)} no batch at all, but others have some, and strategy "
                f"{strategy.name!r} needs all processes in each forward: give every process at least one batch."
            )
        assert last is not None
        yield last


def no_gradients(inference_mode: bool) -> AbstractContextManager[Any]:
    """Return `torch.inference_mode` or `torch.no_grad`."""
    return torch.inference_mode() if inference_mode else torch.no_grad()
