"""Gather the tensors of all processes, with their gradients if need be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError


def map_sorted(function: Callable[[str, Any], Any], data: Any, path: str = "") -> Any:
    """Return nested data with `function(path, leaf)` in place of each leaf.

    It is called in the order of sorted keys, because a dict that is filled as values come has another order elsewhere.
    """
    children, spec = tree_flatten(data, is_leaf=lambda one: one is not data)
    if len(children) == 1 and children[0] is data:
        return function(path, data)
    keys = [*data] if isinstance(data, Mapping) else range(len(children))
    order = sorted(range(len(children)), key=lambda number: repr(keys[number]))
    mapped = {number: map_sorted(function, children[number], f"{path}[{keys[number]!r}]") for number in order}
    return tree_unflatten([mapped[number] for number in range(len(children))], spec)


def describe_leaves(data: Any) -> list[str]:
    """Return a line with path, shape and dtype for each tensor and number in nested data, sorted."""
    lines: list[str] = []

    def describe(path: str, leaf: Any) -> None:
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf, device="cpu")
        if isinstance(leaf, torch.Tensor):
            lines.append(f"{path or 'a tensor'}: {[*leaf.shape]} {leaf.dtype}")

    map_sorted(describe, data)
    return lines


def gather_nested(data: Any, device: torch.device, group: dist.ProcessGroup | None, sync_grads: bool) -> Any:
    """Return nested `data` with each tensor and number replaced by all processes' values, in the order of ranks.

    Collective. Tensors have the same shape on all processes.

    Args:
        device: of numbers that become tensors.
        group: the processes; None: all.
        sync_grads: let gradients through; a process gets the sum of all processes' gradients of its part.
    """

    def gather(path: str, leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float)):
            leaf = torch.tensor(leaf, device=device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if sync_grads and leaf.is_floating_point():
            return _Gather.apply(leaf, group)
        return _gathered(leaf.detach(), group)

    return map_sorted(gather, data)


def gather_uneven(data: Any, device: torch.device, processes: SingleProcess, sync_grads: bool) -> Any:
    """Return nested `data` with the tensors of all processes joined along their first dimension, in the order of ranks.

    Collective. None stands for a tensor without rows.

    Raises:
        ConfigError: a leaf lacks a first dimension, or the tensors differ in more than its length; on all processes.
    """
    own: dict[str, Any] = {}
    map_sorted(lambda path, leaf: own.update({path: _length_and_rows(leaf)}), data)
    everywhere = processes.all_gather_object(own)
    for path in sorted({path for one in everywhere for path in one}):
        _require_rows(path, [one.get(path, (0, "nothing")) for one in everywhere])
    if processes.world_size == 1:
        return data

    def gather(path: str, leaf: Any) -> Any:
        kinds = [one[path] for one in everywhere]
        rows = next((kind[2:] for kind in kinds if kind is not None), None)
        if rows is None:
            return None
        lengths = [kind[0] if kind is not None else 0 for kind in kinds]
        shape, dtype = rows
        if leaf is None:  # with a gradient, because the backward is a collective, too
            grads = sync_grads and dtype.is_floating_point
            leaf = torch.empty((0, *shape), dtype=dtype, device=device, requires_grad=grads)
        padded = torch.cat([leaf, leaf.new_zeros((max(lengths) - len(leaf), *shape))])
        parts = gather_nested(padded, device, None, sync_grads)
        return torch.cat([one[:length] for one, length in zip(parts, lengths, strict=True)])

    return map_sorted(gather, data)


def _require_rows(path: str, kinds: Sequence[tuple[Any, ...] | None]) -> None:
    """Raise ConfigError if the processes' leaves at a path are not rows of one kind, or None."""
    found = {kind[1]: rank for rank, kind in enumerate(kinds) if kind is not None}
    if len(found) > 1 or any(not rows.startswith("rows") for rows in found):
        differing = ", and ".join(f"{rows} on rank {rank}" for rows, rank in found.items())
        raise ConfigError(
            f"gather_uneven: {path or 'the data'} has {differing}. It joins tensors, which may differ only in the "
            "length of their first dimension: give None on a process without a tensor, and numbers to all_gather."
        )


def _length_and_rows(leaf: Any) -> tuple[Any, ...] | None:
    """Return the length of a leaf's first dimension, a description of its rows, and their shape and dtype."""
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        return len(leaf), f"rows of {[*leaf.shape[1:]]} {leaf.dtype}", [*leaf.shape[1:]], leaf.dtype
    return None if leaf is None else (0, f"a {type(leaf).__name__} without rows")


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if not tensor.numel():
        return tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    own = tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)  # gloo knows few dtypes
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts).view(tensor.dtype).view(len(parts), *tensor.shape)


class _Gather(torch.autograd.Function):
    """The tensors of all processes, stacked."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        return _gathered(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None
