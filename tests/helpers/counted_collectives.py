"""Count the collectives of a block of code, and the memory that its forwards have allocated."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "all_reduce": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
}
"""Operators of torch's namespaces c10d and _c10d_functional by the words of the cost model."""
NOTHING_SENT = ("wait_tensor", "_wrap_tensor_autograd", "recv_")
"""A receive is counted where the message is sent."""

Counted = Counter[tuple[str, int]]
"""Numbers of collectives by kind and bytes of the full tensor."""


class CountCollectives(TorchDispatchMode):
    """Sees every collective and message of this thread, whoever calls it: all pass through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counted = Counter()
        self.flags: Counted = Counter()
        """Those of numbers of 32 bits, by which processes tell each other on the CPU which gradients they have."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that what DTensor makes of it is seen
        leaves = tree_leaves((args, kwargs))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._opname, leaves)
        outputs = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        for output in tree_leaves(outputs):
            # Subclasses, such as a collective that may not have ended, have a size and no memory.
            if type(output) is torch.Tensor and output.untyped_storage()._cdata not in known:
                storage = output.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return outputs

    def _count(self, operator: str, leaves: list[Any]) -> None:
        if operator in NOTHING_SENT:
            return
        kind = KINDS.get(operator, operator)
        processes = _processes(leaves)
        size = max(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        if operator == "all_gather_into_tensor":  # it takes the part only
            size *= processes
        if processes > 1:
            is_flags = any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.int32 for leaf in leaves)
            (self.flags if is_flags else self.counted)[kind, size] += 1

    def allocated(self, module: torch.nn.Module) -> int:
        """Return the bytes of what was allocated and is still there, without parameters and their gradients."""
        tensors = [*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
        local: list[Any] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        known = {tensor.untyped_storage()._cdata for tensor in local}
        alive = [storage() for key, storage in self._storages.items() if key not in known]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def _processes(leaves: list[Any]) -> int:
    """Return the size of the group: an object for c10d, a name for functional collectives."""
    for leaf in leaves:
        if isinstance(leaf, str) and leaf not in ("sum", "avg", "max", "min"):
            return dist.distributed_c10d._resolve_process_group(leaf).size()
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf).size()
    raise AssertionError(f"no group among {leaves}")
