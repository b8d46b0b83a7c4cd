"""Compute a block in two ways, in full and as a layout divides it, and compare the results."""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.data.transfer import map_leaves, map_tensors
from trainer.errors import ConfigError
from trainer.float8.conversion import layers_in_8_bits
from trainer.model.blocks import class_of, without_caches
from trainer.model.gradients import takes_gradient
from trainer.model.reachable import Held, global_containers, objects_behind, places, tensors_in
from trainer.seed import isolated_rng, rng_state
from trainer.strategies.parallel.one_reader import as_real, digest, is_dtensor, local_part
from trainer.strategies.swapped_parameters import gathering_hooks, without_hooks
from trainer.strategy import eval_mode

log = logging.getLogger("trainer")

OUTPUT = "its output"
GRADIENT = "the gradient of "
IN_ARGUMENT = "the gradient in argument "
LEFT = "what it leaves in "
_LOW = (torch.bfloat16, torch.float16)
_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the named arguments of a block."""
Results = dict[str, torch.Tensor]
"""Results of a block by words for them; see `results_of`."""


class Verification:
    """Decides which calls of the blocks of a model are verified: the first of each kind.

    Calls are of one kind if they agree in the mode of the block and in the flags, texts and types among its arguments.

    Args:
        enabled: False: no call is verified.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._verified = enabled, set[tuple[Any, ...]]()

    def is_due(
        self, option: str, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether a call is the first of its kind under an option that divides the model.

        Raises:
            ConfigError: torch.utils.checkpoint makes the call. Its backward would repeat the call without the context
                of the forward.
        """
        plain = (one if isinstance(one, (bool, str)) else type(one) for one in (*args, *kwargs.values()))
        kind = option, name, block.training, *plain
        if not self._enabled or torch.compiler.is_compiling() or kind in self._verified:
            return False
        self._verified.add(kind)
        if any(frame.f_code is _CHECKPOINT for frame, _ in traceback.walk_stack(None)):
            raise ConfigError(
                f"{option}: {name} ({class_of(block).__name__}) is called by torch.utils.checkpoint, whose "
                'backward would call it out of turn. Call the block, and give Trainer(activation_checkpointing="auto").'
            )
        return True

    def restart(self) -> None:
        """Verify all blocks again in their next calls."""
        self._verified.clear()


def compare(
    name: str,
    block: nn.Module,
    inputs: Inputs,
    run_full: Callable[[Inputs], Results],
    run_under_layout: Callable[[Inputs], Results],
    group: dist.ProcessGroup | None = None,
) -> str:
    """Compute a block in two ways, and describe a difference that is larger than rounding; "" if there is none.

    Both ways compute in float32 whatever the precision of the run, without dropout; in the run's dtypes only if the
    block has kernels for 16 bits alone. Two results are equal if each value agrees in half of the digits of that dtype,
    measured by its own size and by the typical size of the result. Values that are not finite in full are skipped.

    Args:
        name: of the block, for a warning.
        inputs: the arguments of the block, which both ways get.
        run_full: the way that is right.
        run_under_layout: the way of this run.
        group: processes that all compare, and all return words if one of them finds a difference. Collective.
    """
    inputs = without_caches(inputs[0]), without_caches(inputs[1])
    try:
        expected, in_float32, evaluates = _in_full(block, inputs, run_full)
    except _FailedError as error:
        # The forward itself raises it, too, or the block works with parts of the features only.
        log.warning(
            "%s cannot be computed in full (%s), so nothing verifies that it computes the same in parts. Write "
            "view(..., -1, head_size) in place of a process's number of heads, or compare the first losses with losses "
            "of one process",
            name,
            str(error).partition("\n")[0],
        )
        return ""
    share = torch.zeros((), dtype=torch.float32, device=tensors_in(inputs)[0].device)
    try:
        found, _ = _run(block, inputs, run_under_layout, in_float32, evaluates)
    except _FailedError as error:
        words, share = f"it fails with: {error}", share + math.inf
    else:
        eps = torch.finfo(torch.float32 if in_float32 else torch.bfloat16).eps
        differences = {key: difference_of(found.get(key), *one, eps) for key, one in _with_sizes(expected, eps).items()}
        worst = max(differences, key=lambda key: float(differences[key]))
        share = differences[worst]
        words = f"{worst} is wrong by {float(share):.1%}, more than by rounding"
    if group is not None:  # a part may be right on one process and wrong on another one
        dist.all_reduce(share, op=dist.ReduceOp.MAX, group=group)
    return words if share else ""


def _with_sizes(results: Results, eps: float) -> dict[str, tuple[torch.Tensor, float]]:
    """Return each result with the typical size of its values, to measure rounding errors.

    A weight's gradient that should be 0, such as of a bias of keys, consists of rounding errors, so a fraction of the
    typical size of the largest gradient is added.
    """
    sizes = {key: float(one.nan_to_num(0, 0, 0).abs().mean()) for key, one in results.items()}
    largest = max((size for key, size in sizes.items() if key.startswith(GRADIENT)), default=0.0)
    more = {key: eps**0.25 * largest if key.startswith(GRADIENT) else 0.0 for key in sizes}
    return {key: (one, sizes[key] + more[key]) for key, one in results.items()}


def difference_of(found: torch.Tensor | None, expected: torch.Tensor, size: float, eps: float) -> torch.Tensor:
    """Return the norm of a difference relative to the norm of `expected`; 0 if all values are equal but for rounding.

    A result that is missing, or of another shape, differs infinitely.

    Args:
        size: the typical size of the values.
        eps: the `eps` of the dtype that computed them.
    """
    if found is None or found.shape != expected.shape:
        return torch.full((), torch.inf, device=expected.device)
    known = torch.isfinite(expected)
    difference = torch.where(known, found - expected, 0)
    expected = torch.where(known, expected, 0)
    equal = difference.abs() <= math.sqrt(eps) * (expected.abs() + size)
    share = (difference.norm() / expected.norm()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    return torch.where(equal.all(), torch.zeros_like(share), share)


def results_of(
    block: nn.Module,
    inputs: Inputs,
    forward: Callable[..., Any],
    parameters: Mapping[str, nn.Parameter],
    of_arguments: bool = True,
) -> Results:
    """Call a block twice; return its outputs, the buffers and tensors with a gradient that it leaves, and gradients.

    The second call reads what the first one keeps. The gradients are of a weighted sum of the outputs.

    Args:
        block: in a rehearsal, so that nothing of this stays.
        forward: of the block.
        parameters: parameters by name whose gradients are wanted.
        of_arguments: return the gradients of arguments, too.
    """
    leaf_inputs, of_inputs = _with_leaves(inputs, of_arguments)
    leaves = {**{f"{GRADIENT}{name}": p for name, p in parameters.items()}, **of_inputs}
    known: list[Any] = []

    def as_copy(one: Any) -> Any:
        known.append(one.clone() if isinstance(one, torch.Tensor) else one)  # which can be changed in place
        return known[-1]

    found: Results = {}
    calls, total = list[Inputs](), torch.zeros((), device="cpu")
    for call in ("", " in a second call"):
        args, kwargs = map_leaves(leaf_inputs, as_copy)
        calls.append((args, kwargs))
        outputs = tensors_in(forward(*args, **kwargs))
        known += outputs
        found |= {f"{OUTPUT}{f' {place}' if place > 1 else ''}{call}": one for place, one in enumerate(outputs, 1)}
        first = as_real(local_part(outputs[0]))
        weights = torch.cos(torch.arange(first.shape[-1:].numel(), device=first.device))
        total = total.to(first.device) + (first * weights).sum()
    found |= {f"{LEFT}{words}": one for words, one in tensors_left(block, calls, known).items()}
    found |= {f"the buffer {name}": buffer for name, buffer in block.named_buffers()}
    if leaves and total.requires_grad:
        gradients = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
        full = (one.full_tensor() if is_dtensor(one) else one for one in gradients)
        found |= dict(zip(leaves, full, strict=True))
    numbers = {key: as_real(local_part(one)).detach() for key, one in found.items() if one.device.type != "meta"}
    return {key: one.float() for key, one in numbers.items() if one.is_floating_point()}


def _with_leaves(inputs: Inputs, with_gradients: bool) -> tuple[Inputs, Results]:
    """Return copies of the arguments of a block, and the first one and the ones that require gradients as leaves."""
    number, leaves = 0, dict[str, torch.Tensor]()

    def as_leaf(one: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        leaf = one.detach().clone()
        if with_gradients and (one.requires_grad or (number == 1 and leaf.is_floating_point())):
            leaves[f"{IN_ARGUMENT}{number}"] = leaf.requires_grad_()
        return leaf

    return map_tensors(inputs, as_leaf), leaves


def tensors_left(block: nn.Module, inputs: Any, known: list[Any]) -> Results:
    """Return the tensors with a gradient that others can find in a block, its hooks or its arguments, by words.

    Args:
        known: other tensors, such as the block's outputs.
    """
    seen = set(map(id, known))
    found: Results = {}
    for place, value in (*places("", block), *global_containers(block), ("lists and objects that it gets", inputs)):
        behind = [one for one in objects_behind(value, seen) if isinstance(one, torch.Tensor)]
        left = [one for one in behind if one.grad_fn is not None]
        words = place.lstrip(".")
        found |= {f"{words} ({number})" if number > 1 else words: one for number, one in enumerate(left, 1)}
    return found


# -- a forward without consequences ------------------------------------------------------------------------------------


def _in_full(block: nn.Module, inputs: Inputs, run: Callable[[Inputs], Results]) -> tuple[Results, bool, bool]:
    """Return the results, whether they were computed in float32, and whether in evaluation.

    The block keeps its mode, unless it draws random numbers in training, which differ between a part and a full tensor.

    Raises:
        _FailedError: the block raises an error in every attempt.
    """
    for in_float32, evaluates in (True, False), (True, True), (False, True):
        try:
            found, draws = _run(block, inputs, run, in_float32, evaluates)
        except _FailedError:
            if not in_float32:
                raise
        else:
            if evaluates or not draws:
                break
    return found, in_float32, evaluates


class _FailedError(Exception):
    """A block cannot be computed in one of the ways."""


def _run(
    block: nn.Module, inputs: Inputs, run: Callable[[Inputs], Results], in_float32: bool, evaluates: bool
) -> tuple[Results, bool]:
    """Return the results, and whether random numbers were drawn."""
    with rehearsal(block, inputs, in_float32, evaluates) as random_state:
        before = random_state()
        try:
            found = run(map_leaves(inputs, _in_float32) if in_float32 else inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, (ConfigError, torch.OutOfMemoryError)):
                raise
            raise _FailedError(error) from error
        return found, random_state() != before


@contextmanager
def rehearsal(
    block: nn.Module, inputs: Inputs, in_float32: bool = True, evaluates: bool = False
) -> Iterator[Callable[[], int]]:
    """Run a block with gradients; its mode, buffers, random numbers, and what it may write to are put back on exit.

    Every weight has another value: a branch that begins with zeros would hide what it computes, and a table that begins
    with equal rows which of them it takes.

    Args:
        inputs: the arguments of the block, including objects that it writes to.
        in_float32: compute in float32 what the run computes in fewer bits.
        evaluates: all of the block is in eval mode, not only torch's layers, such as dropout.

    Returns:
        A function for a number that changes when random numbers are drawn.
    """
    device = tensors_in(inputs)[0].device
    with ExitStack() as stack:
        modes = {child: child.training for child in block.modules()}
        stack.enter_context(eval_mode(block))
        for child, training in modes.items():
            child.training = training and not evaluates and not class_of(child).__module__.startswith("torch.")
        held = Held(block, inputs, math.inf)  # after the change of modes, which it keeps
        for context in (torch.enable_grad(), isolated_rng(device), held.put_back(), _gathered(block)):
            stack.enter_context(context)
        if in_float32:
            stack.enter_context(_computing_in_float32(block, device))
        others = {id(p): _other_weight(p, in_float32) for p in block.parameters()}
        stack.enter_context(replaced_parameters(block, lambda parameter: others[id(parameter)]))
        yield lambda: digest([rng_state(device), [one.get_state() for one in held.generators]])


@contextmanager
def _gathered(block: nn.Module) -> Iterator[None]:
    """Gather the weights of FSDP2's units within a block, such as experts, and keep them. Collective."""
    from torch.distributed.fsdp import FSDPModule

    units = [unit for unit in block.modules() if unit is not block and isinstance(unit, FSDPModule)]
    for unit in units:
        unit.unshard()
    try:
        with without_hooks(gathering_hooks(units)):
            yield
    finally:
        for unit in units:
            unit.reshard()


@contextmanager
def _computing_in_float32(block: nn.Module, device: torch.device) -> Iterator[None]:
    for child in block.modules():
        child._buffers.update({name: _in_float32(buffer) for name, buffer in child._buffers.items()})
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
    """Has a block cast to float32 where it casts to 16 bits, also within its own autocast."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") in _LOW:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)


def _in_float32(one: Any) -> Any:
    return one.float() if isinstance(one, torch.Tensor) and one.dtype in _LOW else one


def _other_weight(parameter: nn.Parameter, in_float32: bool) -> nn.Parameter:
    """Return a parameter with other values: plain ones with another change of each value, split ones with the same."""
    value = parameter.detach()
    if not takes_gradient(value):
        return parameter
    value = (_in_float32(value) if in_float32 else value) + 0.02
    if not is_dtensor(value):
        waves = torch.arange(value.numel(), device=value.device).sin().view(value.shape)
        value = value + 0.01 * waves.to(value.dtype)
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def replaced_parameters(
    block: nn.Module, choose: Callable[[nn.Parameter], nn.Parameter]
) -> AbstractContextManager[None]:
    """Give a block the parameters that `choose` returns for its own, for a while."""
    tables = [owner._parameters for owner in block.modules()]
    return filled([(table, {name: None if p is None else choose(p) for name, p in table.items()}) for table in tables])


@contextmanager
def filled(contents: Sequence[tuple[dict[Any, Any], Mapping[Any, Any]]]) -> Iterator[None]:
    """Give dicts other contents, for a while."""
    before = [(table, dict(table)) for table, _ in contents]
    _fill(contents)
    try:
        yield
    finally:
        _fill(before)


def _fill(contents: Sequence[tuple[dict[Any, Any], Mapping[Any, Any]]]) -> None:
    for table, wanted in contents:
        table.clear()
        table.update(wanted)
