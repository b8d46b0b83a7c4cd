"""Detect losses, learning rates, loss scales, weights and states that are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainer.checkpoint.finite import floating_tensors, not_finite, number_of_nans
from trainer.errors import ConfigError, first_of
from trainer.metrics.metric_log import MetricLog
from trainer.model.weights import AbsentParameter
from trainer.module import TrainModule
from trainer.optimizers import parameters_of
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.loop.progress import Progress

log = logging.getLogger("trainer")

_SMALL_SCALE, _LEAST_SCALE = 1.0, 2.0**-64
"""Loss scales below which the run warns, and fails: after 17 and after 80 overflows in a row."""
_MOST_NAMES = 20
_LOSS = (
    "the loss of step {} is {} on rank {}; the run continues. Check the batch and the learning rate: a "
    "lower lr or gradient_clip_val often helps. Trainer(detect_anomaly=True) ends the run at such a step. (If all "
    "targets of a batch are ignored, the loss is a mean over nothing: define num_items in the module.)"
)


class NonFiniteMonitor:
    """Warns of numbers of a run that are not finite, once for each kind.

    Reads nothing from a device itself: losses and the loss scale come with the logged values, and names of tensors
    from `StateMonitor`, which checks a state when it is saved.
    """

    def __init__(self, module: TrainModule, strategy: Strategy, metrics: MetricLog, progress: Progress) -> None:
        self._module, self._strategy, self._metrics, self._progress = module, strategy, metrics, progress
        self._kinds: set[str] = set()
        """The kinds of numbers that a warning has named."""
        self._validated: set[str] = set()
        """The names of validations' values that a warning has named."""
        self._gradients_seen = False
        self._first_step = 0
        """The first step of the run."""
        self._state: StateMonitor | None = None
        self._averages: Callable[[], Mapping[str, Any]] = dict

    def begin_training(self, optimizers: list[Optimizer], schedulers: list[dict[str, Any]], saves: bool) -> None:
        """Check the weights before training. Call this once they are restored.

        Args:
            optimizers: the optimizers whose states were restored.
            schedulers: the states of the schedulers.
            saves: the training may write checkpoints.
        """
        self._first_step = self._progress.step
        if saves:
            self._state = StateMonitor(self._module, self._strategy, optimizers, schedulers)

    def check_values(self, optimizers: list[Optimizer], updated: bool) -> None:
        """Check losses, loss scale and learning rates, and once the gradients. Call this after values were read.

        Args:
            optimizers: of training; empty outside of it.
            updated: the last step has updated the weights.

        Raises:
            ConfigError: the loss scale has become so small that no step can update the weights.
        """
        step = self._progress.step
        loss, scale = self._metrics.take_nonfinite_loss(), self._metrics.loss_scale
        if loss is not None:
            self._report("loss", _LOSS.format(*loss, self._strategy.processes.rank))
        if scale is not None and scale < _SMALL_SCALE:
            self._report_scale(scale)
        for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
            rate = group.get("lr")
            if isinstance(rate, float) and not math.isfinite(rate):
                wrong = f"the learning rate is {rate} at step {step}, which makes the weights NaN: check the scheduler"
                self._report("learning rate", wrong)
        if optimizers and updated and step > self._first_step and not self._gradients_seen:
            self._gradients_seen = True
            self._check_gradients(optimizers)

    def check_validation(self, values: Mapping[str, float]) -> None:
        """Check the values of a validation within training, reduced over all processes; report each name once."""
        wrong = [name for name, value in values.items() if not math.isfinite(value) and name not in self._validated]
        self._validated.update(wrong)
        if wrong:
            words = "not finite in the validation after step %d: %s"
            self._strategy.processes.log.warning(words, self._progress.step, first_of(wrong))

    def look_at_averages(self, averages: Callable[[], Mapping[str, Any]]) -> None:
        """Check averages of the weights, which a function returns by name, with each state to be saved."""
        self._averages = averages

    def check_state(self, state: dict[str, Any], reported: bool) -> list[str]:
        """Return the names of tensors in a state to be saved that are not finite. Collective; see `StateMonitor`.

        Args:
            reported: the caller logs it.
        """
        if self._state is None:
            return []
        names = self._state.nonfinite({**state, "average": self._averages()})
        if names and not reported:
            words = "step %d: the saved state is not finite (%s)"
            self._strategy.processes.log.warning(words, self._progress.step, first_of(names))
        return names

    def _report(self, kind: str, message: str) -> None:
        """Log the first finding of a kind."""
        if kind not in self._kinds:
            self._kinds.add(kind)
            log.warning("%s", message)

    def _report_scale(self, scale: float) -> None:
        message = (
            f"the loss scale of {self._strategy.precision.name!r} has fallen to {scale:.3g} by step "
            f"{self._progress.step}: gradients overflow in every step, and such steps change no weight. Check the loss "
            "and the batch for infinities, or use precision='bf16-mixed' or '32-true'."
        )
        if scale < _LEAST_SCALE:
            raise ConfigError(message)
        self._report("loss scale", message)

    def _check_gradients(self, optimizers: list[Optimizer]) -> None:
        """Warn if no parameter of the optimizers has a gradient."""
        module = self._module
        trained = parameters_of(optimizers)
        inside = {id(parameter) for parameter in module.parameters()}
        # DeepSpeed's optimizers hold separate flat parameters, or none between two steps; a process may hold none.
        known = all(id(p) in inside for p in trained) and not all(isinstance(p, AbsentParameter) for p in trained)
        if not known or not module.automatic_optimization or any(p.grad is not None for p in trained):
            return
        log.warning(
            "after step %d no parameter of the optimizers has a gradient: the loss depends on none of them, so nothing "
            "is trained. Compute the loss from the module's outputs, outside of torch.no_grad().",
            self._progress.step,
        )


class StateMonitor:
    """Finds tensors of weights, optimizers and callbacks, and numbers of optimizers and schedulers, that are not
    finite, except those that were not finite when training began.

    A buffer that is registered while training, such as a mask of -inf made in the first forward, is excepted, too. In
    excepted tensors new NaNs are reported, but not new infinities, because masks may grow.

    Args:
        module, strategy: of the run.
        optimizers: the optimizers whose states come from a checkpoint.
        schedulers: the schedulers' states; a plateau's best value is infinite at the start.
    """

    def __init__(
        self,
        module: TrainModule,
        strategy: Strategy,
        optimizers: list[Optimizer],
        schedulers: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._module, self._strategy = module, strategy
        state: dict[str, Any] = {"model": strategy.module_state(), "schedulers": schedulers}
        self._known = {name for name, _ in self._own(state)}
        state["optimizers"] = [strategy.optimizer_state(optimizer) for optimizer in optimizers]
        tensors = dict(self._own(state))
        self._left_out = {name: number_of_nans(tensors[name]) for name in not_finite(iter(tensors.items()))}
        """The excepted tensors, with the number of their NaNs when they were first seen."""
        wrong = [name for name, _ in module.named_parameters() if f"model.{name}" in self._left_out]
        if wrong:
            log.warning("weights that are not finite at the start of training: %s", first_of(wrong))

    def nonfinite(self, state: dict[str, Any]) -> list[str]:
        """Return the names of the tensors that are not finite on some process, at most 20 per process. Collective.

        Args:
            state: with the entries "model", "optimizers", "schedulers", "callbacks" and "average".
        """
        tensors = dict(self._own(state))
        wrong = not_finite(iter(tensors.items()))
        buffers = {f"model.{name}" for name, _ in self._module.named_buffers()}
        left_out = self._left_out
        for name in [name for name in wrong if name not in self._known]:
            if name in buffers:
                left_out[name] = 0
            elif name.startswith("callbacks."):
                left_out[name] = number_of_nans(tensors[name])  # a callback may write nan for "no value yet"
            elif (weight := name.replace("average.", "model.", 1)) in left_out:
                left_out[name] = left_out[weight]
        self._known |= tensors.keys()
        own = [name for name in wrong if number_of_nans(tensors[name]) > left_out.get(name, -1)]
        names = self._strategy.processes.all_gather_object(own[:_MOST_NAMES])
        return list(dict.fromkeys(chain.from_iterable(names)))

    def _own(self, state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, by name, that this process writes into a checkpoint."""
        others = not self._strategy.processes.is_global_zero
        for key in ("model", "optimizers", "schedulers", "callbacks", "average"):
            # A NaN in an option of an optimizer, such as its learning rate, makes the weights NaN.
            numbers = key in ("optimizers", "schedulers")
            yield from floating_tensors(state.get(key), key, shards_only=others, numbers=numbers)
