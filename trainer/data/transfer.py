"""Move a batch to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from trainer.distributed.devices import has_streams


def move_to(batch: Any, device: torch.device) -> Any:
    """Return a copy of `batch` with its tensors, and objects with `.to(device)`, on the device, in any nesting.

    A dict, namedtuple, dataclass or the like with a method `to` moves itself. Everything else stays unchanged. If all
    tensors are on the device already, the result has the same tensors.
    """
    return map_leaves(batch, partial(_moved, device=device), moves_itself)


move_data_to_device = move_to
"""Lightning's name."""


def map_leaves(batch: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a copy of `batch` with the function applied to every leaf, in any nesting of dicts, lists, tuples,
    namedtuples and dataclasses, which keep their classes and other attributes.

    `is_leaf`: whether such a container is a leaf, too.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    inner = partial(map_leaves, function=function, is_leaf=is_leaf)
    if type(batch) is list and is_leaf in (None, moves_itself):
        return [*map(inner, batch)]
    if isinstance(batch, PackedSequence):
        # `batch_sizes` has to stay on the CPU.
        parts = {"data": batch.data, "sorted_indices": batch.sorted_indices, "unsorted_indices": batch.unsorted_indices}
        return batch._replace(**inner(parts))
    if is_leaf is not None and is_leaf(batch):
        return function(batch)
    if isinstance(batch, tuple):
        items = map(inner, batch)
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if issubclass(type(batch), (list, deque, UserList)):
        return _like(batch, dict(enumerate(map(inner, batch))))
    if isinstance(batch, Mapping):
        return _like(batch, {key: inner(value) for key, value in batch.items()})
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        same = copy.copy(batch)
        for name in [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]:
            object.__setattr__(same, name, inner(getattr(batch, name)))  # also of a frozen one
        return same
    return function(batch)


def map_tensors(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of `batch` with the function applied to every tensor, in any nesting; see `map_leaves`."""
    return map_leaves(batch, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def moves_itself(batch: Any) -> bool:
    """Whether a batch moves itself, by its method `to`.

    The method of Hugging Face's BatchEncoding and BatchFeature is not used: it waits for the device at each tensor.
    """
    method = getattr(type(batch), "to", None)
    return callable(method) and not getattr(method, "__module__", "").startswith("transformers.")


def _moved(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        # Asynchronous copies to the CPU or to MPS are used before they are complete
        # (https://github.com/pytorch/pytorch/issues/83015).
        return leaf.to(device, non_blocking=has_streams(device.type))
    if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
        return leaf
    moved = leaf.to(device)
    return leaf if moved is None else moved  # a `to` that moves in place may return nothing


def _like(original: Any, mapped: dict[Any, Any]) -> Any:
    """Return a container of the original's class and attributes (OrderedDict, UserDict, deque) with mapped items."""
    if type(original) is dict:
        return mapped
    if isinstance(original, (dict, UserDict, list, deque, UserList)):
        same = copy.copy(original)
        for key, value in mapped.items():
            same[key] = value
        return same
    try:
        return type(original)(mapped)
    except TypeError:  # a mapping that is made of something else
        return mapped


def make_transfer(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that copies a strategy's batches to its device, as `move_to` does."""
    return PrefetchCopy(device) if has_streams(device.type) else partial(move_to, device=device)


class PrefetchCopy:
    """`move_to` for a device with streams, with the copies on a separate stream.

    The host runs ahead of the device by a step or more, so the next batch is copied while the last one is computed; the
    current stream waits for the copies before it uses the batch. A copy from memory that is not pinned blocks the host,
    but only for its own duration: on the computing stream it would block for all steps queued before it.

    Only plain tensors in host memory go this way. The memory of other tensors could be reused too early, or is on the
    device already.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device)

    def __call__(self, batch: Any) -> Any:
        moved = map_leaves(batch, self._leaf, moves_itself)
        torch.accelerator.current_stream(self.device).wait_stream(self.stream)
        return moved

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return _moved(leaf, self.device)
        if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
            return leaf.to(self.device, non_blocking=True)
        with self.stream:
            there = leaf.to(self.device, non_blocking=True)
        # Its memory belongs to the side stream, which must not reuse it before the current stream is done with it.
        there.record_stream(torch.accelerator.current_stream(self.device))
        return there
