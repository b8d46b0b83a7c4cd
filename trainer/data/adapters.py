"""Make a `BatchLoader` of whatever yields batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from trainer.arguments import defines
from trainer.data.batch_sampler import DistributedBatchSampler
from trainer.data.combined_loader import CombinedBatches, CombinedLoader
from trainer.data.iterable_loader import EveryNth, IterableLoader
from trainer.data.loader import BatchLoader, Reading
from trainer.data.sharded_loader import ShardedDataLoader, is_plain
from trainer.errors import ConfigError, shown
from trainer.seed import mix_seed


def make_batch_loader(loader: Any, *, name: str = "", limit: int | float | None = None, **options: Any) -> BatchLoader:
    """Return the batches of `loader` for one process.

    A plain torch DataLoader over a map-style dataset becomes a `ShardedDataLoader`: each process gets its part, every
    sample counts exactly once, and any position is reached without reading samples. An `IterableLoader` uses
    everything else unchanged: a subclass of DataLoader, a DataLoader over an IterableDataset, a list of batches, any
    iterable.

    Args:
        loader: yields the batches.
        name: the loader's name, for messages.
        limit: batches per epoch: int, a number of them; float, a fraction (0.0 to 1.0); None, all.
        options: the fields of `Reading`.

    Raises:
        ConfigError: the loader is empty or cannot be iterated, or `limit` cannot be applied to it.
    """
    reading = Reading(**options)
    label = f"the {'training' if reading.training else 'evaluation'} loader" + (f" {name!r}" if name else "")
    if reading.training and (isinstance(loader, Mapping) or _is_several(loader)):
        loader = CombinedLoader(loader, "max_size_cycle")
    if isinstance(loader, CombinedLoader):
        parts = [
            make_batch_loader(one, name=f"{name}{number}", **{**options, "seed": mix_seed(reading.seed, number) >> 1})
            for number, one in enumerate(loader.flattened)
        ]
        return CombinedBatches(loader, parts, label, limit)
    if not defines(loader, "__iter__", "__getitem__"):
        raise ConfigError(f"{label} is {shown(loader)}, which cannot be iterated: give a DataLoader or an iterable.")
    if not is_plain(loader):
        cut = reading.split and reading.world_size > 1 and _repeats_samples(loader)
        share = EveryNth(reading.rank, reading.world_size) if cut else EveryNth(0, 1)
        return IterableLoader(loader, label, limit, reading, share)
    return ShardedDataLoader(loader, DistributedBatchSampler(loader, reading), label, limit)


def _repeats_samples(loader: Any) -> bool:
    """Whether a subclass of DataLoader knows of no processes: each of several would get all samples."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    samplers = (loader.sampler, loader.batch_sampler)
    return not any(hasattr(one, "num_replicas") or hasattr(one, "rank") for one in samplers)


def named_loaders(loaders: Any) -> dict[str, Any]:
    """Return evaluation loaders by name.

    Args:
        loaders: None: there are none. A dict: loaders by name. A list or tuple of loaders: named "dataloader_idx_0"
            and so on. Anything else, including a list of batches: one loader, named "".
    """
    if loaders is None:
        return {}
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        loaders = loaders.iterables
    if isinstance(loaders, Mapping):
        return {str(name): loader for name, loader in loaders.items()}
    if _is_several(loaders):
        return {f"dataloader_idx_{number}": loader for number, loader in enumerate(loaders)}
    return {"": loaders}


def _is_several(loaders: Any) -> bool:
    """Return True for a list of loaders; False for a list of batches."""
    if not isinstance(loaders, (list, tuple)) or not loaders:
        return False
    if any(isinstance(one, DataLoader) for one in loaders):
        return True
    return defines(loaders[0], "__iter__") and not _is_batch(loaders[0])


def _is_batch(value: Any) -> bool:
    """Return True for data: a tensor, array, number or text, or a container whose first entry is one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return not value or _is_batch(value[0])
    # A batch class of the user's own knows how to move; a loader does not.
    return isinstance(value, (np.ndarray, np.generic, str, bytes, int, float)) or hasattr(value, "to")
