"""Parts of tensors: what one process holds of a tensor that is divided among several."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class FlatSlice:
    """Which elements of a tensor, flattened in row-major order: `count` runs of `length`, `stride` apart.

    A range of rows is one run, and so is a part of a flattened tensor. A range of columns has as many runs as rows.
    """

    start: int
    length: int
    stride: int = 0
    count: int = 1

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.length * self.count

    @property
    def end(self) -> int:
        """The position after the last element."""
        return self.start + (self.count - 1) * self.stride + self.length if self.count else self.start

    def overlaps_itself(self) -> bool:
        """Whether an element is in several runs."""
        return self.count > 1 and self.stride < self.length

    def runs(self) -> Iterator[tuple[int, int]]:
        """First element and the one after the last, of each run."""
        for number in range(self.count):
            first = self.start + number * self.stride
            yield first, first + self.length

    def view_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of the whole, contiguous tensor, as a view of shape (count, length)."""
        flat = tensor.detach().view(-1)
        return flat.as_strided((self.count, self.length), (self.stride, 1), flat.storage_offset() + self.start)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of the whole tensor, of one dimension; a view where the memory allows."""
        return self.view_in(tensor.contiguous()).reshape(-1)


EMPTY_SLICE = FlatSlice(0, 0)


def slice_of_box(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> FlatSlice:
    """The extent of a box in a tensor of this shape, which is narrower than the tensor in one dimension, or in two
    next to each other.

    Raises:
        ValueError: it is narrower in others.
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
    # The runs are evenly spaced when each dimension around them but the outermost is whole.
    if any(strides[d] != lengths[e] * strides[e] for d, e in itertools.pairwise(outside)):
        raise ValueError(f"the elements of a box of {tuple(lengths)} in {tuple(shape)} are not evenly spaced")
    stride = strides[outside[-1]] if outside else 0
    return FlatSlice(start, lengths[inner] * strides[inner], stride, math.prod(lengths[:inner]))


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that this process holds, and writes into a checkpoint."""

    local: torch.Tensor
    """The elements, in order, of any shape. Its dtype is that of the whole tensor."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    extent: FlatSlice
    """Which elements. All processes together have each once: of a copy that another one writes, `EMPTY_SLICE`."""


class StoredTensor(ABC):
    """A tensor in a checkpoint that is read when it is asked for."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype

    @abstractmethod
    def read(self, extent: FlatSlice | None = None) -> torch.Tensor:
        """These elements, of one dimension, on the CPU, in memory of its own; None: the whole tensor in its shape.

        Raises:
            CheckpointError: the file cannot be read, or is not what the checkpoint says.
        """


Loadable: TypeAlias = "torch.Tensor | StoredTensor"
"""How the tensors of a checkpoint come to a strategy: read, or still in the checkpoint."""


def part_of(value: Loadable, extent: FlatSlice) -> torch.Tensor:
    """These elements of a tensor of a checkpoint, of one dimension."""
    return extent.take(value) if isinstance(value, torch.Tensor) else value.read(extent)


def whole(value: Loadable) -> torch.Tensor:
    """A tensor of a checkpoint, read."""
    return value if isinstance(value, torch.Tensor) else value.read()
