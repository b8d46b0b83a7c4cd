"""Reduce the gradients of a backward over processes by name, and leave user code's own gradients alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from trainer.errors import ConfigError
from trainer.strategies.fsdp.trainable import adopt_flags, own_gradient, was_gathered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


WITH_GRAPH = (
    "create_graph=True in the backward of a step: strategy 'fsdp' reduces its gradients to shards, without a graph. "
    "Call torch.autograd.grad(loss, inputs, create_graph=True) for gradients of gradients, or use 'ddp'."
)


class Gradients:
    """Stands between autograd and the reduction of FSDP2, which packs the gradients that a process happens to have.

    Where processes have gradients of different parameters of a unit, FSDP2 adds up gradients of different parameters.
    Here a process packs zeros for what it lacks; a gradient that no process has stays None, as in a loop on one
    process. Which ones these are is exchanged on the CPU, and only a process that lacks gradients waits for the answer.

    FSDP2 also takes each backward for the end of a step, and reduces gradients and frees the weights. Here only a
    backward within `of_step` ends one; `torch.autograd.grad` of user code leaves what the rest of the step needs.

    Args:
        root: torch's state of the module.
        units: the module and its blocks, as FSDP2 wraps them.
        groups: FSDP2's groups of parameters, of all units.
        processes: a group for each dimension of the mesh over which gradients are reduced; none for one process.
        refusal: words that refuse `loss.backward()` in a step, whose gradients would be wrong; "": it is allowed.
    """

    def __init__(
        self, root: Any, units: Sequence[Any], groups: Sequence[Any], processes: Sequence[Any], refusal: str = ""
    ) -> None:
        self._refusal = refusal
        self._waiting: dict[Any, tuple[torch.Tensor, int]] = {}
        """By record, the full gradients that waited at the end of the last backward of a step, with their versions."""
        self._root, self._groups, self._processes = root, groups, processes
        self._records = [record for group in groups for record in group.fsdp_params]
        self._numbers = {record: number for number, record in enumerate(self._records)}
        self.kept: Sequence[Any] = ()
        """Groups whose weights stay gathered after a backward, because the step may use them again."""
        self._runs = self._reached = False
        self._held: list[tuple[Any, Any]] = []
        """Groups that keep their weights gathered, each with the mesh on which these are sharded after a forward."""
        self._due: set[Any] = set()
        """The records whose parameter required a gradient in a backward since the last reduction."""
        self._found: set[Any] = set()
        """The records whose gradient this process has reduced in the backward in progress; not those in `_lacking`."""
        self._lacking: list[Any] = []
        """The records for which this process has reduced zeros."""
        self._present = torch.zeros(0)
        """Numbers of processes that have a gradient, by record, and then those that have one after the reduction of its
        group; complete when `_pending` has ended."""
        self._pending: Any = None
        for record in self._records:
            record.in_backward = self._is_running
        for unit in units:
            unit._get_fsdp_state()._root_post_backward_final_callback = self._end_of_graph
        for group in groups:
            group.post_backward = partial(self._post_backward, group)

    @contextmanager
    def of_step(self, models: Iterable[Gradients] = ()) -> Iterator[None]:
        """Reduce, or add up for a later reduction, the gradients of the backward in the block, when it has ended.

        Args:
            models: the gradients of all models of the loop; this backward may reach several of them.
        """
        together = [self, *(one for one in models if one is not self)]
        for one in together:
            adopt_flags(one._records)
            one._due.update(r for r in one._records if was_gathered(r) and r._unsharded_param.requires_grad)
            one._runs, one._reached = True, one is self
        try:
            yield
            reached = [one for one in together if one._reached]
            for one in reached:
                one._reduce_the_rest()
        finally:
            for one in together:
                one._runs = False
        for one in reached:
            type(one._root)._root_post_backward_final_callback(one._root)
        for one in together:
            if one._refusal:
                one._waiting = one._full_gradients()

    def release(self) -> None:
        """Shard weights after their use again, after a gradient with a separate graph has kept them gathered."""
        for group, mesh in self._held:
            group.post_forward_mesh_info = mesh
            if group not in self.kept:
                group.reshard()
        self._held = []

    def clear_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `optimizer.zero_grad()` drop the full gradients, too, that wait for their reduction."""
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        records = [record for record in self._records if id(record.sharded_param) in own]

        def zero_grad(set_to_none: bool = True) -> None:
            type(optimizer).zero_grad(optimizer, set_to_none)
            self._drop(records)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def forget(self) -> None:
        """Drop gradients that wait for the end of a window, which has broken."""
        for record in self._records:
            record.sharded_param.grad = None
        self._drop(self._records)

    def _drop(self, records: Sequence[Any]) -> None:
        """Drop full gradients."""
        self._due.difference_update(records)
        for record in records:
            record.unsharded_accumulated_grad = None
            if was_gathered(record) and own_gradient(record) is not None:
                record._unsharded_param.grad = None

    def _full_gradients(self) -> dict[Any, tuple[torch.Tensor, int]]:
        """Return the gradients that wait at gathered parameters, and their versions, by record."""
        full = ((record, own_gradient(record)) for record in self._records if was_gathered(record))
        return {record: (gradient, gradient._version) for record, gradient in full if gradient is not None}

    def _is_running(self) -> bool:
        return self._runs

    # -- called by autograd --------------------------------------------------------------------------------------------

    def _post_backward(self, group: Any, *unused: Any) -> None:
        if not self._runs:
            return
        if group.reduce_grads:
            self._fill(group)
        if not any(map(was_gathered, group.fsdp_params)):  # torch would look for its gradients
            group._training_state = TrainingState.POST_BACKWARD
            return
        before = group.reshard_after_backward
        group.reshard_after_backward = before and not self._held and group not in self.kept
        type(group).post_backward(group)
        group.reshard_after_backward = before

    def _end_of_graph(self) -> None:
        """End a backward; one of user code frees what it has gathered, unless its gradients have a graph."""
        context = self._root._state_ctx
        context.post_backward_final_callback_queued = False
        if self._runs:
            if torch.is_grad_enabled():  # the weights are freed, and the gradients of shards are new tensors
                raise ConfigError(WITH_GRAPH)
            self._reached = True
            return
        if self._refusal:
            for record, (gradient, version) in self._full_gradients().items():
                before, number = self._waiting.get(record, (None, 0))
                if gradient is not before or version != number:
                    raise ConfigError(self._refusal)
        gathered = [group for group in self._groups if group._training_state == TrainingState.PRE_BACKWARD]
        for group in self._groups:
            group.finalize_backward()
        for state in context.all_states:
            if state._training_state == TrainingState.PRE_BACKWARD:
                state._training_state = TrainingState.IDLE
        for group in gathered:
            group._training_state = TrainingState.IDLE
        self._root._comm_ctx.post_forward_order.clear()
        if self._held:
            return
        if not torch.is_grad_enabled():
            for group in gathered:
                group.reshard()
            return
        # The backward of these gradients needs the weights before a hook of FSDP2 can gather them.
        self._held = [(group, group.post_forward_mesh_info) for group in self._groups]
        for group in self._groups:
            if group.is_sharded_post_forward:
                group.reshard()
            group.post_forward_mesh_info = None

    # -- the reduction -------------------------------------------------------------------------------------------------

    def _fill(self, group: Any) -> None:
        """Add zeros for the gradients that this process lacks, in the dtype of those that it has."""
        records = [record for record in group.fsdp_params if was_gathered(record)]
        if group._orig_dtype is None:  # all were frozen when FSDP2 looked for their dtype
            group._init_mp_dtypes()
        for record in records:
            record.accumulate_unsharded_grad_if_needed()
        found = {record: gradient for record in records if (gradient := _gradient(record)) is not None}
        self._found |= found.keys()
        dtypes = [gradient.dtype for gradient in found.values()]
        if len({*dtypes}) > 1:  # of a norm and another layer, or of several micro-batches and one
            dtypes = [group.mp_policy.reduce_dtype]
            for record, gradient in found.items():
                record.unsharded_accumulated_grad = gradient.to(dtypes[0])
                record._unsharded_param.grad = None
        missing = self._due - found.keys()
        for record in records:
            if record in missing:
                full = record._unsharded_param
                record.unsharded_accumulated_grad = torch.zeros_like(full, dtype=dtypes[0] if dtypes else full.dtype)
                if record.sharded_param.grad is None:
                    self._lacking.append(record)

    def _reduce_the_rest(self) -> None:
        """Reduce what no hook of autograd has reduced, and take back the gradients that no process has."""
        reduces = bool(self._groups) and self._groups[0].reduce_grads
        late: Sequence[Any] = ()
        if reduces:
            self._exchange()
            if self._held:
                self._wait()
                late = [*compress(self._groups, self._present[len(self._records) :])]
        for group in reversed(self._groups):
            if group._training_state != TrainingState.POST_BACKWARD or group in late:
                due = self._due.intersection(group.fsdp_params)
                if reduces and not any(map(self._is_somewhere, due)):
                    self._due -= due
                self._post_backward(group)
        for record in self._lacking:
            if not self._is_somewhere(record):
                record.sharded_param.grad = None
        self._lacking.clear()
        self._found.clear()
        if reduces:
            self._due.clear()

    def _exchange(self) -> None:
        """Begin to tell all processes which parameters have a gradient on this one."""
        self._wait()
        self._found.update(record for record in self._records if _gradient(record) is not None)
        present = [record in self._found for record in self._records]
        # A gradient of gradients comes after the last hook of its unit, if no output of the unit leads to it.
        late = [bool(self._held) and self._is_late(group) for group in self._groups]
        self._present = torch.tensor([*present, *late], dtype=torch.int32, device="cpu")
        for processes in self._processes:
            self._wait()
            self._pending = dist.all_reduce(self._present, group=processes, async_op=True)

    def _is_late(self, group: Any) -> bool:
        """Whether this process has got a gradient since the reduction of its group."""
        ended = group._training_state == TrainingState.POST_BACKWARD
        return ended and any(_gradient(record) is not None for record in group.fsdp_params)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _is_somewhere(self, record: Any) -> bool:
        """Whether a process has a gradient of a record's parameter. Waits for the others where this one has none."""
        if record in self._found:
            return True
        self._wait()
        return bool(self._present[self._numbers[record]])


def _gradient(record: Any) -> torch.Tensor | None:
    """Return a full gradient that waits for its reduction."""
    waiting: torch.Tensor | None = record.unsharded_accumulated_grad
    return own_gradient(record) if waiting is None and was_gathered(record) else waiting
