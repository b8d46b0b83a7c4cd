"""Sets of elements of a tensor, as the shards of one process are; does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.distributed.sendable import sendable

if TYPE_CHECKING:
    import torch


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
        return self.start + (self.count - 1) * self.stride + self.length

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


def slice_of_grid(shape: Sequence[int], along: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> FlatSlice:
    """Return the elements at some positions along each dimension of a tensor of this shape.

    Raises:
        ValueError: they are not evenly spaced, or in another order than in the tensor.
    """
    if any(len(indices) == 0 for indices in along):
        return EMPTY_SLICE
    narrow = max((d for d in range(len(shape)) if len(along[d]) != shape[d]), default=-1)
    if narrow == -1:
        return FlatSlice(0, math.prod(shape))
    # Neighbours in the innermost of these dimensions are one run.
    inner = along[narrow]
    first = np.flatnonzero(np.diff(inner, prepend=inner[0] - 2) != 1)
    lengths = np.diff(first, append=len(inner))
    starts = np.zeros(1, dtype=np.int64)
    for d, indices in enumerate([*along[:narrow], inner[first]]):
        starts = (starts[:, None] + indices * math.prod(shape[d + 1 :])).ravel()
    gaps = np.diff(starts)
    if len(set(lengths.tolist())) > 1 or len(set(gaps.tolist())) > 1 or (gaps <= 0).any():
        raise ValueError(f"the elements of a part of a tensor of {tuple(shape)} are not evenly spaced")
    length = int(lengths[0]) * math.prod(shape[narrow + 1 :])
    return FlatSlice(int(starts[0]), length, int(gaps[0]) if len(gaps) else 0, len(starts))
