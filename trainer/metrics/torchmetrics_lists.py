"""List states of torchmetrics objects, made ready to be gathered where processes have different numbers of entries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trainer.errors import ConfigError


def is_torchmetric(value: Any) -> bool:
    """Return True for a `torchmetrics.Metric`, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metrics_in(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the torchmetrics objects in a module, which may be one, with their names."""
    for name, submodule in module.named_modules():
        if is_torchmetric(submodule):
            yield name, submodule
        elif type(submodule).__name__ == "MetricCollection":
            # Metrics that share a state are updated when they are read; before, only one of them is up to date.
            list(submodule.values(copy_state=False))


class ListStates:
    """Gives empty list states an entry of the other processes' dtype and shape.

    torchmetrics would gather an empty vector of floats from a process without samples.

    Args:
        all_gather_object: gathers an object from each process.
    """

    def __init__(self, all_gather_object: Callable[[Any], list[Any]]) -> None:
        self._all_gather_object = all_gather_object
        self._refused: list[Any] = []
        """Metrics that cannot be computed until `allow_all`."""

    def fill(self, root: torch.nn.Module) -> None:
        """Fill the list states of the metrics in a module, which may be a metric. Collective.

        Metrics whose entries cannot be gathered raise a ConfigError when they are computed.
        """
        own = {
            f"{path}.{key}": (metric, key)
            for path, metric in metrics_in(root)
            for key in metric._reductions
            if isinstance(getattr(metric, key), list)
        }
        if not own:
            return
        mine = {path: _described(getattr(metric, key)) for path, (metric, key) in own.items()}
        everywhere = self._all_gather_object(mine)
        for path, (metric, key) in own.items():
            self._fill(metric, key, [theirs[path] for theirs in everywhere])

    def _fill(self, metric: Any, key: str, everywhere: list[tuple[int, Any]]) -> None:
        lengths = [length for length, _ in everywhere]
        value, most = getattr(metric, key), max(lengths)
        by_entry = metric._reductions[key] is None
        if by_entry and min(lengths) < most and not type(metric).__module__.startswith("torchmetrics.retrieval."):
            self._refuse(metric, key)
            return
        # States that torchmetrics concatenates are gathered as one entry.
        missing = (most if by_entry else min(most, 1)) - len(value)
        if missing > 0:
            dtype, shape = next(described for _, described in everywhere if described is not None)
            empty = torch.empty(0, *shape, dtype=dtype, device=metric.device)
            setattr(metric, key, [*value, *[empty] * missing])

    def _refuse(self, metric: Any, key: str) -> None:
        if "sync" not in vars(metric):
            metric.sync = partial(_refuse_sync, key, metric)
            self._refused.append(metric)

    def allow_all(self) -> None:
        """Let the metrics that `fill` has refused be computed again."""
        while self._refused:
            del self._refused.pop().sync


def _described(entries: list[torch.Tensor]) -> tuple[int, Any]:
    """Return the number of entries, and the dtype and shape of the first; None without one."""
    return len(entries), (entries[0].dtype, entries[0].shape[1:]) if entries else None


def _refuse_sync(key: str, metric: Any, *_: Any, should_sync: bool = True, **__: Any) -> None:
    """Refuse to gather a metric's state: in place of its `sync`, which `compute` calls."""
    if should_sync:
        raise ConfigError(
            f"compute(): {type(metric).__name__} gathers its state {key!r} entry by entry, and the processes have "
            "different numbers of entries. Evaluate it on one process (devices=1)."
        )
