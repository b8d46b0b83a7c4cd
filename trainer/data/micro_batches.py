"""Split a batch into micro-batches: slice its tensors and lists by samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import NoneType
from typing import Any

import torch

from trainer.data.loader import Batch
from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError


def parts_of(batch: Batch, size: int, number: int) -> Iterator[Batch]:
    """Yield `number` parts of a batch, of `size` samples each; parts beyond its last sample are padding.

    The first part carries the number of samples over all processes.

    Raises:
        ConfigError: an object in the batch does not have one entry for each sample.
    """
    in_batch = batch.samples or samples_in(batch.data)
    for part in range(number):
        first, end = part * size, min((part + 1) * size, in_batch)
        samples = None if batch.samples is None else min(max(0, end - first), batch.samples)  # 0 of padding
        if end <= first:
            first, end = 0, 1  # the weight of padding is zero
        total = batch.total if part == 0 or batch.total is None else 0
        yield Batch(slice_samples(batch.data, in_batch, first, end), samples, total)


def slice_samples(data: Any, samples: int, first: int, end: int) -> Any:
    """Return samples `first` to `end` of the data of a batch of `samples` samples.

    Raises:
        ConfigError: an object in the data does not have one entry for each sample.
    """
    return map_leaves(data, partial(_sliced, samples=samples, first=first, end=end), _has_one_for_each)


def _has_one_for_each(data: Any) -> bool:
    """Whether a container is a list of plain objects, such as the texts of the samples."""
    return isinstance(data, (list, tuple)) and bool(data) and all(isinstance(one, (str, int, float)) for one in data)


def _sliced(leaf: Any, samples: int, first: int, end: int) -> Any:
    if isinstance(leaf, (NoneType, str, int, float)) or getattr(leaf, "ndim", 1) == 0:
        return leaf
    try:
        entries = len(leaf)
    except TypeError:
        entries = -1
    if entries != samples:
        raise ConfigError(
            f"accumulate_grad_batches='auto' splits batches by samples, and a {type(leaf).__name__} in a batch of "
            f"{samples} does not have one entry for each: give a smaller batch_size and a number instead of 'auto'."
        )
    return leaf[first:end]


def samples_in(data: Any) -> int:
    """Return the length of the first tensor in the data of a batch; 1 if there is none."""
    found: list[int] = []
    map_leaves(data, lambda leaf: found.append(len(leaf)) if isinstance(leaf, torch.Tensor) and leaf.dim() else None)
    return found[0] if found else 1


def bytes_of(data: Any) -> int:
    """Return the bytes of the tensors in the data of a batch."""
    found: list[int] = []
    map_leaves(data, lambda leaf: found.append(leaf.nbytes) if isinstance(leaf, torch.Tensor) else None)
    return sum(found)
