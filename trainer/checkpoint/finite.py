"""Find the tensors of a state that are not finite, with one sum per tensor and one read per device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from trainer.checkpoint.shards import Shard

_SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that torch can sum on every device; others, such as float8, are converted first."""


def floating_tensors(
    state: Any, prefix: str, shards_only: bool = False, numbers: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating-point and complex tensors of a state by name; for a sharded tensor, its local shard.

    Args:
        state: nested dicts, lists and tuples.
        prefix: name of `state`; the names begin with it.
        shards_only: skip the replicated tensors, which another process writes.
        numbers: Python's floats count as tensors.
    """
    waiting = [(prefix, state)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{name}.{key}", one) for key, one in items][::-1]
            continue
        if isinstance(value, Shard):
            value = value.local
        elif shards_only:
            continue
        elif numbers and isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()) and not value.is_meta:
            yield name, value.detach()


@torch.no_grad()
def not_finite(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of the tensors with an element that is NaN or infinite.

    A sum over a tensor with such an element is not finite. A sum may also overflow, so the tensors whose sums are not
    finite are then checked element by element.
    """
    named = dict(tensors)
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in named.items():
        by_device.setdefault(tensor.device, []).append(name)
    suspects = []
    for names in by_device.values():
        sums = torch.stack([_sum(named[name]) for name in names]).tolist()
        suspects += [name for name, number in zip(names, sums, strict=True) if not math.isfinite(number)]
    return [name for name in suspects if not bool(torch.isfinite(_summable(named[name])).all())]


@torch.no_grad()
def number_of_nans(tensor: torch.Tensor) -> int:
    """Return the number of elements that are NaN."""
    return int(torch.isnan(_summable(tensor)).sum())


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    tensor = _summable(tensor)
    return tensor.sum(dtype=None if tensor.dtype is torch.float64 else torch.float32).float()


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype in _SUMMED else tensor.float()
