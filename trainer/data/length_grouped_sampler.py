"""LengthGroupedSampler: samples in random order, similar lengths together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from trainer.errors import ConfigError


class LengthGroupedSampler(Sampler[int]):
    """Draw samples at random, with similar lengths in each batch, so that a batch has less padding.

    A random order is cut into groups of `batch_size * group_batches` samples, each sorted by length; the
    longest sample of all comes first, so that a lack of memory shows in the first step. The order depends on the
    trainer's seed and the epoch only: `DataLoader(dataset, batch_size=8, sampler=LengthGroupedSampler(dataset, 8))` is
    split over processes, and a resumed run continues in the same order.

    Args:
        lengths: the length of each sample; or a dataset whose samples have one (`len(sample)`, or
            `len(sample["input_ids"])`), which is read once.
        batch_size: samples of a batch, over all processes.
        group_batches: batches that are sorted together.

    Raises:
        ConfigError: a number is less than 1.
    """

    def __init__(self, lengths: Sequence[Any], batch_size: int, group_batches: int = 50) -> None:
        if min(batch_size, group_batches) < 1:
            raise ConfigError(f"LengthGroupedSampler({batch_size=}, {group_batches=}): give integers from 1.")
        self.lengths = torch.tensor([_length(lengths[number]) for number in range(len(lengths))])
        self.batch_size, self.group_batches = batch_size, group_batches

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        groups = torch.randperm(len(self)).split(self.batch_size * self.group_batches)
        ordered = [group[self.lengths[group].argsort(descending=True, stable=True)] for group in groups]
        # The group with the longest sample comes first, and in its place the first one.
        longest = max(range(len(ordered)), key=lambda number: int(self.lengths[ordered[number][0]]))
        if len(ordered[longest]) == len(ordered[0]):
            ordered[0], ordered[longest] = ordered[longest], ordered[0]
        yield from torch.cat(ordered).tolist()


def _length(sample: Any) -> int:
    tokens: Any = sample.get("input_ids") if isinstance(sample, Mapping) else sample
    if hasattr(tokens, "__len__") and getattr(tokens, "ndim", True):
        return len(tokens)
    return int(tokens)
