"""Run the forward of a block without consequences, to compare it with another way to compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError
from trainer.float8.conversion import layers_in_8_bits
from trainer.model.blocks import class_of
from trainer.model.reachable import Held
from trainer.seed import isolated_rng, rng_state
from trainer.strategies.fsdp.one_reader import digest
from trainer.strategies.swapped_parameters import without_hooks
from trainer.strategy import eval_mode

_LOW = (torch.bfloat16, torch.float16)

Compute = Callable[[Callable[[Any], Any]], Mapping[str, torch.Tensor]]
"""Returns results by words for them, computed from arguments that it first hands to the function that it is given."""


def way_of(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a forward may go another way by: modes, and flags, texts and kinds among its arguments."""
    plain = (one if isinstance(one, (bool, str)) else type(one) for one in (*args, *kwargs.values()))
    return torch.is_grad_enabled(), name, block.training, *plain


class Difference(NamedTuple):
    """The difference of two results."""

    share: torch.Tensor
    """Its norm, as a share of that of the result that is right."""
    of_rounding: torch.Tensor
    """The same, as a multiple of what rounding may make at most: more than 1 is an error."""

    def describe(self) -> str:
        """Return it in words, after "is" or "are"."""
        return f"wrong by {float(self.share):.1%}, {float(self.of_rounding):.3g} times as much as rounding may make"


class Reference:
    """The results of a block in one way, to compare with it what it computes in others.

    It computes in float32 whatever the precision of the run, so that no difference that a wrong plan makes is taken for
    rounding; in the dtypes of the run only where it cannot, such as with kernels for 16 bits. The block has its mode,
    but evaluates where it draws random numbers in training, of which parts of a tensor have others than all of it.

    Args:
        block: whose forward `right` calls.
        device: of the block.
        right: the way that is right.
        gradients: enable gradients, if it computes in float32.
        full: both ways compute with this process's full weights, and not with parts of them.
        inputs: what the block is called with, in which objects may hold what it writes.

    Raises:
        Exception: it fails.
    """

    def __init__(
        self,
        block: nn.Module,
        device: torch.device,
        right: Compute,
        gradients: bool = False,
        full: bool = False,
        inputs: Any = (),
    ) -> None:
        self._block, self._device, self._full, self._inputs = block, device, full, inputs
        for self._evaluates, self._in_float32 in (False, True), (True, True), (True, False):
            self._gradients = gradients and self._in_float32
            try:
                self._expected = self._run(right)
            except (RuntimeError, ValueError, TypeError) as error:
                if isinstance(error, ConfigError) or not self._in_float32:
                    raise
            else:
                if self._evaluates or not self._drew:
                    break
        self._unit = torch.finfo(torch.float32 if self._in_float32 else torch.bfloat16).eps
        # Rounding does less than a change of all weights in the second half of their digits.
        self._changed = self._run(right, math.sqrt(self._unit) / 4)

    def compare(self, other: Compute) -> dict[str, Difference]:
        """Return the differences of what is computed in another way, without results of other shapes."""
        found = self._run(other)
        same_shape = [name for name, one in self._expected.items() if name in found and found[name].shape == one.shape]
        return {name: self._difference(name, found[name]) for name in same_shape}

    def _run(self, compute: Compute, change: float = 0.0) -> dict[str, torch.Tensor]:
        options = self._in_float32, change, self._gradients, self._full, self._evaluates
        with rehearsal(self._block, self._device, *options, inputs=self._inputs) as random_state:
            before = random_state()
            found = compute(_in_float32 if self._in_float32 else lambda arguments: arguments)
            self._drew = random_state() != before
            return {name: one.detach().float() for name, one in found.items()}

    def _difference(self, name: str, found: torch.Tensor) -> Difference:
        expected, changed = self._expected[name], self._changed.get(name, found)
        changed = torch.where(torch.isfinite(changed), changed, expected)
        share = difference_of(found, expected)
        # A result is rounded, too, beside what it is computed from.
        return Difference(share, share / (4 * difference_of(changed, expected) + 8 * self._unit))


def difference_of(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the norm of the difference of two results, as a share of that of `expected`.

    What is not finite in `expected` counts as equal: where it comes from, others say. What is not finite in `found`
    only makes the difference infinite.
    """
    known = torch.isfinite(expected)
    found, expected = (torch.where(known, one, 0) for one in (found, expected))
    share: torch.Tensor = (found - expected).norm() / expected.norm().clamp(min=1e-12)
    return share.nan_to_num(nan=torch.inf, posinf=torch.inf)


# -- a forward without consequences ------------------------------------------------------------------------------------


@contextmanager
def rehearsal(
    block: nn.Module,
    device: torch.device,
    in_float32: bool = False,
    change: float = 0.0,
    gradients: bool = False,
    full: bool = False,
    evaluates: bool = True,
    inputs: Any = (),
) -> Iterator[Callable[[], int]]:
    """Run a block; its mode, buffers and random numbers, and what it may write to, are put back on exit.

    A little is added to all parameters, because a branch that begins with zeros would hide what it computes; to `full`
    ones another value each, because a table that begins with equal rows would hide which of them it takes.

    Args:
        in_float32: compute in float32 what the run computes in fewer bits.
        change: the share by which each weight is larger or smaller.
        gradients: enable gradients, of parameters that train, too.
        evaluates: all of the block is in eval mode, not only torch's layers, such as dropout.

    Returns:
        A function for a number that changes when random numbers are drawn.
    """
    with ExitStack() as stack:
        modes = {child: child.training for child in block.modules()}
        stack.enter_context(eval_mode(block))
        for child, training in modes.items():
            child.training = training and not evaluates and not class_of(child).__module__.startswith("torch.")
        held = Held(block, inputs, math.inf)  # here, because what a block holds is that of this mode by now
        contexts: list[AbstractContextManager[Any]] = [
            torch.set_grad_enabled(gradients),
            isolated_rng(device),
            held.put_back(),
            _gathered(block),
        ]
        contexts += [_computing_in_float32(block, device)] if in_float32 else []
        for context in (*contexts, _other_weights(block, in_float32, change, gradients, full)):
            stack.enter_context(context)
        yield lambda: digest([rng_state(device), [one.get_state() for one in held.generators]])


@contextmanager
def _gathered(block: nn.Module) -> Iterator[None]:
    """Gather the weights of FSDP2's units within a block, such as experts, and keep them. Collective."""
    from torch.distributed.fsdp import FSDPModule

    units = [unit for unit in block.modules() if unit is not block and isinstance(unit, FSDPModule)]
    states: list[Any] = [unit._get_fsdp_state() for unit in units]
    hooks = [handle for one in states for handle in (one._pre_forward_hook_handle, one._post_forward_hook_handle)]
    for unit in units:
        unit.unshard()
    try:
        with without_hooks(hooks):
            yield
    finally:
        for unit in units:
            unit.reshard()


@contextmanager
def _computing_in_float32(block: nn.Module, device: torch.device) -> Iterator[None]:
    for child in block.modules():
        child._buffers.update({name: b.float() for name, b in child._buffers.items() if b is not None and _is_low(b)})
    for layer in layers_in_8_bits(block):
        layer.forward = partial(nn.Linear.forward, layer)
    products = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False), _Float32Casts():
            yield
    finally:
        torch.set_float32_matmul_precision(products)


class _Float32Casts(TorchDispatchMode):
    """Has the casts of a block to 16 bits, and those of an autocast of its own, end in float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in _LOW:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


@contextmanager
def _other_weights(block: nn.Module, in_float32: bool, change: float, gradients: bool, full: bool) -> Iterator[None]:
    def other(parameter: nn.Parameter) -> nn.Parameter:
        value = parameter.detach()
        value = (value.float() if in_float32 and _is_low(value) else value) + 0.02
        if full and not hasattr(value, "placements"):
            waves = torch.arange(value.numel(), device=value.device).sin().view(value.shape)
            value = value + 0.01 * waves.to(value.dtype)
        if change:
            # Up or down by the value itself, so alike on all processes, of full weights and of parts.
            value = value * (1 + change * torch.sin(1e6 * value.abs()).sign())
        return nn.Parameter(value, requires_grad=gradients and parameter.requires_grad)

    others = {id(p): other(p) for p in block.parameters() if p.is_floating_point() or p.is_complex()}
    with replaced_parameters(block, lambda parameter: others.get(id(parameter))):
        yield


def _in_float32(arguments: Any) -> Any:
    return map_leaves(
        arguments, lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and _is_low(leaf) else leaf
    )


def _is_low(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _LOW


@contextmanager
def replaced_parameters(block: nn.Module, choose: Callable[[nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Give a block other parameters for a while: those that `choose` returns, or the same where it returns None."""
    replaced: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
    for owner in block.modules():
        for name, parameter in owner._parameters.items():
            other = None if parameter is None else choose(parameter)
            if parameter is not None and other is not None:
                replaced.append((owner._parameters, name, parameter, other))
    for parameters, name, _, other in replaced:
        parameters[name] = other
    try:
        yield
    finally:
        for parameters, name, parameter, _ in replaced:
            parameters[name] = parameter
