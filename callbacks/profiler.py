"""SimpleProfiler: where the time of a training run went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from trainer.callbacks.base import Callback

if TYPE_CHECKING:
    import torch

    from trainer.module import TrainModule
    from trainer.trainer import Trainer

DATA = "data (wait, transfer)"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer step"
BY_HAND = "training_step (manual)"
VALIDATION = "validation"
OTHER = "other (callbacks, logs)"


class SimpleProfiler(Callback):
    """Prints, at the end of training, the host's time in each part of the loop on rank 0.

    Each moment of the run ends one part, so the parts add up to the whole. A device works behind the host's back: a
    part's time is how long the host was busy with it or waited in it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by part."""
        self.calls: dict[str, int] = {}
        """How many times each part was entered."""
        self._last = 0.0
        self._updates = False
        self._by_hand = True

    def table(self) -> str:
        """The result so far, largest part first."""
        whole = sum(self.seconds.values()) or 1.0
        lines = [f"{'part of training':<24}{'calls':>10}{'total s':>12}{'mean ms':>12}{'share':>8}"]
        for part, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            calls = self.calls[part]
            mean = 1000 * seconds / calls
            lines.append(f"{part:<24}{calls:>10,}{seconds:>12.3f}{mean:>12.3f}{seconds / whole:>8.1%}")
        lines.append(f"{'total':<24}{'':>10}{sum(self.seconds.values()):>12.3f}")
        return "\n".join(lines)

    def _ends(self, part: str) -> None:
        """The time since the last moment belongs to `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self.calls[part] = self.calls.get(part, 0) + 1
        self._last = now

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.seconds.clear()
        self.calls.clear()
        self._by_hand = not module.automatic_optimization
        self._last = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._ends(OTHER)

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self._ends(DATA)

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        if not self._by_hand:
            self._ends(FORWARD)

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        if not self._by_hand:
            self._ends(BACKWARD)

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: torch.optim.Optimizer) -> None:
        self._updates = True

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._ends(BY_HAND if self._by_hand else OPTIMIZER if self._updates else OTHER)
        self._updates = False

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._ends(OTHER)

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.stage == "fit" and not trainer.sanity_checking:
            self._ends(OTHER)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.stage == "fit" and not trainer.sanity_checking:
            self._ends(VALIDATION)

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._ends(OTHER)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._ends(OTHER)

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero:
            trainer.print(self.table())
