"""Make a `BatchLoader` of whatever yields batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer.data.iterable_loader import IterableLoader
from trainer.data.loader import BatchLoader
from trainer.data.sharded_loader import ShardedDataLoader, is_plain
from trainer.errors import ConfigError


def make_batch_loader(
    loader: Any,
    *,
    name: str = "",
    rank: int,
    world_size: int,
    seed: int,
    training: bool,
    limit: int | float | None = None,
    shuffle: bool | None = None,
    seed_per_sample: bool = False,
    pad: bool = False,
) -> BatchLoader:
    """Return the batches of `loader` for one process.

    A plain torch DataLoader over a map-style dataset becomes a `ShardedDataLoader`: each process gets its part, every
    sample counts exactly once, and any position is reached without reading samples. Everything else (a subclass of
    DataLoader, a DataLoader over an IterableDataset, a list of batches, any iterable) is used as it is, by an
    `IterableLoader`.

    Args:
        loader: yields the batches.
        name: its name, for messages.
        rank, world_size: of this process, among those that read different samples.
        seed: of order and augmentation; the same on all ranks.
        training: all ranks get the same number of batches, if need be with padding; else no sample is repeated.
        limit: batches per epoch: int, a number of them; float, a fraction (0.0 to 1.0); None, all.
        shuffle: override the loader: False for the same order in every epoch.
        seed_per_sample: seed the random numbers of loading for each sample instead of each micro-batch.
        pad: in evaluation, too, a plain DataLoader gives all ranks the same number of batches.

    Raises:
        ConfigError: the loader is empty, several loaders were given, or `limit` cannot be applied to it.
    """
    label = f"the {'training' if training else 'evaluation'} loader" + (f" {name!r}" if name else "")
    _refuse_several(loader, label)
    if not is_plain(loader):
        return IterableLoader(loader, label=label, world_size=world_size, seed=seed, training=training, limit=limit)
    return ShardedDataLoader(
        loader,
        label=label,
        rank=rank,
        world_size=world_size,
        seed=seed,
        training=training,
        limit=limit,
        shuffle=shuffle,
        seed_per_sample=seed_per_sample,
        pad=pad,
    )


def named_loaders(loaders: Any) -> dict[str, Any]:
    """Return evaluation loaders by name.

    None: none. A dict: as it is. A list or tuple of loaders: "0", "1", ... Anything else, a list of batches too: one
    loader, named "".
    """
    if loaders is None:
        return {}
    if isinstance(loaders, Mapping):
        return {str(name): loader for name, loader in loaders.items()}
    if _is_several(loaders):
        return {str(number): loader for number, loader in enumerate(loaders)}
    return {"": loaders}


def _refuse_several(loader: Any, label: str) -> None:
    if loader is None:
        raise ConfigError(f"{label} is None. Give a DataLoader, or any iterable of batches.")
    if isinstance(loader, Mapping) or _is_several(loader):
        raise ConfigError(
            f"{label} is a {type(loader).__name__} of {len(loader)} loaders; it must be one. "
            "Join the datasets with torch.utils.data.ConcatDataset, or pass an iterable whose batches hold a part of "
            "each, e.g. a class whose __iter__ returns zip(loader_a, loader_b)."
        )


def _is_several(loaders: Any) -> bool:
    """True for a list of loaders; False for a list of batches."""
    if not isinstance(loaders, (list, tuple)) or not loaders:
        return False
    if any(isinstance(one, DataLoader) for one in loaders):
        return True
    return hasattr(loaders[0], "__iter__") and not _is_batch(loaders[0])


def _is_batch(value: Any) -> bool:
    """True for data: a tensor, array, number or text, or a container whose first entry is one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return not value or _is_batch(value[0])
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float)):
        return True
    # A batch class of the user's own knows how to move; a loader does not.
    return hasattr(value, "to")
