"""Count XLA's compilations and warn, with the cause, of those after the first steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch

log = logging.getLogger("trainer")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The tensors of a batch: where each one is, and its shape."""

MOST_ELSEWHERE = 10
"""Graphs compiled between the steps until a warning."""
MOST_WARNINGS = 10


class XlaRecompilationMonitor:
    """Read torch_xla's own counter after each step, and name the shapes that were new when it has grown.

    Args:
        warmup: as many steps of each kind (`"training_step"`, `"validation_step"`, ...) may compile unreported. The
            first two always do: the optimizer's state is created in the first.
    """

    def __init__(self, warmup: int) -> None:
        self.compilations = 0
        """Number of graphs compiled in this process."""
        self.recompilations: Counter[Hashable] = Counter()
        """Number of recompilations by cause."""
        self.warmup = warmup
        self.elsewhere = 0
        """Graphs compiled after the warm-up between the steps: where values are read."""
        self._window: list[Shapes] = []
        """The batches of the next step."""
        self._seen: dict[str, Counter[tuple[Shapes, ...]]] = {}
        """The shapes of the windows so far, with how often each came, by kind of step."""

    def start(self) -> None:
        """Count what is compiled from here on."""
        self.compilations = compilations_so_far()
        self._window = []
        self._seen.clear()

    def batch(self, batch: Any) -> None:
        """Note the shapes of a batch of the next step."""
        self._window.append(tuple(shapes_of(batch)))

    def before(self) -> None:
        """Count the graphs compiled since the last step, which were for reading values; called before each step."""
        new = self._newly_compiled()
        if sum(seen.total() for seen in self._seen.values()) > self.warmup:
            self.elsewhere += new
        if new and self.elsewhere >= MOST_ELSEWHERE:
            self.add_recompilation(
                "elsewhere",
                f"{self.elsewhere} graphs were compiled outside the steps so far. If the number keeps growing, a value "
                "is read before a step has ended: .item(), float(), print or an `if` on a tensor. Log it with "
                "self.log, which reads it later.",
            )

    def after(self, kind: str) -> None:
        """Warn if the step that has just ended was compiled again."""
        new, window, self._window = self._newly_compiled(), tuple(self._window), []
        seen = self._seen.setdefault(kind, Counter())
        if new and seen.total() >= self.warmup:
            difference = _difference(window, seen)
            number, again = seen.total() + 1, self.recompiled_steps + 1
            words = f"{kind} number {number} was compiled again ({again} after the first {self.warmup} of a kind)"
            self.add_recompilation((kind, difference), f"{words}: {difference}")
        seen[window] += 1

    @property
    def recompiled_steps(self) -> int:
        """Number of steps compiled again after the warm-up."""
        return sum(count for cause, count in self.recompilations.items() if cause != "elsewhere")

    def add_recompilation(self, cause: Hashable, warning: str) -> None:
        """Count a recompilation, and log the warning at the first one for a cause."""
        self.recompilations[cause] += 1
        if self.recompilations[cause] == 1 and len(self.recompilations) <= MOST_WARNINGS:
            last = " That was the last warning of this kind." if len(self.recompilations) == MOST_WARNINGS else ""
            log.warning("%s%s", warning, last)

    def _newly_compiled(self) -> int:
        before, self.compilations = self.compilations, compilations_so_far()
        return self.compilations - before

    def summary(self) -> str:
        """Return one line for the end of a run."""
        return (
            f"{self.compilations} graphs compiled in this process; after the warm-up {self.recompiled_steps} steps "
            f"were compiled again, and {self.elsewhere} graphs elsewhere"
        )


def compilations_so_far() -> int:
    """Return how many graphs torch_xla has compiled in this process."""
    from torch_xla.debug import metrics

    return int(metrics.counter_value("UncachedCompile") or 0)


def shapes_of(batch: Any, where: str = "batch") -> list[tuple[str, tuple[int, ...]]]:
    """Return the places of the tensors in a nested batch, with their shapes."""
    if isinstance(batch, torch.Tensor):
        return [(where, tuple(batch.shape))]
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, (list, tuple)):
        parts = enumerate(batch)
    return [shape for key, value in parts for shape in shapes_of(value, f"{where}[{key!r}]")]


def _difference(window: tuple[Shapes, ...], seen: Counter[tuple[Shapes, ...]]) -> str:
    """Return how the batches of this step differ from the usual ones, and what to do."""
    if not seen:
        return "it is the first one. Give XlaStrategy(compile_warmup_steps=...) more than that."
    if window in seen:
        return (
            "the shapes of its batches are not new. Something else has changed: Python numbers or branches inside the "
            "step, a module in another mode, a value read in its middle, or a learning rate that has become exactly 0."
        )
    usual = seen.most_common(1)[0][0]
    if len(window) != len(usual):
        return (
            f"it has {len(window)} micro-batches instead of {len(usual)}. Let an epoch's batches be a multiple of "
            "accumulate_grad_batches (limit_train_batches)."
        )
    before, now = next(pair for pair in zip(usual, window, strict=True) if pair[0] != pair[1])
    pairs = zip(before, now, strict=False)
    changes = [f"{path} is {new} instead of {old}" for (path, old), (_, new) in pairs if old != new]
    return (
        f"{'; '.join(changes) or 'its batches are built differently'}. If it is the last batch of the data: "
        "DataLoader(drop_last=True) drops it, XlaStrategy(pad_last_batch=True) fills it up. If lengths vary: pad them "
        "to a few fixed ones in collate_fn."
    )
