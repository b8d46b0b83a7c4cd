"""Compare what the processes of one model have in common: batches, losses, gradients of weights that all have."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError, first_of
from trainer.model.reachable import (
    OF_TORCH,
    OwnGenerator,
    attributes,
    is_container,
    is_generator,
    is_users,
    objects_behind,
)
from trainer.module import TrainModule

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

HOW_GRADIENTS = (
    "Give their layers styles in the tensor_parallel_plan: 'replicated_with_grad_allreduce' for weights that act on "
    "split features or heads, 'shared_by_heads' for a layer whose outputs the split heads read (and no others), "
    "'sequence_parallel' for a norm on parts of a sequence; or split them."
)

_PLAIN = (bool, int, float, str)


def refuse_different_batches(step: str, batch: Any, groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Raise ConfigError if the processes of one model get different batches. Collective over each of the groups."""
    number = digest(batch)
    largest = torch.tensor([number, -number], device=device)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if int(largest.sum()):
        raise ConfigError(
            f"{step} gets different batches on the processes of one model, which have to read the same samples. Seed "
            "each random generator of the data with the same number on all processes (Trainer(seed=...) seeds torch, "
            "numpy and random), and sort lists of files."
        )


def digest(nested: Any) -> int:
    """Return a number of 32 bits for the tensors, numbers and texts in any nesting."""
    number = 0

    def add(leaf: Any) -> None:
        nonlocal number
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            data: Any = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        else:
            data = repr(leaf).encode() if isinstance(leaf, _PLAIN) else b""
        number = zlib.crc32(data, number)

    map_leaves(nested, add)
    return number


def is_power_of_two(number: int) -> bool:
    """Whether a number is 0, 1, 2, 4, 8, ..."""
    return number & (number - 1) == 0


class CommonLoss:
    """Compares the loss of the processes that compute one stage, in the calls 0, 1, 2, 4, 8, ... and in every 64th.

    Each process has a part of the features or tokens, so a loss that is computed from what a block keeps, and not from
    its output, differs between the processes. A block may also depend on numbers or texts that it keeps: if these have
    changed by one of the calls 0, 1, 2, 4, ..., all blocks are verified again in the next call.

    Args:
        blocks: the blocks of this process.
        groups: groups of processes that must have the same loss; none: nothing is compared.
        with_experts: groups of processes that have different losses, but must verify in the same call.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module] = (),
        groups: Sequence[dist.ProcessGroup] = (),
        with_experts: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self._blocks, self._groups, self._with_experts = [*blocks], groups, with_experts
        self._calls = -1
        self._kept: list[Marks] = []
        """Marks of the values that the blocks had when they were verified."""
        self.verifies = False
        """True if the blocks are to be verified again in the next call."""

    def begin(self) -> None:
        """Begin a forward in training."""
        self._calls += 1
        self._kept = self._kept or self._marks()

    def compare(self, loss: torch.Tensor) -> None:
        """Raise ConfigError if the processes of a group have different losses. Collective."""
        if not self._groups:
            return
        is_power = is_power_of_two(self._calls)
        self.verifies = False
        if not is_power and self._calls % 64:
            return
        # All processes compute the same, apart from kernels that sum in no fixed order.
        limit = torch.finfo(torch.float32).eps ** 0.75
        if any(float(differences_among([loss], group)) > limit for group in self._groups):
            raise ConfigError(
                "the loss differs between the processes of one model, each of which has some of the features or "
                "tokens. Compute the loss from the outputs of the blocks, not from values that they or hooks keep. In "
                "a tensor_parallel_plan have a 'rowwise' layer follow each 'colwise' one, and give a head the style "
                "'colwise_gather_output' or, for cross_entropy, 'colwise_loss_parallel'."
            )
        if is_power:
            kept = self._marks()
            changed = torch.tensor(kept != self._kept, dtype=torch.int32, device=loss.device)
            for group in (*self._groups, *self._with_experts):
                dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=group)
            self.verifies, self._kept = bool(changed), kept

    def _marks(self) -> list[Marks]:
        return [marks_of(block)[0] for block in self._blocks]


Marks = dict[tuple[str, str], Any]
"""By words for a module or object, and the name of an attribute: what changes with the attribute's value."""


def marks_of(module: nn.Module) -> tuple[Marks, dict[str, Any]]:
    """Return marks of what the parts of a module, and objects in them, keep; and these parts and objects by words."""
    marks: Marks = {}
    owners: dict[str, Any] = {}
    seen: set[int] = set()
    for place, part in module.named_modules():
        owners[place], own = part, {name: one for name, one in vars(part).items() if name not in OF_TORCH}
        if isinstance(part, TrainModule):
            own = {name: one for name, one in own.items() if name[:1] != "_" and not hasattr(TrainModule, name)}
        values: dict[str, Any] = {place: own | part._buffers}
        held = [*own.values(), *part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        objects = [one for value in held for one in objects_behind(value, seen) if is_users(one)]
        for number, one in enumerate(objects, 1):
            words = f"{place}.".removeprefix(".") + f"{type(one).__name__} {number}"
            owners[words], values[words] = one, attributes(one)
        marks |= {(words, name): _mark(one) for words, kept in values.items() for name, one in kept.items()}
    return marks, owners


def _mark(value: Any) -> Any:
    """Return what changes with a value: with a tensor its version, with a container what is in it."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if is_generator(value):
        return digest(OwnGenerator(value).get_state())
    if isinstance(value, (list, tuple, dict, set)) and is_container([*value]):
        return [_mark(one) for one in (value.values() if isinstance(value, dict) else value)]
    return value if isinstance(value, _PLAIN) else (id(value),)


def refuse_partial_gradients(parameters: Mapping[str, Any], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Compare the gradients of parameters that are replicated in a group. Collective.

    Args:
        dtype: the dtype of the computation of gradients.

    Raises:
        ConfigError: gradients differ by more than rounding, so that each process has a part of the sum.
    """
    limit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps ** 0.5)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    different = (differences_among(gradients, group) > limit).tolist() if gradients else []
    names = [*compress(parameters, different)]
    if names:
        raise ConfigError(
            f"tensor_parallel={dist.get_world_size(group)}: {first_of(names)} are replicated, but their gradients "
            f"differ between the processes, each of which has some of the features or heads. {HOW_GRADIENTS}"
        )


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, without the import of its module, which imports sympy."""
    return hasattr(tensor, "to_local")


def local_part(tensor: Any) -> Any:
    """Return this process's part of a DTensor, and any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones, which gloo can send, and any other tensor unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def differences_among(tensors: Sequence[Any], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the largest difference of each tensor from its mean over a group, as a share of the mean. Collective."""
    differences, norms = [], []
    for tensor in tensors:
        own = local_part(tensor).detach().float()
        mean = own.clone()
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
        differences.append((own - mean).norm())
        norms.append(mean.norm())
    different, norm = torch.stack(differences), torch.stack(norms)
    dist.all_reduce(different, op=dist.ReduceOp.MAX, group=group)
    # Gradients that should be 0 are rounding errors, which may differ.
    return different / norm.clamp(min=max(1e-4 * float(norm.norm()), 1e-30))
