"""Swap full parameters in for those that a strategy shards, within blocks of code outside of a forward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.errors import ConfigError, first_of
from trainer.model.blocks import is_compiled
from trainer.model.full_parameters import Block, ParameterSlot, checksum, same_bits, slots_of
from trainer.strategy import Strategy, full_state_dict


class _Swap(NamedTuple):
    slot: ParameterSlot
    kept: nn.Parameter
    full: nn.Parameter


class SwappedParameters:
    """The full parameters that replace a module's shards within blocks, which may be nested.

    Args:
        strategy: shards the module.
        computing: returns the context for calls of a submodule with its full parameters.
    """

    def __init__(self, strategy: Strategy, computing: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        self._strategy, self._computing = strategy, computing
        self._swaps: list[_Swap] = []
        """The swaps of all blocks in progress."""

    @contextmanager
    def block(self, module: nn.Module, write: bool, on_rank_zero: bool) -> Iterator[None]:
        """Return the context of `Strategy.full_parameters`."""
        strategy = self._strategy
        slots = slots_of(module, strategy.module)
        _refuse_within_a_step(strategy)
        if not self._swaps:
            strategy.release_gathered()
        with torch.inference_mode(False):  # else nothing in the block could change them, in a hook of an evaluation
            swaps = self._gather(slots, on_rank_zero)
        if on_rank_zero and not strategy.processes.is_global_zero:
            yield
            return
        outer, outer_blocks = self._swaps, strategy._blocks
        self._swaps = [*outer, *swaps]
        for swap in swaps:
            swap.slot.hold(swap.full)
        block = Block(slots, write, keep=bool(outer))
        strategy._blocks = (*outer_blocks, block)
        try:
            with block.checked(), self._computing(module):
                yield
            if write:
                with torch.inference_mode(False):
                    self._write(module, slots)
                for one in outer_blocks:
                    one.take(slots)
        finally:
            for swap in swaps:
                swap.slot.hold(swap.kept)
            self._swaps, strategy._blocks = outer, outer_blocks

    def _gather(self, slots: list[ParameterSlot], on_rank_zero: bool) -> list[_Swap]:
        """Return the full parameters for those slots that hold a strategy's own. Collective."""
        strategy, full = self._strategy, {id(swap.full) for swap in self._swaps}
        ours = [slot for slot in slots if id(slot.parameter) not in full]
        values = full_state_dict(strategy, not on_rank_zero, {slot.name for slot in ours})
        device = torch.device("cpu") if on_rank_zero else strategy.device
        made: dict[int, nn.Parameter] = {}
        swaps = []
        for slot in ours if values or not on_rank_zero else ():
            kept = slot.parameter
            if id(kept) not in made:
                made[id(kept)] = nn.Parameter(values[slot.name].to(device), requires_grad=kept.requires_grad)
            swaps.append(_Swap(slot, kept, made[id(kept)]))
        return swaps

    def _write(self, module: nn.Module, slots: list[ParameterSlot]) -> None:
        """Set the strategy's parameters to rank 0's full ones. Collective."""
        strategy = self._strategy
        full: dict[str, torch.Tensor] = {}
        for slot in slots:
            slot.parameter.data = full[slot.name] = slot.parameter.data.contiguous()
        distinct = {id(tensor): tensor for tensor in full.values()}
        strategy.processes.broadcast([*distinct.values(), *(b for b in module.buffers() if b.numel())])
        for swap in self._swaps:
            swap.slot.hold(swap.kept)
        strategy.load_module_state(full, hooks=False)
        for swap in self._swaps:
            swap.slot.hold(swap.full)


class SwapsParameters(Strategy):
    """A strategy that shards parameters, and swaps full ones in within `full_parameters`."""

    _full: SwappedParameters

    def full_parameters(
        self, module: nn.Module, write: bool, on_rank_zero: bool = False
    ) -> AbstractContextManager[None]:
        return self._full.block(module, write, on_rank_zero)


def _refuse_within_a_step(strategy: Strategy) -> None:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "call_step" and frame.f_locals.get("self") is strategy:
            raise ConfigError(
                f"full_parameters within a step method: strategy {strategy.name!r} gathers the parameters of a layer "
                "only while the layer computes. Use it in a hook, such as on_train_batch_end; for a term of the loss "
                "compute with a layer's outputs, or give the optimizer weight_decay."
            )
        frame = frame.f_back  # type: ignore[assignment]


def gathering_hooks(units: Iterable[Any]) -> list[RemovableHandle]:
    """Return the handles of FSDP2's hooks that gather and free the weights of units."""
    states = [unit._get_fsdp_state() for unit in units]
    return [handle for one in states for handle in (one._pre_forward_hook_handle, one._post_forward_hook_handle)]


@contextmanager
def without_hooks(handles: list[RemovableHandle]) -> Iterator[None]:
    """Leave out hooks of modules within the block; afterwards they are called in the same order as before."""
    found = [(handle, table) for handle in handles if (table := handle.hooks_dict_ref()) is not None]
    before = [(table, dict(table)) for _, table in found]
    for handle, table in found:
        table.pop(handle.id, None)
    try:
        yield
    finally:
        for table, hooks in before:
            now = dict(table)
            table.clear()
            table.update({**hooks, **now})


@contextmanager
def changed_alike(strategy: Strategy) -> Iterator[None]:
    """Compare the parameters that a forward changes between the processes, which hold all of them. Collective.

    Raises:
        ConfigError: they differ: each process would train other weights from here on.
    """
    named = dict(strategy.module.named_parameters())
    before = {name: checksum(parameter) for name, parameter in named.items()}
    yield
    after = {name: checksum(parameter) for name, parameter in named.items()}
    changed = {name: int(one) for name, one in after.items() if one is not None and not same_bits(before[name], one)}
    of_all = strategy.processes.all_gather_object(changed)
    # Each changed parameter with its sum. A pair that is not on all processes is a difference.
    pairs = Counter(pair for one in of_all for pair in one.items())
    differ = dict.fromkeys(name for (name, _), times in pairs.items() if times < len(of_all))
    if differ:
        raise ConfigError(
            f"{first_of(differ)} changed within the forward of a step, on each process by its own batch, and strategy "
            f"{strategy.name!r} averages only gradients. Change it between two steps, in a hook such as "
            "on_train_batch_end, alike on all processes (torch.distributed.broadcast), or before the run; leave out "
            "max_norm of an nn.Embedding."
        )


@contextmanager
def unchanged_while_gathered(
    units: Iterable[tuple[nn.Module, Callable[[], Mapping[str, torch.Tensor]]]],
    hooks: list[RemovableHandle],
    strategy: Strategy,
) -> Iterator[None]:
    """Compare checksums of the weights that each unit gathers, from the beginning to the end of its forward.

    Args:
        units: modules, each with a function that returns what it has gathered, by name.
        hooks: the strategy's hooks that gather and free; the checksums are made right after and before them.

    Raises:
        ConfigError: weights were changed in between; the changes are lost when the weights are freed.
    """
    before: dict[str, torch.Tensor | None] = {}
    changed: list[str] = []

    def remember(gathered: Callable[[], Mapping[str, torch.Tensor]], *_: Any) -> None:
        before.update({name: checksum(tensor) for name, tensor in gathered().items()})

    def compare(gathered: Callable[[], Mapping[str, torch.Tensor]], *_: Any) -> None:
        found = gathered().items()
        changed.extend(name for name, tensor in found if not same_bits(before.get(name), checksum(tensor)))

    handles: list[RemovableHandle] = []
    theirs = {handle.id for handle in hooks}
    for unit, gathered in units:
        handles.append(unit.register_forward_pre_hook(partial(remember, gathered)))
        handles.append(unit.register_forward_hook(partial(compare, gathered)))
        _move_last(unit._forward_pre_hooks, theirs, after=True)
        _move_last(unit._forward_hooks, theirs, after=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if changed:
        raise ConfigError(
            f"{first_of(dict.fromkeys(changed))} changed within the forward of a step, while gathered, and strategy "
            f"{strategy.name!r} loses that. Change it between two steps, in a hook such as on_train_batch_end: with "
            "trainer.full_parameters(module, write=True): ..."
        )


def _move_last(hooks: dict[int, Any], others: set[int], after: bool) -> None:
    """Move the last hook right after, or before, those with these numbers."""
    numbers = [*hooks]
    last = numbers.pop()
    positions = [position for position, number in enumerate(numbers) if number in others]
    if positions:
        numbers.insert(max(positions) + 1 if after else min(positions), last)
        ordered = {number: hooks[number] for number in numbers}
        hooks.clear()
        hooks.update(ordered)


def has_compiled(module: nn.Module) -> bool:
    """Whether a submodule is compiled, and hooks would have it compiled again."""
    return any(map(is_compiled, module.modules()))
