"""Hints: what costs time on a GPU and is one word in the user's own code, said once when a training starts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

HAVE_FUSED = (Adam, AdamW, SGD)
"""The optimizers that torch can run as one kernel on CUDA, and does not unless it is asked to."""


def speed_hints(device: torch.device, pinned: bool | None, optimizers: Iterable[Optimizer]) -> list[str]:
    """One sentence each; nothing for devices other than CUDA.

    Args:
        device: the one that trains.
        pinned: whether the training loader gives batches in pinned memory; None: it is no DataLoader.
        optimizers: as the user made them.
    """
    if device.type != "cuda":
        return []
    hints = []
    if pinned is False:
        hints.append("DataLoader(pin_memory=True) lets batches be copied to the GPU beside the computation")
    for optimizer in optimizers:
        if type(optimizer) in HAVE_FUSED and not any(
            group.get("fused") or group.get("capturable") for group in optimizer.param_groups
        ):
            hints.append(f"{type(optimizer).__name__}(fused=True) updates all parameters in one kernel")
    return hints
