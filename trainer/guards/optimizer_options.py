"""Compare the optimizers' options on all processes while training, whenever logged values are gathered."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainer.runs.compare_ranks import compare
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.loop.progress import Progress

_FADING = 0.999
"""Decay per step of a sum of learning rates, so that their order counts; a difference is found before it fades."""


class OptionsCheck:
    """Finds learning rates and other options of the optimizers that differ between processes, so that replicas diverge.

    A schedule may depend on anything, so what it gives is compared, not what it is made of. A digest goes with the
    logged values: no process sends a message more.
    """

    def __init__(self, strategy: Strategy, progress: Progress) -> None:
        self._strategy, self._progress = strategy, progress
        # A lambda, since a message carries the name of the function that sends it: here of the caller.
        self.gather: Callable[[Any], list[Any]] = lambda value: self._checked(
            strategy.processes.all_gather_object((self._digest(), value))
        )
        """Gathers a value of each process that reports, as `gather_reports`, and compares the options on all."""
        self._optimizers: list[Optimizer] = []
        self._rates = 0.0
        """The learning rates of all steps, added up with decreasing weights."""

    def begin(self, optimizers: list[Optimizer]) -> None:
        """Watch these optimizers, on several processes."""
        self._optimizers = optimizers

    def add_step(self) -> None:
        """Remember the learning rates of a step."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if type(rate := group.get("lr")) is float:
                    self._rates = self._rates * _FADING + rate

    def _digest(self) -> str:
        """Return a short text that is the same on all processes if the options are, now and in all steps so far."""
        return hashlib.sha256(repr(list(self._facts())).encode()).hexdigest()[:16] if self._optimizers else ""

    def _checked(self, gathered: list[tuple[str, Any]]) -> list[Any]:
        """Return the values of those that report; raise ConfigError on all processes if the digests differ."""
        processes = self._strategy.processes
        if len({digest for digest, _ in gathered}) > 1:
            fix = (
                f"By step {self._progress.step} the optimizers' options differ, and with them the weights: have every "
                "process set the same ones in the same step. A schedule may not depend on the rank, nor on values that "
                "are not reduced."
            )
            compare(processes, self._facts(), fix)
        return [gathered[rank][1] for rank in processes.reporters]

    def _facts(self) -> Iterator[tuple[str, object]]:
        for number, optimizer in enumerate(self._optimizers):
            for position, group in enumerate(optimizer.param_groups):
                owner = f"{type(optimizer).__name__} number {number + 1}, group {position}"
                for option, value in group.items():
                    if _is_plain(value):
                        yield f"{owner}, {option}", value
                    elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
                        yield f"{owner}, {option}", value.item()
        yield "sum of the learning rates so far, by their order", self._rates


def _is_plain(value: Any) -> bool:
    """Whether a value is a number or several: not the parameters, nor a tensor, which may be on a device."""
    return isinstance(value, (bool, int, float)) or (isinstance(value, tuple) and all(map(_is_plain, value)))
