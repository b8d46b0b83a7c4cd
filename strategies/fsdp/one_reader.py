"""Compare what the processes of one model take to be the same: the batch, and what a step leaves outside of blocks."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.sampler_state import own_generators
from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError, first_of
from trainer.module import TrainModule

_PLAIN = (bool, int, float, str)


def refuse_different_batches(step: str, batch: Any, groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Raise ConfigError if the processes of one model get different batches. Collective over each of the groups."""
    if not _all_same(_digest(batch), groups, device):
        raise ConfigError(
            f"{step} gets different batches on the processes of one model, which have to read the same samples: the "
            "data draw from a random generator without a seed, or the order of files, or a sampler, differs. Seed it "
            "with the same number on all processes (Trainer(seed=...) seeds torch, numpy and random)."
        )


def refuse_different_state(
    module: nn.Module,
    blocks: Collection[str],
    before: Mapping[str, str],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Compare what a training step has changed of a module outside of its blocks. Collective.

    Args:
        before: the result of `outer_state` before the step.

    Raises:
        ConfigError: it changes a number or draws from a generator of its own behind the blocks, to which the last stage
            alone comes.
    """
    changed = {name: one for name, one in outer_state(module, blocks).items() if before.get(name) != one}
    if not _all_same(_digest([*changed.items()]), [group], device):
        where = first_of(sorted(changed)) if changed else "what the last stage's message names"
        raise ConfigError(
            f"pipeline_parallel: training_step leaves other values in {where} on the stages, "
            "because what comes after the blocks runs on the last stage alone: change values that the module keeps, "
            "and draw from generators of its own, before the blocks, or in on_train_batch_end; or use another strategy."
        )


def outer_state(module: nn.Module, blocks: Collection[str]) -> dict[str, str]:
    """Return the plain values and the generators' states of the parts of a module that are not in blocks, as texts."""
    found = {}
    for path, part in module.named_modules():
        if f"{path}.".startswith(tuple(f"{name}." for name in blocks)):
            continue
        ours = isinstance(part, TrainModule)
        for name, value in vars(part).items():
            place = f"{path}.{name}".removeprefix(".")
            if name.startswith("_") or (ours and hasattr(TrainModule, name)):
                continue
            if isinstance(value, _PLAIN):
                found[place] = repr(value)
            else:
                found[place] = f"{_digest([one.get_state() for one in own_generators(value, depth=1)]):x}"
    return found


def _digest(nested: Any) -> int:
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
