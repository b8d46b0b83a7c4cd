"""Compare the checkpoints and logs of two runs bit by bit."""

from __future__ import annotations

import csv
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
    *("run_dir", "config", "versions*", "callback_identities*"),
    *("callbacks.ModelCheckpoint*", "callbacks.TensorBoardLogger*", "callbacks.Timer*"),
    *("metrics.csv.*_per_s", "metrics.csv.throughput/*"),
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
        CheckpointError: a run has no intact checkpoint.
    """
    patterns = tuple(ignore)
    first, second = (dict(_leaves("", _contents(local_path(path)), patterns)) for path in (one, other))
    found = []
    for where in {**first, **second}:
        if where not in second:
            found.append(f"{where}: only in the first")
        elif where not in first:
            found.append(f"{where}: only in the second")
        elif difference := _difference(first[where], second[where]):
            found.append(f"{where}: {difference}")
    return found


def _contents(path: Path) -> dict[str, Any]:
    """Return the last checkpoint of a run with the columns of its log, or a checkpoint."""
    if is_committed(path):
        return read_checkpoint(path)
    contents = read_checkpoint(CheckpointDirectory(path / "checkpoints").resolve("last"))
    log = path / "metrics.csv"
    return {**contents, log.name: _columns(log)} if log.is_file() else contents


def _columns(log: Path) -> dict[str, Any]:
    """Return the steps of a log in order, and for each other column the cells of each step that are not empty."""
    with open(log, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns: dict[str, Any] = {}
    for row in rows:
        for name, cell in row.items():
            if cell:
                columns.setdefault(name, {}).setdefault(f"step {row['step']}", []).append(cell)
    return {**columns, "step": [row["step"] for row in rows]}


def _leaves(where: str, value: Any, ignore: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested data that are not ignored, and empty containers, with their paths."""
    if any(fnmatchcase(where, pattern) for pattern in ignore):
        return
    if not isinstance(value, dict | list | tuple) or not value:
        yield where, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(f"{where}.{key}" if where else str(key), inner, ignore)


def _difference(one: Any, other: Any) -> str:
    """Return a description of the difference between two values; empty if they are equal."""
    if type(one) is not type(other):
        return f"{type(one).__name__} and {type(other).__name__}"
    if isinstance(one, np.ndarray | np.generic):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
    if not isinstance(one, torch.Tensor):
        # As text: -0.0 differs from 0.0, and NaN equals NaN.
        return "" if repr(one) == repr(other) else f"{one!r} and {other!r}"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{one.dtype} {tuple(one.shape)} and {other.dtype} {tuple(other.shape)}"
    bits = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (one, other)]
    different = int((bits[0] != bits[1]).any(1).sum())
    if not different:
        return ""
    largest = f", by up to {(one.double() - other.double()).abs().max():.3g}" if one.is_floating_point() else ""
    return f"{different} of {one.numel()} values differ{largest}"
