"""Slices of a flattened tensor stand for any box that a process may hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.checkpoint.flat_slice import EMPTY_SLICE, FlatSlice, slice_of_grid
from trainer.checkpoint.format import FilePart, FileTensor, open_checkpoint, read_checkpoint
from trainer.checkpoint.shards import Shard, materialize, read_slice
from trainer.checkpoint.writing import write_checkpoint

SHAPES = [(7,), (4, 6), (3, 1, 5), (2, 3, 4), (1, 1), (2, 3, 4, 5)]


def slice_of_box(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> FlatSlice:
    ranges = zip(offsets, lengths, strict=True)
    return slice_of_grid(shape, [np.arange(first, first + length) for first, length in ranges])


def boxes(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return every box of a tensor: offsets and lengths."""
    spans = [[(low, high - low) for low in range(n) for high in range(low + 1, n + 1)] for n in shape]
    return [tuple(zip(*box, strict=True)) for box in itertools.product(*spans)]  # type: ignore[misc]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_box_is_taken_as_slicing_takes_it(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    taken = 0
    for offsets, lengths in boxes(shape):
        slices = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        narrow = sum(n != size and n != 1 for n, size in zip(lengths, shape, strict=True))
        try:
            part = slice_of_box(shape, offsets, lengths)
        except ValueError:
            # Only a box that is narrower in several dimensions has runs with uneven gaps.
            assert narrow > 1 or len(shape) > 2
            continue
        taken += 1
        assert part.take(tensor).tolist() == tensor[slices].flatten().tolist(), (offsets, lengths)
        assert [n for first, end in part.runs() for n in range(first, end)] == tensor[slices].flatten().tolist()
        assert part.end == tensor[slices].max() + 1
        assert not part.overlaps_itself()
    assert taken >= len(boxes(shape)) // 3


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4)])
def test_every_shard_of_one_dimension_is_possible(shape: tuple[int, ...]) -> None:
    for offsets, lengths in boxes(shape):
        if sum(n != size for n, size in zip(lengths, shape, strict=True)) == 1:
            slice_of_box(shape, offsets, lengths)


def test_nothing() -> None:
    assert slice_of_box((4, 6), (4, 0), (0, 6)) == EMPTY_SLICE
    assert EMPTY_SLICE.take(torch.ones(3)).numel() == 0
    assert EMPTY_SLICE.numel == EMPTY_SLICE.end == 0


def test_of_a_tensor_that_is_not_contiguous() -> None:
    tensor = torch.arange(12).reshape(3, 4).t()
    assert FlatSlice(2, 3).take(tensor).tolist() == tensor.flatten()[2:5].tolist()


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 4)])
def test_any_part_of_a_tensor_in_any_parts_is_read(shape: tuple[int, ...], tmp_path: Path) -> None:
    """The tensor is stored and read by rows, by columns, and in odd ranges."""
    tensor = torch.randn(shape)
    folder = tmp_path
    divisions = {
        "rows": [slice_of_box(shape, (r,) + (0,) * (len(shape) - 1), (1, *shape[1:])) for r in range(shape[0])],
        "columns": [slice_of_box(shape, (0,) * (len(shape) - 1) + (c,), (*shape[:-1], 1)) for c in range(shape[-1])],
        "ranges": [FlatSlice(0, 5), FlatSlice(5, 1), FlatSlice(6, tensor.numel() - 6)],
        "full": [FlatSlice(0, tensor.numel())],
    }
    for name, parts in divisions.items():
        sources = []
        for number, part in enumerate(parts):
            file = folder / f"{name}{number}"
            # The file begins with other bytes.
            file.write_bytes(b"x" * 12 + part.take(tensor).numpy().tobytes())
            sources.append(FilePart(file, 12, part))
        stored = FileTensor("w", shape, torch.float32, sources)
        assert torch.equal(materialize(stored), tensor), name
        for other, wanted in divisions.items():
            for part in wanted:
                assert torch.equal(read_slice(stored, part), read_slice(tensor, part)), (name, other)


def test_shards_of_any_dtype(tmp_path: Path) -> None:
    place = tmp_path / "c"
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        tensor = (torch.randn(4, 3) * 3).to(dtype)
        write_checkpoint(place, {"model": {"w": Shard(tensor, (4, 3), FlatSlice(0, 12))}}, overwrite=place.exists())
        assert torch.equal(read_checkpoint(place)["model"]["w"], tensor)
        lazy = open_checkpoint(place, ("model",), verify=True)["model"]["w"]
        assert lazy.dtype is dtype
        assert lazy.shape == (4, 3)
        assert torch.equal(lazy.read(FlatSlice(3, 5)), tensor.flatten()[3:8])
