"""Collectives of Lightning's strategies, such as `trainer.strategy.barrier()`.

Each function takes the strategy's `processes` first. All processes have to call it.
"""

from __future__ import annotations

from typing import Any

import torch


def barrier(processes: Any, name: str | None = None) -> None:
    """Wait for all processes."""
    processes.barrier()


def broadcast(processes: Any, obj: Any, src: int = 0) -> Any:
    """Return the object of rank `src`, on all processes."""
    return processes.broadcast_object(obj) if src == 0 else processes.all_gather_object(obj)[src]


def reduce(processes: Any, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
    """Return the mean or the sum of a tensor over all processes, on all of them; what is not a tensor, unchanged.

    Raises:
        ValueError: another operation, or a group of processes.
    """
    name = str(reduce_op).rpartition(".")[2].lower()
    if name not in ("mean", "avg", "sum") or not (group is None or processes.world_size == 1):
        raise ValueError(
            f"trainer.strategy.reduce(group={group!r}, reduce_op={reduce_op!r}): the mean or the sum over all "
            "processes can be computed. For others use torch.distributed.all_reduce(tensor, op, group)."
        )
    if not isinstance(tensor, torch.Tensor) or processes.world_size == 1:
        return tensor
    total = processes.sum(tensor)
    return total if name == "sum" else total / processes.world_size


def reduce_boolean_decision(processes: Any, decision: bool, all: bool = True) -> bool:
    """Return whether the decision is True on all processes; with `all=False`, on any."""
    decisions = processes.all_gather_object(bool(decision))
    return sum(decisions) == len(decisions) if all else any(decisions)
