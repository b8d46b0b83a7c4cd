"""Checkpoint state of a half-finished epoch's metrics: logged values and torchmetrics objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer.errors import CheckpointError
from trainer.metrics.metric_log import Entry, LogOptions, MetricLog, MetricScope
from trainer.metrics.reductions import Accumulator
from trainer.metrics.torchmetrics_lists import metrics_in

log = logging.getLogger("trainer")


def metrics_state(metrics: MetricLog) -> dict[str, Any]:
    """Return this process's accumulated values since the last read.

    Lists of tensors in torchmetrics objects are not copied.
    """
    ended = set(map(id, metrics.computed))
    objects = {name: _object_state(metric) for name, metric in metrics_in(metrics.module) if id(metric) not in ended}
    return {
        "train": _scope_state(metrics.train),
        "steps": _unflushed(metrics.train),
        "hooks": _scope_state(metrics.hook_metrics),
        "names": sorted(metrics.names),
        "trackers": {name: tracker.n_steps for name, tracker in _trackers(metrics.module)},
        "objects": {name: state for name, state in objects.items() if state is not None},
    }


def load_metrics_state(metrics: MetricLog, states: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Restore the merged `states`, each returned by `metrics_state` of one process.

    `states` has one item if the checkpoint has as many processes, else any number. A torchmetrics object
    that cannot be merged is reset, with a warning.
    """
    for name, tracker in _trackers(metrics.module):
        _set_steps(tracker, max((state.get("trackers", {}).get(name, 0) for state in states), default=0))
    objects = dict(metrics_in(metrics.module))
    metrics.train.entries.clear()
    metrics.hook_metrics.entries.clear()
    for state in states:
        metrics.names.update(state.get("names", ()))
        _add_to_scope(metrics.train, _without_lost(state["train"], objects), device)
        _add_to_scope(metrics.hook_metrics, _without_lost(state["hooks"], objects), device)
        _add_unflushed(metrics, _without_lost(state.get("steps", {}), objects), device)
    for name, metric in objects.items():
        saved = [state["objects"][name] for state in states if name in state["objects"]]
        if saved or metric.update_count:
            metric.reset()
        for number, one in enumerate(saved):
            try:
                _add_to_object(metric, one, first=number == 0)
            except RuntimeError:
                metric.reset()
                log.warning(
                    "%s (%s) cannot be merged from several processes: its values of this epoch so far are dropped",
                    name,
                    type(metric).__name__,
                )
                break


def _without_lost(entries: dict[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    """Return the entries, except for torchmetrics objects that the module no longer has."""
    kept = {}
    for name, one in entries.items():
        metric = one["options"]["metric"]
        if metric is None or metric in objects:
            kept[name] = one
        else:
            log.warning("%r: the module has no metric %r, so its values of this epoch so far are dropped", name, metric)
    return kept


@contextmanager
def preserve_torchmetrics(metrics: MetricLog) -> Iterator[None]:
    """Restore the state of torchmetrics objects on exit."""
    restore = kept_torchmetrics(metrics)
    yield
    restore()


def kept_torchmetrics(metrics: MetricLog) -> Callable[[], None]:
    """Return a function that restores the state that torchmetrics objects have now."""
    steps = [(tracker, tracker.n_steps) for _, tracker in _trackers(metrics.module)]
    before = [(metric, _object_state(metric)) for _, metric in metrics_in(metrics.module)]
    for _, saved in before:
        if saved is not None:
            saved["state"] = {k: v.clone() if isinstance(v, torch.Tensor) else [*v] for k, v in saved["state"].items()}

    def restore() -> None:
        for tracker, number in steps:
            _set_steps(tracker, number)
        for metric, saved in before:
            metric.reset()
            if saved is not None:
                _add_to_object(metric, saved, first=True)

    return restore


def _object_state(metric: Any) -> dict[str, Any] | None:
    """Return the state of a torchmetrics object; None for one that has counted nothing."""
    beside = _beside(metric)
    if not metric.update_count and not beside:
        return None
    return {"updates": metric.update_count, "state": metric.metric_state, "beside": beside}


_BESIDE = {"MinMaxMetric": ("min_val", "max_val"), "Running": ("_num_vals_seen",)}
"""Attributes of torchmetrics' wrappers that count, although they are not states."""


def _beside(metric: Any) -> dict[str, Any]:
    names = [name for kind in type(metric).__mro__ for name in _BESIDE.get(kind.__name__, ())]
    return {name: getattr(metric, name) for name in names}


def _set_beside(metric: Any, saved: dict[str, Any]) -> None:
    for name, now in _beside(metric).items():
        if type(value := saved.get("beside", {}).get(name)) is type(now):
            setattr(metric, name, _moved(value, metric.device))


def _scope_state(scope: MetricScope) -> dict[str, Any]:
    return {
        name: {
            "options": entry.options._asdict(),
            "epoch": {
                **vars(entry.epoch),
                "pending": entry.epoch.pending.values().clone(),
                "pending_weights": list(entry.epoch.pending.weights),
            },
        }
        for name, entry in scope.entries.items()
        if entry.options.on_epoch
    }


def _unflushed(train: MetricScope) -> dict[str, Any]:
    """Return the per-step values that no logger has got yet, with their weights."""
    return {
        name: {"options": entry.options._asdict(), "values": [list(one) for one in entry.window_values]}
        for name, entry in train.entries.items()
        if entry.window > max(entry.flushed, entry.superseded)
    }


def _add_unflushed(metrics: MetricLog, state: dict[str, Any], device: torch.device) -> None:
    """Restore what `_unflushed` returned, as values of a step before the next one."""
    for name, saved in state.items():
        entry = metrics.unflushed_entry(name, LogOptions(**saved["options"]))
        for value, weight in saved["values"]:
            entry.window_values.append((_number(value, device), _number(weight, device)))


def _number(value: Any, device: torch.device) -> Any:
    """Return a number of a checkpoint; a tensor is moved to the device."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() or value.is_complex():
        raise _damaged()
    return value.to(device)


def _damaged() -> CheckpointError:
    return CheckpointError("a logged value of the checkpoint is not a number: it is damaged")


def _accumulator(state: dict[str, Any], device: torch.device) -> Accumulator:
    moved = dict(state)
    values, weights = moved.pop("pending").to(device), moved.pop("pending_weights")
    if values.is_complex() or values.dim() != 1:
        raise _damaged()
    moved = {name: _number(value, device) for name, value in moved.items()}
    accumulator = Accumulator(**moved)
    if weights:
        accumulator.pending.begin(values)
    for value, weight in zip(values.unbind(), weights, strict=True):
        accumulator.pending.add(value, weight)
    return accumulator


def _add_to_scope(scope: MetricScope, state: dict[str, Any], device: torch.device) -> None:
    for name, saved in state.items():
        accumulator = _accumulator(saved["epoch"], device)
        if name in scope.entries:
            scope.entries[name].epoch.merge(accumulator)
        else:
            entry = scope.entries[name] = Entry(name, LogOptions(**saved["options"]))
            entry.epoch = accumulator


def _trackers(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return torchmetrics' MetricTrackers, which make a submodule for each step, with their names."""
    named = module.named_modules()
    return [(name, one) for name, one in named if type(one).__name__ == "MetricTracker" and hasattr(one, "n_steps")]


def _set_steps(tracker: Any, number: int) -> None:
    while tracker.n_steps < number:
        tracker.increment()
    while tracker.n_steps > number:
        tracker._modules.popitem()


def updates_of(metrics: MetricLog) -> dict[str, int]:
    """Return how often each torchmetrics object was updated since its last reset."""
    return {name: metric.update_count for name, metric in metrics_in(metrics.module)}


_OF_THE_RUN = ("MaxMetric", "MinMetric", "MinMaxMetric", "Running", "RunningMean", "RunningSum")
"""Objects of torchmetrics that are meant to continue from one validation to the next."""


def never_reset(metrics: MetricLog, before: dict[str, int]) -> str:
    """Return a message about objects that were computed by hand over this validation and earlier ones; else "".

    Args:
        before: what `updates_of` returned when the validation began.
    """
    found = [
        f"{name} ({type(metric).__name__})"
        for name, metric in metrics_in(metrics.module)
        if metric._computed is not None and 0 < before.get(name, 0) < metric.update_count
        if type(metric).__name__ not in _OF_THE_RUN
    ]
    if not found:
        return ""
    return (
        f"{', '.join(found)}: computed by hand over this validation and those before it, since nothing has reset it. "
        "Call its reset() after compute(); or log the object itself, self.log('acc', self.acc), which the trainer "
        "computes and resets."
    )


def _add_to_object(metric: Any, saved: dict[str, Any], first: bool) -> None:
    # The counter has no public setter; torchmetrics restores it in the same way (Metric._restore_cache).
    metric._update_count += saved["updates"]
    _require_states_of(metric, saved["state"])
    state = {key: _moved(value, metric.device) for key, value in saved["state"].items()}
    if first:
        for key, value in state.items():
            setattr(metric, key, value)
        _set_beside(metric, saved)
    else:
        metric.merge_state(state)


def _require_states_of(metric: Any, saved: dict[str, Any]) -> None:
    """Raise CheckpointError for states that the metric does not have, or that are not tensors as the metric's are."""
    current = metric.metric_state
    for name, value in saved.items():
        tensors = value if isinstance(current.get(name), list) else [value]
        of_its_kind = isinstance(tensors, list) and all(isinstance(one, torch.Tensor) for one in tensors)
        if name not in current or not of_its_kind:
            raise CheckpointError(
                f"{type(metric).__name__} has no state {name!r} of this kind: the checkpoint is damaged"
            )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [one.to(device) for one in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
