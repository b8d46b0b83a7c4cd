"""Feed: the batches of one loader on one process, from any position on, with their sample counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from trainer.data.batch import Batch as Batch
from trainer.data.iterable_loader import IterableLoader
from trainer.data.sharded_loader import ShardedDataLoader, is_plain
from trainer.errors import ConfigError


class BatchLoader:
    """One loader of one stage on one process.

    A plain torch DataLoader over a map-style dataset is re-made from its public attributes around a
    `DistributedBatchSampler`:
    each process gets its part, every sample counts exactly once, and any position is reached without reading samples.
    Everything else (a subclass of DataLoader, a DataLoader over an IterableDataset, a list of batches, any iterable) is
    used exactly as it is.

    Args:
        loader: what yields the batches.
        name: its name, for messages.
        rank, world_size: which process this is, of how many.
        seed: of order and augmentation; the same on all ranks.
        training: all ranks get the same number of batches, if need be with fillers; else no sample is repeated.
        limit: batches per epoch: int, a number of them; float, a fraction (0.0 to 1.0); None, all.
        shuffle: override the loader: False for the same order in every epoch.
        seed_per_sample: seed what is random in loading for each sample instead of each micro-batch.
        fill: in evaluation too a plain DataLoader gives all ranks the same number of batches; `length` does not count
            the fillers.

    Raises:
        ConfigError: the loader is empty, several loaders were given, or `limit` cannot be applied to it.
    """

    def __init__(
        self,
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
        fill: bool = False,
    ) -> None:
        self.name = name
        label = f"the {'training' if training else 'evaluation'} loader" + (f" {name!r}" if name else "")
        _refuse_several(loader, label)
        self._source: ShardedDataLoader | IterableLoader
        if is_plain(loader):
            self._source = ShardedDataLoader(
                loader,
                label=label,
                rank=rank,
                world_size=world_size,
                seed=seed,
                training=training,
                shuffle=shuffle,
                seed_per_sample=seed_per_sample,
                fill=fill,
            )
        else:
            self._source = IterableLoader(loader, label=label, world_size=world_size, seed=seed, training=training)
        source = self._source
        if limit != 0:
            source.check_not_empty()
        self._limit = _batches(limit, source.max_length, label)
        self.length: int | None = _least(source.length, self._limit)
        """Batches per epoch on this process, after the limit; None if unknown. What an iterable says of itself
        (`__len__`) is believed; with an integer limit and nothing known, the limit."""
        self.max_length: int | None = _least(source.max_length, self._limit)
        """The largest `length` of all processes. In training all have the same."""
        self.samples_per_epoch: int | None = source.samples_in(self.max_length)
        """Samples per epoch over all processes, after the limit; None if unknown."""
        self.batch_size: int | None = source.batch_size
        """Samples of a full micro-batch on one process; None if unknown."""
        self.num_workers: int | None = loader.num_workers if isinstance(loader, DataLoader) else None
        """Processes that load batches; None: it is no DataLoader."""
        self.pinned: bool | None = loader.pin_memory if isinstance(loader, DataLoader) else None
        """Whether batches come in pinned memory; None: it is no DataLoader."""
        self.note: str | None = source.note
        """One line that the user should read at the start of the run, or None."""
        self.exact: bool = source.exact
        """Whether a resumed run gets the very same batches."""
        self.one_shot: bool = source.one_shot
        """It can be iterated only once: more than one epoch is not possible (unless it is endless and limited)."""

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of `epoch`, from this process's batch number `start` on.

        A plain DataLoader skips indices, never samples. Other iterables are read and thrown away up to `start`, unless
        `load_state_dict` was called before: then they go on by themselves.

        Raises:
            ConfigError: an iterable without a length yields nothing, or can be iterated only once and is used up.
        """
        return self._source.iterate(epoch, start, self._limit)

    def state_dict(self) -> dict[str, Any]:
        """The state of a foreign iterable that has one, else empty. It tells the position after the last batch that
        `iterate` yielded: ask when all of those are consumed."""
        if isinstance(self._source, ShardedDataLoader) or not self._source.stateful:
            return {}
        return {"loader": self._source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave; the next `iterate` goes on there."""
        if isinstance(self._source, IterableLoader) and "loader" in state:
            self._source.load_state_dict(state["loader"])


def named_loaders(loaders: Any) -> dict[str, Any]:
    """Evaluation loaders by name.

    None: none. A dict: as it is. A list or tuple of loaders: "0", "1", ... Anything else, a list of batches too: one
    loader, named "".
    """
    if loaders is None:
        return {}
    if isinstance(loaders, Mapping):
        return {str(name): loader for name, loader in loaders.items()}
    if _several(loaders):
        return {str(number): loader for number, loader in enumerate(loaders)}
    return {"": loaders}


def _refuse_several(loader: Any, label: str) -> None:
    if loader is None:
        raise ConfigError(f"{label} is None. Give a DataLoader, or any iterable of batches.")
    if isinstance(loader, Mapping) or _several(loader):
        raise ConfigError(
            f"{label} is a {type(loader).__name__} of {len(loader)} loaders; it must be one. "
            "Join the datasets with torch.utils.data.ConcatDataset, or pass an iterable whose batches hold a part of "
            "each, e.g. a class whose __iter__ returns zip(loader_a, loader_b)."
        )


def _several(loaders: Any) -> bool:
    """Whether it is a list of loaders, not a list of batches."""
    if not isinstance(loaders, (list, tuple)) or not loaders:
        return False
    if any(isinstance(one, DataLoader) for one in loaders):
        return True
    return hasattr(loaders[0], "__iter__") and not _is_batch(loaders[0])


def _is_batch(value: Any) -> bool:
    """Whether it holds data: a tensor, array, number or text, or a container whose first entry is one."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return not value or _is_batch(value[0])
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, str, bytes, int, float)):
        return True
    # A batch class of the user's own knows how to move; a loader does not.
    return hasattr(value, "to")


def _batches(limit: int | float | None, length: int | None, label: str) -> int | None:
    """How many batches a limit allows; None: all."""
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return None
    if isinstance(limit, int) or limit == 0.0:
        return int(limit)
    if length is None:
        raise ConfigError(
            f"limit {limit} is a fraction, but {label} does not tell its length. "
            "Give a number of batches (an int), 1.0, or a loader with __len__."
        )
    # Rounded first: 0.29 * 100 is 28.999999999999996.
    batches = int(round(limit * length, 6))
    if batches == 0 and length > 0:
        raise ConfigError(
            f"limit {limit} of the {length} batches of {label} is less than one batch. "
            f"Use at least {1 / length:.3g}, a number of batches (an int), or 0 for none."
        )
    return batches


def _least(length: int | None, limit: int | None) -> int | None:
    if length is None or limit is None:
        return limit if length is None else length
    return min(length, limit)
