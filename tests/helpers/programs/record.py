"""What a training did, by fit, epoch and batch, as both loops write it down; and the differences between two."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class Record:
    """What was trained and validated. What is done again after a resume is written again."""

    def __init__(self) -> None:
        self.batches: dict[tuple[int, int, int], list[Any]] = {}
        """By fit, epoch and batch: the samples, the steps done before, the learning rate, and the loss, each time."""
        self.validations: dict[tuple[int, int, int], list[Any]] = {}
        """By fit, epoch and steps done: the samples and the mean."""
        self.means: dict[tuple[int, int], Any] = {}
        """By fit and epoch: the mean of the losses and the sum of samples, as they were known last."""
        self.weights: list[list[float]] = []
        """Of each fit."""
        self.steps: list[int] = []
        """Of each fit."""
        self.told: set[int] = set()
        """The epochs that the user's objects were told."""
        self.fit = 0

    def add_batch(self, epoch: int, batch: int, *facts: Any) -> None:
        self.batches.setdefault((self.fit, epoch, batch), []).append(facts)

    def add_validation(self, epoch: int, step: int, *facts: Any) -> None:
        self.validations.setdefault((self.fit, epoch, step), []).append(facts)

    def end_fit(self, net: nn.Module, steps: int) -> None:
        self.weights.append([one for weight in net.parameters() for one in weight.detach().flatten().tolist()])
        self.steps.append(steps)
        self.fit += 1

    def begin_process(self) -> None:
        """Forget the ends of fits: those of the last process count."""
        self.fit, self.weights, self.steps = 0, [], []

    def lengths(self) -> dict[int, int]:
        """Return the number of batches of each epoch of the first fit."""
        found: dict[int, int] = {}
        for fit, epoch, batch in self.batches:
            if fit == 0:
                found[epoch] = max(found.get(epoch, 0), batch + 1)
        return found

    def order(self, fit: int) -> dict[int, list[list[int]]]:
        """Return the samples of each batch by epoch, as they were the last time."""
        found: dict[int, list[list[int]]] = {}
        for (one, epoch, _), times in sorted(self.batches.items()):
            if one == fit and times[-1][0]:  # of a loop's first loader
                found.setdefault(epoch, []).append(times[-1][0])
        return found


def differences(expected: Record, found: Record, bits: bool = False) -> list[str]:
    """Return what differs between what is right and what the product did, the first of each kind.

    Args:
        bits: numbers are equal to the last bit, and not to rounding.
    """
    problems: list[str] = []
    equal = _same if bits else _close
    for name, what in (("batches", "(fit, epoch, batch)"), ("validations", "(fit, epoch, step)")):
        wanted, seen = getattr(expected, name), getattr(found, name)
        missing, further = [key for key in wanted if key not in seen], [key for key in seen if key not in wanted]
        if missing:
            problems.append(f"{name}: missing {what} {missing[:4]}")
        if further:
            problems.append(f"{name}: too many {what} {[(key, seen[key][0]) for key in further[:3]]}")
        wrong = [
            f"{name}: {what} {key}: {one} instead of {wanted[key][0]}"
            for key in sorted(wanted)
            for one in seen.get(key, ())
            if not equal(one, wanted[key][0])
        ]
        problems += wrong[:1]
    for name in ("means", "weights", "steps"):
        wanted, seen = getattr(expected, name), getattr(found, name)
        if not equal(wanted, seen):
            problems.append(f"{name}: {seen} instead of {wanted}")
    if not found.told <= expected.told:
        problems.append(f"set_epoch: was told {sorted(found.told)}, and the epochs are {sorted(expected.told)}")
    return problems


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # NaN, too


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_close, one, other))
    return bool(one == other)


def flattened(batch: Any) -> tuple[torch.Tensor, torch.Tensor, list[int], int]:
    """Return inputs, targets, numbers of samples, and how many samples count, of a batch of one loader or several."""
    if not (isinstance(batch, dict) and "x" in batch):
        parts = [one for one in (batch.values() if isinstance(batch, dict) else batch) if one is not None]
    else:
        parts = [batch]
    numbers = [int(one) for part in parts for one in part["id"]]
    return (
        torch.cat([part["x"] for part in parts]),
        torch.cat([part["y"] for part in parts]),
        numbers,
        len(parts[0]["id"]),
    )
