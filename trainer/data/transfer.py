"""Move a batch to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from trainer.distributed.devices import has_streams


def move_to(batch: Any, target: torch.device | Callable[[Any], Any]) -> Any:
    """Return a copy of `batch` with every leaf moved: tensors and objects with a `.to(device)`, in any nesting of
    dicts, lists, tuples, namedtuples and dataclasses. Everything else stays as it is.

    `target` is a device, or a function applied to every leaf. A namedtuple with a `.to` of its own is a leaf. A batch
    whose tensors are all on the device already comes back with the same tensors.
    """
    if isinstance(batch, torch.Tensor):
        # Asynchronous copies to the CPU or to MPS are used before they are complete
        # (https://github.com/pytorch/pytorch/issues/83015).
        return target(batch) if callable(target) else batch.to(target, non_blocking=has_streams(target.type))
    if isinstance(batch, PackedSequence):
        # `batch_sizes` has to stay on the CPU.
        places = ("data", "sorted_indices", "unsorted_indices")
        return batch._replace(**{name: move_to(getattr(batch, name), target) for name in places})
    if isinstance(batch, tuple) and hasattr(batch, "_fields") and not hasattr(batch, "to"):
        return type(batch)(*(move_to(item, target) for item in batch))
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(move_to(item, target) for item in batch)
    # A UserDict, such as Hugging Face's BatchEncoding, has a `.to` that would wait for the device at each tensor.
    if isinstance(batch, (dict, UserDict)):
        return _like(batch, {key: move_to(value, target) for key, value in batch.items()})
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {k: move_to(v, target) for k, v in batch.items()}
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = {f.name: move_to(getattr(batch, f.name), target) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **moved)
    if callable(target):
        return target(batch)
    if hasattr(batch, "to") and not isinstance(batch, type):
        return batch.to(target)
    return batch


def _like(original: Any, moved: dict[Any, Any]) -> Any:
    """Return a dict of the original's type (OrderedDict, defaultdict, UserDict) with the moved values."""
    if type(original) is dict:
        return moved
    same = copy.copy(original)
    for key, value in moved.items():
        same[key] = value
    return same


def make_transfer(device: torch.device) -> Callable[[Any], Any]:
    """Return the function with which a strategy copies batches to its device; it does the same as `move_to`."""
    return PrefetchCopy(device) if has_streams(device.type) else partial(move_to, target=device)


class PrefetchCopy:
    """`move_to` for a device with streams, with the copies on a stream of their own.

    The host runs ahead of the device by a step or more, so the next batch is copied while the last one is computed; the
    current stream waits for the copies before it uses the batch. A copy from memory that is not pinned blocks the host,
    but only for its own duration: on the computing stream it would block for all steps queued before it.

    Only plain tensors in host memory go this way: memory of others could be reused too early, or is on the device
    already.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def __call__(self, batch: Any) -> Any:
        moved = move_to(batch, self._leaf)
        torch.accelerator.current_stream(self.device).wait_stream(self.stream)
        return moved

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return move_to(leaf, self.device)
        if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return leaf.to(self.device, non_blocking=True)
        with self.stream:
            there = leaf.to(self.device, non_blocking=True)
        # Its memory belongs to the side stream, which must not reuse it before the current stream is done with it.
        there.record_stream(torch.accelerator.current_stream(self.device))
        return there
