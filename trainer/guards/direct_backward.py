"""Refuse `loss.backward()` in `training_step` where the trainer's own backward scales the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.optimizers import parameters_of
from trainer.strategy import UNSCALED_BACKWARD, marks_of_gradients


class RefusingDirectBackward:
    """A strategy's `call_step`, with gradients that nothing in `training_step` may change.

    Gradients of an unscaled loss would be added to scaled ones, and divided by the scale with them.
    """

    def __init__(self, call_step: Callable[..., Any], optimizers: list[Optimizer]) -> None:
        self._call_step = call_step
        self._parameters = parameters_of(optimizers)

    def __call__(self, step: str, *args: Any) -> Any:
        if step != "training_step":
            return self._call_step(step, *args)
        before = marks_of_gradients(self._parameters)
        outputs = self._call_step(step, *args)
        if marks_of_gradients(self._parameters) != before:
            raise ConfigError(UNSCALED_BACKWARD)
        return outputs
