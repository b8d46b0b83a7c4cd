"""Move a batch to a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def move_to(batch: Any, target: torch.device | Callable[[Any], Any]) -> Any:
    """A copy of `batch` with every leaf moved: tensors and objects with a `.to(device)`, inside any nesting of dicts,
    lists, tuples, namedtuples and dataclasses. Everything else stays as it is.

    `target` is a device, or a function applied to every leaf. Copies from pinned memory do not wait (`non_blocking`).
    A batch whose tensors are all on the device already comes back with the same tensors.
    """
    if isinstance(batch, torch.Tensor):
        return target(batch) if callable(target) else batch.to(target, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(item, target) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_to(item, target) for item in batch)
    if isinstance(batch, dict):
        return _like(batch, {key: move_to(value, target) for key, value in batch.items()})
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {k: move_to(v, target) for k, v in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = {f.name: move_to(getattr(batch, f.name), target) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **moved)
    if callable(target):
        return target(batch)
    if hasattr(batch, "to") and not isinstance(batch, type):
        return batch.to(target)
    return batch


def _like(original: dict[Any, Any], moved: dict[Any, Any]) -> dict[Any, Any]:
    """A dict of the original's type (OrderedDict, defaultdict) with the moved values."""
    if type(original) is dict:
        return moved
    copy = original.copy()
    copy.update(moved)
    return copy
