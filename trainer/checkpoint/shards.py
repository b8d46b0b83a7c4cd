"""Sharded tensors: the part that one process holds, and tensors that are read from a checkpoint in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

from trainer.checkpoint.flat_slice import FlatSlice


@dataclass(frozen=True)
class Shard:
    """The part of a sharded tensor that this process holds, and writes into a checkpoint."""

    local: torch.Tensor
    """The elements in order, in any shape, with the dtype of the full tensor."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    extent: FlatSlice
    """The elements held; each belongs to exactly one process: `EMPTY_SLICE` for a copy that another process writes."""


class StoredTensor(ABC):
    """A tensor in a checkpoint that is read on demand."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    dtype: torch.dtype

    @abstractmethod
    def read(self, extent: FlatSlice | None = None) -> torch.Tensor:
        """Read these elements, flattened, into new CPU memory; None: the full tensor in its shape.

        Raises:
            CheckpointError: the file cannot be read, or differs from what the checkpoint says.
        """


Loadable: TypeAlias = "torch.Tensor | StoredTensor"
"""A tensor of a checkpoint, already read or still in its file."""


def read_slice(value: Loadable, extent: FlatSlice) -> torch.Tensor:
    """Return these elements of a tensor of a checkpoint, flattened."""
    return extent.take(value) if isinstance(value, torch.Tensor) else value.read(extent)


def materialize(value: Loadable) -> torch.Tensor:
    """Return a tensor of a checkpoint, reading it if necessary."""
    return value if isinstance(value, torch.Tensor) else value.read()


def in_memory(value: Any) -> Any:
    """Return a value of a checkpoint with its tensors read, also those inside: a module's extra state is any data."""
    return tree_map_only(StoredTensor, lambda stored: stored.read(), value)


class _ReadWhenUsed(torch.Tensor):
    """A tensor without memory: each operation on it, such as `parameter.copy_`, reads the stored tensor again."""

    _stored: StoredTensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda tensor: tensor._stored.read(), (args, kwargs or {}))
        return func(*args, **kwargs)


def read_when_used(value: Loadable) -> torch.Tensor:
    """Return a tensor for `load_state_dict`, which copies one after the other; a stored one is read by the copy."""
    if isinstance(value, torch.Tensor):
        return value
    tensor: Any = torch.Tensor._make_wrapper_subclass(_ReadWhenUsed, value.shape, dtype=value.dtype)
    tensor._stored = value
    return tensor  # type: ignore[no-any-return]


def stored(tensor: torch.Tensor) -> Loadable:
    """Invert `read_when_used`."""
    return tensor._stored if isinstance(tensor, _ReadWhenUsed) else tensor
