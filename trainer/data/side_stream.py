"""Batches go to a CUDA device on a stream of their own, beside the computation of the step before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer.data.transfer import move_to


def mover(device: torch.device) -> Callable[[Any], Any]:
    """What moves a batch to `device`, as `move_to` does."""
    return SideStream(device) if device.type == "cuda" else partial(move_to, target=device)


class SideStream:
    """`move_to` a CUDA device, of which the copies do not wait for what the device still computes.

    The host is ahead of the device by a step or more, so that the next batch is copied while the last one is computed;
    what is called after this on the current stream waits for the copies, on the device. From memory that is not pinned
    a copy keeps the host waiting, but for itself only: on the computing stream it would be for all steps queued before.

    Only plain tensors in the host's memory go this way: the memory of others could be used again too early, or is on
    the device already.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> Any:
        moved = move_to(batch, self._leaf)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return moved

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return move_to(leaf, self.device)
        if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return leaf.to(self.device, non_blocking=True)
        with torch.cuda.stream(self.stream):
            copy = leaf.to(self.device, non_blocking=True)
        # Its memory belongs to the side stream, which may not have it again before the current one has used it.
        copy.record_stream(torch.cuda.current_stream(self.device))
        return copy
