"""Checkpoints of trained weights alone: choose the weights, and recognize the others by sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.shards import Shard
from trainer.errors import CheckpointError, first_of

_PIECE = 2**22
"""Elements that are summed at once."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FrozenWeights:
    """The weights that checkpoints of trained weights leave out: they do not train, and have not changed since."""

    def __init__(self) -> None:
        self.base: dict[str, int] | None = None
        """Sums, by name, of the weights that checkpoints leave out; None: they leave out nothing."""
        self._unchanged: dict[str, int] = {}
        """Exact sums, by name, of the frozen weights that have not changed since training began."""

    def begin(self, module: nn.Module, state: Mapping[str, Any], gather: Callable[[Any], list[Any]]) -> None:
        """Sum the frozen weights when training begins; a weight that a checkpoint holds has changed. Collective."""
        names = [name for name in frozen_names(module, state) if self.base is None or name in self.base]
        self._unchanged = weight_sums(state, names, gather, rounded=False)

    def update(self, module: nn.Module, state: Mapping[str, Any], gather: Callable[[Any], list[Any]]) -> None:
        """Find the frozen weights that are unchanged, and sum them if the last save left out others. Collective."""
        frozen = [name for name in frozen_names(module, state) if name in self._unchanged]
        now = weight_sums(state, frozen, gather, rounded=False)
        names = [name for name in frozen if now[name] == self._unchanged[name]]
        self._unchanged = {name: now[name] for name in names}
        if self.base is None or [*self.base] != names:
            self.base = weight_sums(state, names, gather)

    def left_out_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a checkpoint without these weights, but with their sums."""
        if self.base is None:
            return state
        trained = {name: value for name, value in state["model"].items() if name not in self.base}
        return {**state, "model": trained, "base": dict(self.base)}


def frozen_names(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the names in the state_dict of the parameters that do not train, without buffers, which may change."""
    parameters = module.named_parameters(remove_duplicate=False)
    found = {name for name, parameter in parameters if not parameter.requires_grad}
    return [name for name in state if name in found or name.rpartition(".")[0] in found]  # a part of a quantized one


def weight_sums(
    state: Mapping[str, Any], names: list[str], gather: Callable[[Any], list[Any]], rounded: bool = True
) -> dict[str, int]:
    """Return sums of the bits of some weights, by name: equal under every strategy and precision. Collective.

    Args:
        state: what `Strategy.module_state` returned.
        gather: `all_gather_object` of the processes.
        rounded: round the weights to bfloat16 before, as frozen ones are under DeepSpeed. False: sums that show any
            change within a run.
    """
    parts: dict[str, int] = {}
    totals: dict[str, int] = {}
    for name in names:
        value = state[name]
        if isinstance(value, Shard):
            totals[name] = 0
            parts[name] = _sum(value.local, rounded) if value.extent.numel else 0  # of a copy another process's counts
        else:
            totals[name] = _sum(value, rounded)
    if parts:
        for of_rank in gather(parts):
            for name, part in of_rank.items():
                totals[name] += part
    return {name: total % 2**53 for name, total in totals.items()}  # 53 bits, as a sum is stored


def _sum(value: torch.Tensor, rounded: bool) -> int:
    total = 0
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    for piece in value.detach().reshape(-1).split(_PIECE):
        if piece.is_floating_point():
            bits = piece.to(torch.bfloat16).view(torch.int16) if rounded else piece.view(_INTEGERS[piece.itemsize])
        else:
            bits = piece
        total += int(bits.sum(dtype=torch.int64))
    return total


def check_base(saved: Mapping[str, int], own: Mapping[str, int], name: str) -> None:
    """Compare the sums in a checkpoint with the sums of the module's weights.

    Raises:
        CheckpointError: the sums differ.
    """
    problems = [weight for weight in saved if own.get(weight) != saved[weight]]
    if problems:
        raise CheckpointError(
            f"the checkpoint holds trained weights alone, and {name} has another base model, different in "
            f"{first_of(problems)}. Build it with the same pretrained weights, or save with trainable_only=False."
        )


def check_names(
    model: Mapping[str, Any], saved: Mapping[str, int], own: Mapping[str, Any], strict: bool, name: str
) -> None:
    """Check that a checkpoint of trained weights and its base model have all the weights of the module, if `strict`.

    Raises:
        CheckpointError: names differ.
    """
    if not strict:
        return
    problems = [f"the checkpoint lacks {weight}" for weight in own if weight not in model and weight not in saved]
    problems += [f"the module lacks {weight}" for weight in model if weight not in own]
    if problems:
        raise CheckpointError(f"the checkpoint of trained weights does not fit {name}: {first_of(problems)}")
