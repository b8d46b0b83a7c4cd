"""Describe the numbers that decide which samples a loader gives, to compare them with another process's or run's."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from trainer.data.sampler_state import attributes

_MOST_DATASETS = 10_000


def fingerprint(value: Any) -> str | None:
    """Return a description by which two values can be compared; None if the value holds no numbers.

    An int or bool is described by itself; a range, list, array or tensor of numbers by its size and a hash, which do
    not depend on its type.
    """
    if type(value) in (bool, int):
        return str(value)
    if isinstance(value, range):
        value = np.arange(value.start, value.stop, value.step)
    elif isinstance(value, torch.Tensor):
        if value.is_meta or value.layout != torch.strided:
            return None
        value = value.detach().cpu()
    elif not isinstance(value, (list, tuple, np.ndarray)):
        return None
    try:
        numbers = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # a ragged list, or other objects
        return None
    if numbers.dtype.kind not in "biuf":
        return None
    # The same for a list, an array and a tensor.
    numbers = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)
    return f"{numbers.size} numbers ({hashlib.sha256(numbers.tobytes()).hexdigest()[:8]})"


def of_indices(dataset: Any) -> str | None:
    """Return a fingerprint of the indices of `Subset`s and the sizes of `ConcatDataset`s in a dataset, or None."""
    found: list[str] = []
    waiting = [dataset]
    while waiting and len(found) < _MOST_DATASETS:
        one = waiting.pop(0)
        if isinstance(one, Subset):
            found.append(fingerprint(one.indices) or "unknown")
            waiting.append(one.dataset)
        elif isinstance(one, ConcatDataset):
            found.append(fingerprint(one.cumulative_sizes) or "unknown")
            waiting += one.datasets
    if len(found) < 2:
        return found[0] if found else None
    return f"{len(found)} lists ({hashlib.sha256(' '.join(found).encode()).hexdigest()[:8]})"


def of_sampler(sampler: Any) -> dict[str, str]:
    """Return fingerprints of the numbers that a sampler holds, by the names of its attributes.

    Without `epoch`, which the trainer sets.
    """
    found = {name: fingerprint(value) for name, value in attributes(sampler).items() if name != "epoch"}
    return {name: numbers for name, numbers in found.items() if numbers is not None}
