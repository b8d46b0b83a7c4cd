"""Count XLA's compilations and warn, with the cause, of those after the first steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

log = logging.getLogger("trainer")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The tensors of a window's batches: where each one is, and its shape."""

MOST_WARNINGS = 10


class XlaRecompilationMonitor:
    """Read torch_xla's own counter after each step, and name the shapes that were new when it has grown.

    Args:
        warmup: as many steps of each kind (`"training_step"`, `"validation_step"`, ...) may compile unreported. The
            first two always do: the optimizer's state is created in the first.
    """

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.compiles = 0
        """All graphs compiled, since the start of the process."""
        self.recompiles = 0
        """Steps compiled again after the warm-up."""
        self.elsewhere = 0
        """Graphs compiled after the warm-up between the steps: where values are read."""
        self._steps: Counter[str] = Counter()
        self._window: list[Shapes] = []
        self._seen: dict[str, Counter[tuple[Shapes, ...]]] = {}
        self._warnings = 0

    def start(self) -> None:
        """Count what is compiled from here on."""
        self.compiles = compiles_so_far()
        self._window = []
        self._steps.clear()
        self._seen.clear()

    def batch(self, batch: Any) -> None:
        """Note the shapes of a batch of the next step."""
        self._window.append(tuple(shapes_of(batch)))

    def before(self) -> None:
        """Called before a recorded step is run: what was compiled since the last one was for reading values."""
        new = compiles_so_far() - self.compiles
        self.compiles += new
        if new and self._steps.total() > self.warmup:
            self.elsewhere += new
            if self.elsewhere >= MOST_WARNINGS:
                self._warn(
                    f"{self.elsewhere} graphs were compiled outside the steps so far. If the number keeps growing, a "
                    "value is read before a step has ended: .item(), float(), print or an `if` on a tensor. Log it "
                    "with self.log, which reads it later."
                )

    def after(self, kind: str) -> None:
        """Called after a step: warn if it was compiled again."""
        new, window = compiles_so_far() - self.compiles, tuple(self._window)
        self.compiles += new
        self._window = []
        self._steps[kind] += 1
        seen = self._seen.setdefault(kind, Counter())
        if new and self._steps[kind] > self.warmup:
            self.recompiles += 1
            self._warn(
                f"{kind} number {self._steps[kind]} was compiled again ({self.recompiles} after the first "
                f"{self.warmup} of a kind): {_difference(window, seen)}"
            )
        seen[window] += 1

    def _warn(self, text: str) -> None:
        self._warnings += 1
        if self._warnings <= MOST_WARNINGS:
            log.warning("%s", text)
        if self._warnings == MOST_WARNINGS:
            log.warning("that was the last warning of this kind; the strategy goes on counting in `compiles`")

    def in_words(self) -> str:
        """Return one line for the end of a run."""
        return (
            f"{self.compiles} graphs compiled in this process; after the warm-up {self.recompiles} steps were compiled "
            f"again, and {self.elsewhere} graphs elsewhere"
        )


def compiles_so_far() -> int:
    """Return how many graphs torch_xla has compiled in this process."""
    from torch_xla.debug import metrics

    return int(metrics.counter_value("UncachedCompile") or 0)


def shapes_of(batch: Any, where: str = "batch") -> list[tuple[str, tuple[int, ...]]]:
    """Return the places of the tensors in a nested batch, with their shapes."""
    if isinstance(batch, torch.Tensor):
        return [(where, tuple(batch.shape))]
    if isinstance(batch, Mapping):
        return [shape for key, value in batch.items() for shape in shapes_of(value, f"{where}[{key!r}]")]
    if isinstance(batch, (list, tuple)):
        return [shape for index, value in enumerate(batch) for shape in shapes_of(value, f"{where}[{index}]")]
    return []


def _difference(window: tuple[Shapes, ...], seen: Counter[tuple[Shapes, ...]]) -> str:
    """Return how the batches of this step differ from the usual ones, and what to do."""
    if not seen:
        return "it is the first one. Give XlaStrategy(compile_warmup_steps=...) more than that."
    usual = seen.most_common(1)[0][0]
    if window in seen:
        return (
            "the shapes of its batches are not new. Something else has changed: Python numbers or branches inside the "
            "step, a module in another mode, a value read in its middle, or a learning rate that has become exactly 0."
        )
    if len(window) != len(usual):
        return (
            f"it has {len(window)} micro-batches instead of {len(usual)}. Let an epoch's batches be a multiple of "
            "accumulate_grad_batches (limit_train_batches)."
        )
    changes = [
        f"{place} is {new} instead of {old}"
        for number, (theirs, ours) in enumerate(zip(usual, window, strict=True))
        for (place, old), (_, new) in zip(theirs, ours, strict=False)
        if old != new and number == _first_different(usual, window)
    ]
    return (
        f"{'; '.join(changes) or 'its batches are built differently'}. If it is the last batch of the data: "
        "DataLoader(drop_last=True) drops it, XlaStrategy(pad_last_batch=True) fills it up. If lengths vary: pad them "
        "to a few fixed ones in collate_fn."
    )


def _first_different(usual: tuple[Shapes, ...], window: tuple[Shapes, ...]) -> int:
    return next(number for number, pair in enumerate(zip(usual, window, strict=True)) if pair[0] != pair[1])
