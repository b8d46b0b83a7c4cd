"""Check what a block of code does with the full parameters of a module, and undo what it did before an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.errors import ConfigError, first_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterSlot(NamedTuple):
    """The attribute of a submodule that holds a parameter; a tied parameter has several."""

    name: str
    owner: nn.Module
    key: str

    @property
    def parameter(self) -> Any:
        """The parameter in the slot."""
        return self.owner._parameters[self.key]

    def hold(self, parameter: nn.Parameter | None) -> None:
        """Put a parameter into the slot."""
        if isinstance(self.owner, nn.RNNBase):  # which keeps a list of its parameters, too
            setattr(self.owner, self.key, parameter)
        else:
            self.owner._parameters[self.key] = parameter


def slots_of(module: nn.Module, root: nn.Module) -> list[ParameterSlot]:
    """Return the slots of the parameters of `module`, by their names in the state_dict of `root`.

    Raises:
        ConfigError: `module` is not a part of `root`.
    """
    inside = {id(child) for child in module.modules()}
    if all(child is not module for child in root.modules()):
        raise ConfigError(
            f"full_parameters of a {type(module).__name__} that is not a part of {type(root).__name__}, the module of "
            "the run: give that, or one of its submodules."
        )
    return [
        ParameterSlot(f"{prefix}.{key}".removeprefix("."), owner, key)
        for prefix, owner in root.named_modules(remove_duplicate=False)
        if id(owner) in inside
        for key, _ in owner.named_parameters(recurse=False, remove_duplicate=False)
    ]


def checksum(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sum of a tensor's bits, on its device; None for a kind of tensor whose bits cannot be seen."""
    try:
        with torch.no_grad():
            return tensor.detach().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
    except (RuntimeError, KeyError, NotImplementedError, TypeError):
        return None


def same_bits(before: torch.Tensor | None, after: torch.Tensor | None) -> bool:
    """Whether two checksums are equal, or there are none."""
    return before is None or after is None or int(before) == int(after)


class Block:
    """A block of code in progress with full parameters in some slots.

    Args:
        write: the block may change them.
        keep: undo its changes after an error.
    """

    def __init__(self, slots: list[ParameterSlot], write: bool, keep: bool) -> None:
        self._slots, self._write, self._keep = slots, write, write and keep
        self._before = {slot.name: self._snapshot(slot.parameter) for slot in slots}

    def _snapshot(self, parameter: nn.Parameter) -> tuple[nn.Parameter, torch.Size, Any]:
        return parameter, parameter.shape, parameter.data.clone() if self._keep else checksum(parameter)

    def take(self, written: Iterable[ParameterSlot]) -> None:
        """Accept the new values in these slots, which an inner block has written."""
        for slot in written:
            if slot.name in self._before:
                self._before[slot.name] = self._snapshot(slot.parameter)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Check what the block does.

        Raises:
            ConfigError: a parameter was replaced by another one, or changed without `write`.
        """
        gradients = torch.is_grad_enabled() and not self._write
        try:
            # Tensors that are made in inference mode could not be trained afterwards.
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                yield
        except BaseException:
            if self._keep:
                self._undo()
            raise
        self._refuse_replaced()
        before = self._before.items() if not self._write else ()
        changed = [name for name, (parameter, _, bits) in before if not same_bits(bits, checksum(parameter))]
        if changed:
            raise ConfigError(
                f"{first_of(changed)} changed within full_parameters(write=False), where changes are lost under "
                "strategies that shard: give write=True, on all processes."
            )

    def _undo(self) -> None:
        for slot in self._slots:
            parameter, shape, values = self._before[slot.name]
            slot.hold(parameter)
            if parameter.shape == shape:
                parameter.data.copy_(values)

    def _refuse_replaced(self) -> None:
        """Raise ConfigError, and put the parameters back, if they are not the same objects of the same shape."""
        names = []
        for slot in self._slots:
            parameter, shape, _ = self._before[slot.name]
            if slot.owner._parameters.get(slot.key) is not parameter or parameter.shape != shape:
                names.append(slot.name)
                slot.hold(parameter)
        if names:
            raise ConfigError(
                f"{first_of(names)} was replaced within full_parameters, or has another shape now, and the optimizer "
                "has the former parameter: change it in place, as `parameter.copy_(value)` does."
            )
