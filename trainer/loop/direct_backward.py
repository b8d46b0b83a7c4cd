"""Refuse `loss.backward()` in `training_step` where the trainer's own backward scales the loss."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.strategy import UNSCALED_BACKWARD


class RefusingDirectBackward:
    """A strategy's `call_step`, with gradients that nothing in `training_step` may change.

    Gradients of an unscaled loss would be added to scaled ones, and divided by the scale with them.
    """

    def __init__(self, call_step: Callable[..., Any], optimizers: list[Optimizer]) -> None:
        self._call_step = call_step
        groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        self._parameters: list[torch.Tensor] = list(chain.from_iterable(group["params"] for group in groups))

    def __call__(self, step: str, *args: Any) -> Any:
        if step != "training_step":
            return self._call_step(step, *args)
        before = self._versions()
        outputs = self._call_step(step, *args)
        if self._versions() != before:
            raise ConfigError(UNSCALED_BACKWARD)
        return outputs

    def _versions(self) -> list[int | None]:
        """Return numbers that change with the gradients."""
        return [None if gradient is None else gradient._version for gradient in (p.grad for p in self._parameters)]
