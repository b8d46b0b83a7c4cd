"""Compare the batches of the processes of one model."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError

_PLAIN = (bool, int, float, str)


def refuse_different_batches(step: str, batch: Any, groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Raise ConfigError if the processes of one model get different batches. Collective over each of the groups."""
    if not _all_same(digest(batch), groups, device):
        raise ConfigError(
            f"{step} gets different batches on the processes of one model, which have to read the same samples: the "
            "data draw from a random generator without a seed, or the order of files, or a sampler, differs. Seed it "
            "with the same number on all processes (Trainer(seed=...) seeds torch, numpy and random)."
        )


def digest(nested: Any) -> int:
    """Return a number of 32 bits for the tensors, numbers and texts in any nesting."""
    number = 0

    def add(leaf: Any) -> None:
        nonlocal number
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            data: Any = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        else:
            data = repr(leaf).encode() if isinstance(leaf, _PLAIN) else b""
        number = zlib.crc32(data, number)

    map_leaves(nested, add)
    return number


def _all_same(number: int, groups: Iterable[dist.ProcessGroup], device: torch.device) -> bool:
    largest = torch.tensor([number, -number], device=device)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    high, low = largest.tolist()
    return bool(high == -low)
