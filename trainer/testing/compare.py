"""Compare the checkpoints and logs of two runs bit by bit."""

from __future__ import annotations

import csv
import struct
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.arguments import local_path
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import is_committed

IGNORED = (
    "run_dir",
    "config",
    "versions*",
    "callbacks.ModelCheckpoint*",
    "callbacks.TensorBoardLogger*",
    "callback_identities*",
    "callbacks.Timer*",
    "metrics.csv.*_per_s",
    "metrics.csv.throughput/*",
)
"""Paths of values that may differ: directories, times, and names with times in them."""


def compare_runs(one: str | Path, other: str | Path, ignore: Iterable[str] = IGNORED) -> list[str]:
    """Return all differences between the last checkpoints of two runs and their `metrics.csv`; empty if bitwise equal.

    Compares weights, optimizers, schedulers, loss scale, progress, the position in the data, the random state of every
    process, partially accumulated metrics, and the states of callbacks.

    Args:
        one: a run directory, or a checkpoint (then there is no log to compare).
        other: the same.
        ignore: `fnmatch` patterns of the paths to skip, such as "callbacks.MyClock*" or
            "metrics.csv.seconds".

    Raises:
        CheckpointError: one of them has no intact checkpoint.
    """
    patterns = tuple(ignore)
    one, other = local_path(one), local_path(other)
    found = _differences("", _last_checkpoint(one), _last_checkpoint(other), patterns)
    return [*found, *_log_differences(one / "metrics.csv", other / "metrics.csv", patterns)]


def _last_checkpoint(path: Path) -> dict[str, Any]:
    checkpoint = path if is_committed(path) else CheckpointDirectory(path / "checkpoints").resolve("last")
    return read_checkpoint(checkpoint)


def _differences(where: str, one: Any, other: Any, ignore: tuple[str, ...]) -> Iterator[str]:
    if any(fnmatchcase(where, pattern) for pattern in ignore):
        return
    if type(one) is not type(other):
        yield f"{where}: {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            inside = f"{where}.{key}" if where else str(key)
            if key in one and key in other:
                yield from _differences(inside, one[key], other[key], ignore)
            elif not any(fnmatchcase(inside, pattern) for pattern in ignore):
                yield f"{inside}: only in the {'first' if key in one else 'second'}"
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} entries"
        for index, pair in enumerate(zip(one, other, strict=False)):
            yield from _differences(f"{where}.{index}", *pair, ignore)
    elif isinstance(one, torch.Tensor):
        yield from _tensor_differences(where, one, other)
    elif isinstance(one, np.ndarray):
        yield from _tensor_differences(where, torch.from_numpy(one), torch.from_numpy(other))
    elif isinstance(one, np.generic):
        yield from _differences(where, one.item(), other.item(), ignore)
    elif isinstance(one, float):
        if struct.pack("<d", one) != struct.pack("<d", other):
            yield f"{where}: {one!r} and {other!r}"
    elif one != other:
        yield f"{where}: {one!r} and {other!r}"


def _tensor_differences(where: str, one: torch.Tensor, other: torch.Tensor) -> Iterator[str]:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        yield f"{where}: {one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
        return
    bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (one, other)]
    if torch.equal(*bits):
        return
    different = (bits[0] != bits[1]).any(1)
    text = f"{where}: {int(different.sum())} of {one.numel()} values differ"
    if one.is_floating_point():
        largest = (one.double() - other.double()).abs().max().item()
        text += f", by up to {largest:.3g}"
    yield text


def _log_differences(one: Path, other: Path, ignore: tuple[str, ...]) -> Iterator[str]:
    if not one.is_file() and not other.is_file():
        return
    for path in (one, other):
        if not path.is_file():
            yield f"metrics.csv: there is no {path}"
            return
    tables = [_rows(path) for path in (one, other)]
    steps = [[row["step"] for row in rows] for rows in tables]
    if steps[0] != steps[1]:
        strays = sorted({*steps[0]} ^ {*steps[1]}, key=lambda step: (len(step), step))
        only = f"; steps in one of them only: {', '.join(strays[:5])}" if strays else ""
        yield f"metrics.csv: {len(steps[0])} and {len(steps[1])} rows{only}"
        return
    for first, second in zip(*tables, strict=True):
        for column in [*first, *(column for column in second if column not in first)]:
            if any(fnmatchcase(f"metrics.csv.{column}", pattern) for pattern in ignore):
                continue
            values = [row.get(column, "") or "empty" for row in (first, second)]
            if values[0] != values[1]:
                yield f"metrics.csv, step {first['step']}: {column} is {values[0]} and {values[1]}"


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
