"""Step: the calls of each training step, bound when training begins, and the weights of its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch
from torch.optim import Optimizer

from trainer.data.datamodule import DataModule
from trainer.data.loader import NO_ITEMS, Batch, Divisor
from trainer.data.transfer import map_tensors
from trainer.distributed.devices import has_streams
from trainer.errors import ConfigError
from trainer.guards.direct_backward import refusing_direct_backward
from trainer.guards.guards import Guards
from trainer.guards.host_times import HostTimes
from trainer.loop.callback_list import CallbackList, nothing
from trainer.loop.progress import Progress
from trainer.metrics.metric_log import MetricLog
from trainer.metrics.phases import BACKWARD, FORWARD, OPTIMIZER, TRANSFER, Phase, during
from trainer.model.reachable import nodes_behind
from trainer.module import TrainModule
from trainer.optimizers import zero_grad_fast
from trainer.settings import Settings
from trainer.strategy import Strategy, inherits

NO_DIVISOR: Sequence[Divisor] = (None,)
"""The divisor of a window of one micro-batch whose loss goes into backward unchanged."""


class Training(Protocol):
    """The part of a run that a step needs."""

    module: TrainModule
    strategy: Strategy
    hooks: CallbackList
    optimizers: list[Optimizer]
    metrics: MetricLog
    guards: Guards
    progress: Progress
    closure_needed: bool

    @property
    def settings(self) -> Settings: ...

    def phase(self, name: str) -> Any: ...

    transfer: Transfer


STEP_OVERRIDES = ("optimizer_step", "optimizer_zero_grad")
"""The module's methods that are called in place of the trainer's own, with automatic optimization."""

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Transfer:
    """Brings batches to the device, through the transfer hooks if the module or the data module defines any.

    Each hook is the data module's if that defines it, else the module's, as in Lightning.

    Args:
        module, datamodule, strategy, phase, times: of the run.
    """

    def __init__(
        self, module: TrainModule, datamodule: DataModule | None, strategy: Strategy, phase: Phase, times: HostTimes
    ) -> None:
        self._strategy, self._phase, self._times = strategy, phase, times
        overridden = [] if datamodule is None else [name for name in TRANSFER_HOOKS if datamodule.overrides(name)]
        self._hooks: list[Callable[..., Any]] = []
        """The three hooks, or none if all of them are the base classes'."""
        if overridden or module.overrides_any(TRANSFER_HOOKS):
            self._hooks = [getattr(datamodule if name in overridden else module, name) for name in TRANSFER_HOOKS]

    def __call__(self, dataloader_idx: int = 0) -> Callable[[Any], Any]:
        """Return the function that brings a loader's batches to the device."""
        if not self._hooks:
            return during(self._phase, TRANSFER, self._strategy.to_device)
        before, move, after = self._hooks

        def call_hooks(batch: Any) -> Any:
            batch = _require_batch(before(batch, dataloader_idx), "on_before_batch_transfer")
            batch = _require_batch(move(batch, self._strategy.device, dataloader_idx), "transfer_batch_to_device")
            return _require_batch(after(batch, dataloader_idx), "on_after_batch_transfer")

        # Only users' hooks are timed: a copy by the strategy costs the host no time that it could save.
        return during(self._phase, TRANSFER, self._times.timed(TRANSFER, call_hooks))


def _require_batch(batch: Any, hook: str) -> Any:
    """Return the batch that a transfer hook returned; raise ConfigError if that is None."""
    if batch is None:
        raise ConfigError(f"{hook} returned None: end it with 'return batch'.")
    return batch


class SteppedOptimizer:
    """The optimizer that an override of `optimizer_step` gets; its other attributes are torch's.

    `step` clips and steps through the strategy, and returns the closure's result: the loss, computed already.
    """

    def __init__(self, optimizer: Optimizer, prepare: Callable[[Optimizer], None], step: Callable[..., None]) -> None:
        self.optimizer = optimizer
        self._prepare, self._step = prepare, step
        self.stepped = False

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this optimizer's parameters. `options`: further arguments of the torch optimizer's `step`."""
        loss = None if closure is None else closure()
        self.stepped = True
        self._prepare(self.optimizer)
        self._step(self.optimizer, **options)
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class Step:
    """The calls of a step: of the strategy, of hooks, and of the module's overrides."""

    outputs: Any = None
    """The outputs of the last micro-batch, for `on_train_batch_end`."""
    data: Any = None
    """That micro-batch, on the device."""
    window: Sequence[Batch] = ()
    """The micro-batches of the step in progress, or of the last one that ended within its window."""
    position = 0
    """The number of the micro-batch in progress, in its window."""

    def __init__(self, run: Training) -> None:
        module, strategy, hooks = run.module, run.strategy, run.hooks
        automatic = module.automatic_optimization
        self._run, self._module, self._strategy, self._metrics = run, module, strategy, run.metrics
        self.losses: list[torch.Tensor] = []
        """The losses of the micro-batches as passed to backward, if an optimizer or an override asks for their sum."""
        self.updates = automatic and not run.closure_needed
        """False if the update is part of the step's forward and backward: by the module itself, or in a closure."""
        self.weighs_items = module.overrides("num_items")
        """True if losses are weighted by the items that the module counts."""
        self.divides_loss = self.weighs_items or strategy.processes.readers > 1
        """False if the loss of a window of one micro-batch goes into backward unchanged."""
        self.syncs_gradients = not inherits(strategy, "gradient_sync")
        """False if the strategy needs no context for gradients that are incomplete within a window."""

        self.transfer = run.transfer()
        unscaled = automatic and strategy.precision.loss_scaling
        call_step = refusing_direct_backward(strategy.call_step, run.optimizers) if unscaled else strategy.call_step
        self.forward: Callable[..., Any] = during(run.phase, FORWARD, call_step)
        self.backward: Callable[[torch.Tensor], None] = during(run.phase, BACKWARD, strategy.backward)
        self.backward_with_hooks = _with_hooks(hooks, self.backward)
        self.after_backward = [] if inherits(strategy, "end_window") else [strategy.end_window]
        self._cleared = run.optimizers if automatic else []
        self.zero_grad: Callable[[Optimizer], None] = _in_turn(hooks.on_before_zero_grad, zero_grad_fast)

        clips = run.settings.gradient_clip_val is not None or module.overrides("configure_gradient_clipping")
        looks = [hooks.on_before_optimizer_step, self._clip if clips else nothing]
        unscales = looks != [nothing, nothing] or _unscales_before_steps(strategy, run.optimizers)
        self.prepare_update: Callable[[Optimizer], None] = _in_turn(strategy.unscale if unscales else nothing, *looks)
        self.update_alone: Callable[..., None] = during(run.phase, OPTIMIZER, strategy.step)
        self.update: Callable[[Optimizer], None] = _in_turn(self.prepare_update, self.update_alone)
        ends = strategy.scaler is not None or not inherits(strategy, "end_step")
        self.after_update = [strategy.end_step] if ends else []
        self._bind_overrides(run)

    def _bind_overrides(self, run: Training) -> None:
        """Have the module's overrides of `optimizer_step` and `optimizer_zero_grad` take the place of these calls."""
        overrides_step = self._cleared and self._module.overrides("optimizer_step")
        if overrides_step:
            self.update = self._call_optimizer_step
        if self._cleared and self._module.overrides("optimizer_zero_grad"):
            self.zero_grad = _in_turn(run.hooks.on_before_zero_grad, self._call_zero_grad)
        if overrides_step and self._strategy.scaler is not None:  # the scale may have changed since a step left out
            self.zero_grad = _in_turn(self.zero_grad, self._strategy.scale_gradients)
        if overrides_step or run.closure_needed:
            self.backward_with_hooks = partial(self._remembering, self.backward_with_hooks)

    def begin(self, window: list[Batch], repeated: bool = False) -> Sequence[Divisor]:
        """Begin a step without gradients; return the divisors of its losses.

        Args:
            repeated: a closure runs the same step again.
        """
        self.outputs = self.data = None
        self.window = window
        self.losses.clear()
        self._metrics.start_window(window[0].data, window[0].samples, repeated)
        if self._run.guards.buffers is not None:
            self._run.guards.buffers.follow(self._run.progress.step)
        for optimizer in self._cleared:
            self.zero_grad(optimizer)
        if len(window) == 1 and not self.divides_loss:
            return NO_DIVISOR
        return loss_divisors(window, self._module, self._strategy, self.weighs_items)

    def begin_batch(self, batch: Batch, position: int, repeated: bool = False) -> Any:
        """Return a micro-batch of a window on the device, and call its first hook, which may end the epoch.

        Args:
            position: in the window.
            repeated: as for `begin`.
        """
        run, skipping = self._run, self._run.guards.skipping
        self.position = position
        if position > 0:
            run.metrics.start_batch(batch.data, batch.samples)
        data = run.metrics.batch = self.transfer(batch.data)
        if not repeated:
            run.hooks.on_train_batch_start(data, run.progress.batch + position)
            if skipping.may_end_epochs and skipping.ends_epoch(position):
                return None
        if position == 0 and run.guards.trainable is not None:
            run.guards.trainable.follow(run.metrics.window)
        return data

    def _call_optimizer_step(self, optimizer: Optimizer) -> None:
        """Call the module's `optimizer_step`, which may step an optimizer or not."""
        progress, losses = self._run.progress, self.losses
        batch_idx = progress.batch + max(1, len(losses)) - 1
        given = SteppedOptimizer(optimizer, self.prepare_update, self.update_alone)
        self._module.optimizer_step(
            progress.epoch, batch_idx, given, lambda: torch.stack([*losses]).sum() if losses else None
        )
        if not given.stepped:
            self._strategy.unscale(optimizer)  # with loss scaling, whose `update` counts on it

    def _call_zero_grad(self, optimizer: Optimizer) -> None:
        """Call the module's `optimizer_zero_grad`, which may clear the gradients of an optimizer or not."""
        self._module.optimizer_zero_grad(self._run.progress.epoch, self._run.progress.batch, optimizer)

    def _clip(self, optimizer: Optimizer) -> None:
        settings = self._run.settings
        value, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
        self._module.configure_gradient_clipping(optimizer, value, algorithm)

    def _remembering(self, backward: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())
        backward(loss)


def _unscales_before_steps(strategy: Strategy, optimizers: list[Optimizer]) -> bool:
    """Whether gradients are unscaled before a step even if nothing looks at them in between."""
    if strategy.scaler is None:
        return not inherits(strategy, "unscale")
    # A fused optimizer unscales in its own kernel; not the shards of DTensors.
    return strategy.shards_state or not all(getattr(one, "_step_supports_amp_scaling", False) for one in optimizers)


def _in_turn(*calls: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes these calls, except for hooks that nothing overrides."""
    needed = [call for call in calls if call is not nothing]
    if len(needed) < 2:
        return needed[0] if needed else nothing

    def call_each(*args: Any) -> None:
        for call in needed:
            call(*args)

    return call_each


def _with_hooks(hooks: CallbackList, backward: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return the backward with the hooks before and after it."""
    before, after = hooks.on_before_backward, hooks.on_after_backward

    def call(loss: torch.Tensor) -> None:
        before(loss)
        backward(loss)
        after()

    has_hooks = before is not nothing or after is not nothing
    return call if has_hooks else backward


# -- losses -----------------------------------------------------------------------------------------------------------


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

    The mean over nothing may be 0 / 0, with gradients that no factor turns into zeros; then each operation of that
    batch passes zeros on. The backward is not left out: processes may meet in it, and with experts on several processes
    the gradients of other batches pass through this batch's operations.
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

    As Lightning's: a loss is under `"loss"`, and the dict is empty for a skipped batch. Other objects stay unchanged.
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
    loss of one big batch. With `weights_loss_by_items`, `module.num_items` counts the items; else they are samples if
    their number is known, or else micro-batches.
    """
    average = strategy.processes.readers
    if weights_loss_by_items:
        return _by_items([_items(batch, module) for batch in window], strategy)
    if any(batch.total is None for batch in window):
        return [_divisor(len(window), 1, 1)] * len(window)
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
    # A sum over the hosts would have them wait for each other in every step.
    if not any(map(_is_on_device, items)) and not (average > 1 and has_streams(device.type)):
        # In float64, which counts whole numbers as exactly, since items may be weights.
        numbers = [float(item or 0) for item in items]
        total = float(strategy.processes.sum_over_readers(torch.tensor(sum(numbers), dtype=torch.float64)))
        return [_divisor(total, number, average) for number in numbers]
    dtype = torch.float64 if strategy.precision.weights is torch.float64 else torch.float32
    # `full` brings a Python number to the device without a synchronizing copy.
    counts = [
        item.to(device, dtype) if _is_on_device(item) else torch.full((), float(item or 0), dtype=dtype, device=device)
        for item in items
    ]
    everywhere = strategy.processes.sum_over_readers(torch.stack(counts).sum())
    # No items anywhere: infinite divisors, not 0 / 0.
    everywhere = everywhere.clamp(min=torch.finfo(everywhere.dtype).tiny)
    return [
        everywhere / (count * average) if _is_on_device(item) or item else NO_ITEMS
        for item, count in zip(items, counts, strict=True)
    ]


def _is_on_device(item: int | torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return isinstance(item, torch.Tensor) and item.device.type != "cpu"


def _divisor(total: float, own: float, average: int) -> float | None:
    if own == 0:
        return NO_ITEMS
    divisor = total / (own * average)
    return None if divisor == 1 else divisor
