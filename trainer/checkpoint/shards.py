"""Sharded tensors: which elements one process holds, and tensors that are read from a checkpoint in parts."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from trainer.distributed.sendable import sendable


@sendable
@dataclass(frozen=True)
class FlatSlice:
    """A set of elements of a tensor, flattened in row-major order: `count` runs of `length`, `stride` apart.

    A range of rows is one run, and so is a range of a flattened tensor. A range of columns has one run per row.
    """

    start: int
    length: int
    stride: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """Position after the last element."""
        return self.start + (self.count - 1) * self.stride + self.length if self.count else self.start

    def overlaps_itself(self) -> bool:
        """Return True if an element is in several runs."""
        return self.count > 1 and self.stride < self.length

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the end (exclusive) of each run."""
        for number in range(self.count):
            first = self.start + number * self.stride
            yield first, first + self.length

    def view_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of the full, contiguous tensor as a view of shape (count, length)."""
        flat = tensor.detach().view(-1)
        return flat.as_strided((self.count, self.length), (self.stride, 1), flat.storage_offset() + self.start)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of the full tensor, flattened; a view where the memory layout allows."""
        return self.view_in(tensor.contiguous()).reshape(-1)


EMPTY_SLICE = FlatSlice(0, 0)


def slice_of_box(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> FlatSlice:
    """Return the elements of a box in a tensor of this shape, narrower than the tensor in one dimension or in two
    adjacent ones.

    Raises:
        ValueError: it is narrower in other dimensions.
    """
    if math.prod(lengths) == 0:
        return EMPTY_SLICE
    narrow = [d for d in range(len(shape)) if lengths[d] != shape[d]]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    if not narrow:
        return FlatSlice(0, math.prod(shape))
    inner = narrow[-1]
    outside = [d for d in range(inner) if lengths[d] != 1]
    # The runs are evenly spaced when each dimension around them, except the outermost, is full.
    if any(strides[d] != lengths[e] * strides[e] for d, e in itertools.pairwise(outside)):
        raise ValueError(f"the elements of a box of {tuple(lengths)} in {tuple(shape)} are not evenly spaced")
    stride = strides[outside[-1]] if outside else 0
    return FlatSlice(start, lengths[inner] * strides[inner], stride, math.prod(lengths[:inner]))


def slice_of_grid(shape: Sequence[int], along: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> FlatSlice:
    """Return the elements at some positions along each dimension of a tensor of this shape.

    Raises:
        ValueError: they are not evenly spaced, or in another order than in the tensor.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    narrow = max((d for d in range(len(shape)) if len(along[d]) != shape[d]), default=-1)
    if narrow == -1:
        return FlatSlice(0, math.prod(shape))
    starts = np.zeros(1, dtype=np.int64)
    for indices, stride in zip(along[: narrow + 1], strides, strict=False):
        starts = (starts[:, None] + indices * stride).ravel()
    # Neighbours in the innermost of these dimensions are one run.
    first = np.flatnonzero(np.diff(starts, prepend=starts[0] - 2 * strides[narrow]) != strides[narrow])
    lengths = np.diff(first, append=len(starts))
    gaps = np.diff(starts[first])
    if len(set(lengths.tolist())) > 1 or len(set(gaps.tolist())) > 1 or (gaps <= 0).any():
        raise ValueError(f"the elements of a part of a tensor of {tuple(shape)} are not evenly spaced")
    length = int(lengths[0]) * strides[narrow]
    return FlatSlice(int(starts[0]), length, int(gaps[0]) if len(gaps) else 0, len(first))


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


class _ReadWhenUsed(torch.Tensor):
    """A tensor without memory: each operation on it, such as `parameter.copy_`, reads the stored tensor anew."""

    _stored: StoredTensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda tensor: tensor._stored.read(), (args, kwargs or {}))
        return func(*args, **kwargs)


def read_when_used(value: Loadable) -> torch.Tensor:
    """Return a tensor for `load_state_dict`, which copies one after the other; that of a file is read by the copy."""
    if isinstance(value, torch.Tensor):
        return value
    tensor: Any = torch.Tensor._make_wrapper_subclass(_ReadWhenUsed, value.shape, dtype=value.dtype)
    tensor._stored = value
    return tensor  # type: ignore[no-any-return]
