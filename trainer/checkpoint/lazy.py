"""Tensors of a checkpoint that are read when they are asked for, and only the elements that are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import torch

from trainer.checkpoint.place import Place, open_file
from trainer.checkpoint.shards import Extent, StoredTensor
from trainer.checkpoint.tensorfile import flat_bytes
from trainer.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """A file that has some of a tensor's elements."""

    path: Place
    offset: int
    """Where the first of them is, in bytes."""
    extent: Extent
    """Which."""

    def overlaps(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """What it has of the elements from `first` to before `end`: how many elements into its own, from, to before."""
        extent = self.extent
        stride = max(extent.stride, 1)
        # The first run that ends after `first`, and the first one that begins at or after `end`.
        low = max(0, (first - extent.start - extent.length) // stride + 1)
        high = min(extent.count, -(-(end - extent.start) // stride))
        for run in range(low, high) if extent.count > 1 else range(1):
            start = extent.start + run * extent.stride
            begin, stop = max(first, start), min(end, start + extent.length)
            if begin < stop:
                yield run * extent.length + begin - start, begin, stop


class FileTensor(StoredTensor):
    """A tensor whose elements are in one or more safetensors files."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, sources: list[Source]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._sources = sources

    def __repr__(self) -> str:
        return f"FileTensor({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def read(self, extent: Extent | None = None) -> torch.Tensor:
        wanted = Extent(0, math.prod(self.shape)) if extent is None else extent
        result = torch.zeros(wanted.numel, dtype=self.dtype)
        if not result.numel():
            return result if extent is not None else result.reshape(self.shape)
        memory = flat_bytes(result).numpy().data
        size, position = self.dtype.itemsize, 0
        with ExitStack() as opened:
            files: dict[Place, BinaryIO] = {}
            for first, end in wanted.runs():
                for source in self._sources:
                    for within, begin, stop in source.overlaps(first, end):
                        if source.path not in files:
                            files[source.path] = opened.enter_context(_opened(source.path))
                        start = position + begin - first
                        view = memory[start * size : (start + stop - begin) * size]
                        _read_into(files[source.path], source, source.offset + within * size, view)
                position += end - first
        return result if extent is not None else result.reshape(self.shape)


@contextmanager
def _opened(path: Place) -> Iterator[BinaryIO]:
    try:
        with open_file(path) as (file, _):
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None


def _read_into(file: BinaryIO, source: Source, offset: int, view: memoryview) -> None:
    try:
        file.seek(offset)
        got = file.readinto(view)  # type: ignore[attr-defined]  # a BufferedReader has it
    except OSError as error:
        raise CheckpointError(f"{source.path} cannot be read: {error.strerror or error}") from error
    if got != len(view):
        raise CheckpointError(f"{source.path} ended {len(view) - got} bytes too early while it was read")
