"""KeptValues: compare what blocks keep between the processes of one model, and refuse what is computed from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.data.sampler_state import own_generators
from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError, first_of
from trainer.model.reachable import (
    OF_TORCH,
    attributes,
    global_containers,
    is_container,
    is_users,
    objects_behind,
    places,
)
from trainer.module import TrainModule
from trainer.strategies.fsdp.mesh import ModelSplit
from trainer.strategies.fsdp.one_reader import digest

_EVERY = 64
Kept = dict[str, tuple[Any, dict[str, list[tuple[Any, Any]]]]]
"""By words for a module or object: itself, and by attribute the values in it with marks, which change with them."""
Unread = dict[int, tuple[Any, dict[str, str]]]
"""By `id` of a module or object: itself, and by attribute the error of reading it."""


class KeptValues:
    """Refuses to compute with values that blocks keep, and that differ between the processes of one model.

    Each process has a part of the features, tokens or blocks, so that a mean that a block keeps is that of a part: it
    may be logged, but no loss and no later step is right that reads it. The processes compare such values, and the
    loss, in the calls 0, 1, 2, 4, 8 and so on, and in every 64th. In the call after one of these an attribute with
    different values cannot be read before it is written.

    What blocks compute may go by what they keep. So where that has changed since they were compared with full layers or
    sequences they are compared again, in that call; if it changes all the time, as counters do, not as often.

    Args:
        module: whose blocks keep values, or, where it is a pipeline, which keeps them itself.
        blocks: all blocks by name, also those of other stages.
        layout: the division of the model.
        dtype: the model computes in.
        compared: the sets of blocks that need no comparison with full layers or sequences, which are cleared for one.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        processes: SingleProcess,
        layout: ModelSplit,
        dtype: torch.dtype,
        compared: Sequence[set[Any]] = (),
    ) -> None:
        self._processes, self._layout = processes, layout
        within = tuple(f"{name}." for name in blocks)
        everywhere = layout.pipeline > 1  # after the blocks the last stage is alone, too
        self._owners = {"": module} if everywhere else blocks
        self._modules = {n: m for n, m in module.named_modules() if everywhere or f"{n}.".startswith(within)}
        # The same is computed from the same, so what differs at all are sums of kernels without a fixed order.
        self._limit = max(torch.finfo(dtype).eps / 64, 1e-5)
        self._compared, self._comparisons = compared, 1
        self._marks: list[Any] = []
        """Those of the values with which blocks were compared."""
        self.compares = False
        """True if blocks are compared again in the next step."""
        self._steps = 0
        self.looks = False
        """True in a step in which values are compared, until the next begins."""
        self._seen: tuple[Kept, Kept] | None = None
        """The values before and after the last forward, until they are compared."""
        self._different: list[str] = []
        """Words for the values that differ in this step."""
        self.unread: Unread = {}
        """Those that the next step cannot read."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a forward in training."""
        self.looks = self._steps & (self._steps - 1) == 0 or self._steps % _EVERY == 0
        self._steps += 1
        unread, self.unread, self._different = self.unread, {}, []
        for one in self._compared if self.compares else ():
            one.clear()
        self.compares = False
        before = self._kept() if self.looks else {}
        with _unreadable(unread):
            yield
        if self.looks:
            self._seen = before, self._kept()

    def compare(self) -> None:
        """Find what the last forward has changed and other processes have different. Collective, in some steps."""
        if self._seen is None:
            return
        (before, after), self._seen = self._seen, None
        own = {place: _changes(before.get(place, (None, {}))[1], values) for place, (_, values) in after.items()}
        marks = _marks(after)
        self._marks = self._marks or _marks(before)
        of_all = self._processes.all_gather_object(
            ({place: numbers for place, numbers in own.items() if numbers}, marks != self._marks)
        )
        self.compares = any(changed for _, changed in of_all) and self._comparisons <= self._steps.bit_length() + 1
        if self.compares:
            self._marks, self._comparisons = marks, self._comparisons + 1
        readers = zip(of_all, self._processes.reader_of, strict=True)
        of_model = [numbers for (numbers, _), reader in readers if reader == self._processes.reader]
        changed = {(place, name) for numbers in of_model for place, by_name in numbers.items() for name in by_name}
        for place, name in sorted(changed):
            found = [numbers[place][name] for numbers in of_model if name in numbers.get(place, {})]
            is_own = name in own.get(place, {})
            if is_own and all(math.isclose(one, found[0], rel_tol=self._limit) or one != one for one in found):
                continue
            owner = after[place][0] if place in after else None
            words = f"{place}.{name}".strip(".")
            self._different.append(words)
            error = (
                f"{self._layout}: {{}} {words}, which differs between the processes of one model. Each computes "
                "some of the features, tokens or blocks, and in a pipeline the last stage alone what comes after them. "
                "Compute the value before the blocks, or from their outputs; or use another strategy."
            )
            if is_own and isinstance(owner, nn.Module) and name in owner._buffers:
                raise ConfigError(error.format("the blocks change the buffer"))
            # What a list has in it is known by reading the list, as for adding to it.
            if owner is not None and not (is_own and is_container(attributes(owner).get(name))):
                self.unread.setdefault(id(owner), (owner, {}))[1][name] = error.format("the training reads")

    def _kept(self) -> Kept:
        found: Kept = {}
        seen: set[int] = set()
        for name, part in self._modules.items():
            own = {key: one for key, one in vars(part).items() if key not in OF_TORCH} | part._buffers
            if isinstance(part, TrainModule):
                own = {key: one for key, one in own.items() if key[:1] != "_" and not hasattr(TrainModule, key)}
            found[name] = part, {key: _values(one) for key, one in own.items()}
        for block, one in self._owners.items():
            shared = [*global_containers(one)]
            found.update({place: (None, {"": _values(value)}) for place, value in shared})
            for place, value in (*places(block, one), *shared):
                for number, held in enumerate(filter(is_users, objects_behind(value, seen)), start=1):
                    of_object = {key: _values(value) for key, value in attributes(held).items()}
                    found[f"{place} ({type(held).__name__} {number})"] = held, of_object
        return found

    def refuse_different_loss(self, loss: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        """Raise ConfigError if the processes of a group have different losses. Collective."""
        for group in groups:
            own = (loss.to_local() if isinstance(loss, DTensor) else loss).detach().float()
            ends = torch.stack([own, -own])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
            high, low = ends.tolist()
            if high + low > self._limit * max(abs(high), abs(low)):
                kept = f", and keeps other values in {first_of(self._different)}" if self._different else ""
                raise ConfigError(
                    f"{self._layout}: the loss differs between the processes of one model. Each has some of the "
                    f"features or tokens{kept}. Compute the loss from the outputs of the blocks, not from values that "
                    "they or hooks keep. A 'colwise' layer of a tensor_parallel_plan is followed by a 'rowwise' one, "
                    "and a head has the style 'colwise_gather_output' or, for cross_entropy, 'colwise_loss_parallel'."
                )


def _values(kept: Any) -> list[tuple[Any, Any]]:
    """Return the tensors, numbers and texts of an attribute, with marks; of generators numbers for their states."""
    values = [kept]
    if isinstance(kept, (list, tuple, deque, dict)):
        values = torch.utils._pytree.tree_leaves(kept) if is_container([*kept]) else []
    if isinstance(kept, torch.Generator) or is_users(kept):
        values = [digest(one.get_state()) for one in own_generators(kept, depth=1)]
    found = [one for one in values if _is_value(one)]
    return [(one, (id(one), one._version) if isinstance(one, torch.Tensor) else one) for one in found]


def _is_value(one: Any) -> bool:
    if isinstance(one, torch.Tensor):
        dense = one.layout is torch.strided and not one.is_nested and not one.is_meta
        return dense and not one.is_inference() and not isinstance(one, (DTensor, nn.Parameter))
    return isinstance(one, (Real, str))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Return a number, by attribute, for the values of those that have changed."""
    changed = {}
    for name, values in after.items():
        if [mark for _, mark in values] != [mark for _, mark in before.get(name, [])]:
            changed[name] = sum(map(_number, (one for one, _ in values)))
    return changed


def _marks(kept: Kept) -> list[Any]:
    by_place = [(place, name, values) for place, (_, found) in kept.items() for name, values in found.items()]
    return [(place, name, [mark for _, mark in values]) for place, name, values in by_place]


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return float((value.abs() if value.is_complex() else value).detach().float().norm())
    return float(digest(value) if isinstance(value, str) else value)


@contextmanager
def _unreadable(unread: Unread) -> Iterator[None]:
    """Have attributes raise errors until they are written."""
    kinds = [(owner, type(owner)) for owner, _ in unread.values()]
    for owner, errors in unread.values():
        owner.__class__ = _unreadable_kind(type(owner), errors)
    try:
        yield
    finally:
        for owner, kind in kinds:
            owner.__class__ = kind


def _unreadable_kind(kind: Any, errors: dict[str, str]) -> type:
    def read(self: Any, name: str) -> Any:
        if name in errors:
            raise ConfigError(errors[name])
        return kind.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        errors.pop(name, None)
        kind.__setattr__(self, name, value)

    hooks = {"__getattribute__": read, "__setattr__": write}
    return type(kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **hooks})
