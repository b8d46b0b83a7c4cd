"""Refuse `loss.backward()` in `training_step` where the trainer's own backward scales the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.optimizers import parameters_of
from trainer.strategy import UNSCALED_BACKWARD, marks_of_gradients


def refusing_direct_backward(call_step: Callable[..., Any], optimizers: list[Optimizer]) -> Callable[..., Any]:
    """Return a strategy's `call_step`, with gradients that nothing in `training_step` may change.

    Gradients of an unscaled loss would be added to scaled ones, and divided by the scale with them.
    """
    parameters = parameters_of(optimizers)

    def call(step: str, *args: Any) -> Any:
        before = marks_of_gradients(parameters)
        outputs = call_step(step, *args)
        if marks_of_gradients(parameters) != before:
            raise ConfigError(UNSCALED_BACKWARD)
        return outputs

    return call
