"""Check the losses of a window's micro-batches, and weight each one for gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.data.loader import NO_ITEMS, Batch, Divisor
from trainer.data.transfer import map_tensors
from trainer.distributed.devices import has_streams
from trainer.errors import ConfigError
from trainer.model.reachable import nodes_behind
from trainer.module import TrainModule
from trainer.strategy import Strategy

NO_DIVISOR: Sequence[Divisor] = (None,)
"""The divisor of a window of one micro-batch whose loss goes into backward as it is."""


def checked_loss(
    outputs: Any, module: TrainModule, detect_anomaly: bool, where: str = "training_step returned"
) -> torch.Tensor:
    """Return the loss in the outputs of `training_step`, or in the argument of `manual_backward`.

    Raises:
        ConfigError: there is no loss, or no gradient for it; with `detect_anomaly`, the loss is not finite.
    """
    # The tensor first: to ask an abstract class about it takes a third of a microsecond in each step.
    is_dict = not isinstance(outputs, torch.Tensor) and isinstance(outputs, Mapping)
    loss = outputs.get("loss", outputs) if is_dict else outputs
    usable = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
    if not usable or (detect_anomaly and not torch.isfinite(loss).all()):
        raise ConfigError(f"{type(module).__name__}.{where} {_loss_problem(loss)}")
    checked: torch.Tensor = loss
    return checked


def divided(loss: torch.Tensor, divisor: Divisor) -> torch.Tensor:
    """Return a loss for backward, divided by its part in the window's mean."""
    if divisor is None:
        return loss
    return without_items(loss) if divisor is NO_ITEMS else loss / divisor


def without_items(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss, for backward, of a batch without items: zero, and so are its gradients.

    The mean over nothing may be 0 / 0, and so would be its gradients, whatever its factor; then each operation
    of that batch passes zeros on. The backward itself is not left out: processes may meet in it, and with experts on
    several of them the gradients of other batches pass through this one's operations.
    """
    if math.isfinite(loss.item()):
        return loss * 0
    nothing = loss.nan_to_num(0.0, 0.0, 0.0) * 0
    for node in nodes_behind([nothing.grad_fn]):
        if node.next_functions:
            node.register_hook(_zeros)
    return nothing


def _zeros(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


def outputs_for_hooks(outputs: Any) -> Any:
    """Return the outputs of `training_step` as `on_train_batch_end` gets them: a dict of detached tensors.

    As Lightning's: a loss is under `"loss"`, and the dict is empty for a skipped batch. Other objects stay as they are.
    """
    if isinstance(outputs, torch.Tensor):
        return {"loss": outputs.data}
    if isinstance(outputs, Mapping):
        return {name: map_tensors(value, torch.Tensor.detach) for name, value in outputs.items()}
    if outputs is None:
        return {}
    return outputs


def _loss_problem(loss: Any) -> str:
    """Return the problem of a value that is not a finite loss with a gradient."""
    given = f"a {type(loss).__name__}"
    if isinstance(loss, torch.Tensor):
        is_finite = bool(torch.isfinite(loss).all())
        given += f" of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}, finite={is_finite}"
    return (
        f"{given}; what is needed is the loss, as a tensor or as the entry 'loss' of a dict: one finite element with a "
        "gradient. Reduce it (loss.mean()), and compute it from the module's outputs without .item(), float(), "
        ".detach() and torch.no_grad. If it is not finite, a lower lr or gradient_clip_val often helps. To optimize by "
        "hand, set automatic_optimization = False."
    )


def even_window(window: list[Batch], strategy: Strategy) -> list[Batch]:
    """Return as many batches as every reader has, with their samples over all readers if these are known; else with
    their number over all readers, without padding.

    For loaders that only know their own reader's batches. Collective.
    """
    own = [batch.samples for batch in window]
    everywhere = strategy.processes.gather_reports(own) if strategy.processes.readers > 1 else [own]
    of_each = list(zip(*everywhere, strict=False))
    if any(None in samples for samples in of_each):
        window = [batch if batch.is_padding else batch._replace(samples=None) for batch in window]
        of_each = [tuple(int(samples != 0) for samples in one) for one in of_each]
    return [batch._replace(total=sum(samples)) for batch, samples in zip(window, of_each, strict=False)]


def loss_divisors(
    window: list[Batch], module: TrainModule, strategy: Strategy, weights_loss_by_items: bool
) -> Sequence[Divisor]:
    """Return, for each micro-batch of a window, the divisor of its loss, which is a mean over its own items; None: 1.

    The quotients, summed over the window and averaged over readers by the strategy, give the mean over all items: the
    loss of one big batch. Items are those of `module.num_items` with `weights_loss_by_items`, else samples if their
    number is known, else micro-batches.
    """
    average = strategy.processes.readers
    if weights_loss_by_items:
        return _by_items([_items(batch, module) for batch in window], strategy)
    if len(window) == 1 and average == 1:
        return (None,)
    if any(batch.total is None for batch in window):
        return [None if len(window) == 1 else len(window)] * len(window)
    total = sum(batch.total or 0 for batch in window)
    return [_divisor(total, batch.share, average) for batch in window]


def _items(batch: Batch, module: TrainModule) -> int | torch.Tensor | None:
    """Return the number of items of a micro-batch, by default its samples; 0 for padding."""
    items = module.num_items(batch.data)
    if items is None:
        return batch.samples
    # Times 0, not 0: a number on the device stays on the device, as on the other processes.
    return items * 0 if batch.is_padding else items


def _by_items(items: list[int | torch.Tensor | None], strategy: Strategy) -> list[Divisor]:
    """Return the divisors from this reader's item counts, summed over readers without reading the device."""
    average, device = strategy.processes.readers, strategy.device
    counted_there = any(isinstance(item, torch.Tensor) and item.device.type != "cpu" for item in items)
    # A sum over the hosts would have them wait for each other in every step.
    if counted_there or (average > 1 and has_streams(device.type)):
        counts = [_on_device(item, strategy) for item in items]
        everywhere = strategy.processes.sum_over_readers(torch.stack(counts).sum())
        # No items anywhere: infinite divisors, not 0 / 0.
        everywhere = everywhere.clamp(min=torch.finfo(everywhere.dtype).tiny)
        return [
            NO_ITEMS if _is_known_zero(item) else everywhere / (count * average)
            for item, count in zip(items, counts, strict=True)
        ]
    # In float64, which counts whole numbers as exactly, since items may be weights.
    numbers = [float(item or 0) for item in items]
    total = float(strategy.processes.sum_over_readers(torch.tensor(sum(numbers), dtype=torch.float64)))
    return [_divisor(total, number, average) for number in numbers]


def _is_known_zero(item: int | torch.Tensor | None) -> bool:
    """Whether there are no items, as far as can be said without reading a device."""
    return not item if not isinstance(item, torch.Tensor) or item.device.type == "cpu" else False


def _on_device(item: int | torch.Tensor | None, strategy: Strategy) -> torch.Tensor:
    """Return a number of items as a tensor on the device. A Python number gets there without a synchronizing copy."""
    dtype = torch.float64 if strategy.precision.weights is torch.float64 else torch.float32
    if isinstance(item, torch.Tensor) and item.device.type != "cpu":
        return item.to(strategy.device, dtype)
    return torch.full((), float(item or 0), dtype=dtype, device=strategy.device)


def _divisor(total: float, own: float, average: int) -> float | None:
    if own == 0:
        return NO_ITEMS
    divisor = total / (own * average)
    return None if divisor == 1 else divisor
