"""Blocks of a training: windows, limits, ends, validations, optimizers, saves, guards, searches, and further fits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.programs import objects
from tests.helpers.programs.blocks import Block, Program, block, one_of


@block("window")
class Window(Block):
    """`accumulate_grad_batches`, or a schedule of it, or a callback that sets `trainer.accumulate_grad_batches`."""

    micro_batches: int = one_of(1, 1, 2, 3)
    later: int | None = one_of(None, None, 1, 2, 3)
    """From epoch 1 on; None: there is no schedule."""
    by: str = one_of("a schedule", "a callback of the user's")

    def of(self, epoch: int) -> int:
        """Return the micro-batches of a window."""
        return self.micro_batches if self.later is None or epoch < 1 else self.later


@block("limit")
class Limit(Block):
    """`limit_train_batches` and `limit_val_batches`."""

    train: int | float = one_of(1.0, 1.0, 1.0, 2, 3, 100, 0.5)
    val: int | float = one_of(1.0, 1.0, 2)

    def fits(self, program: Program) -> bool:
        data, epochs = program.data, range(program.end.epochs)
        # Half of one batch is refused.
        return self.train != 0.5 or (
            data.has_length() and all((data.length(data.made_for(e)) or 0) > 1 for e in epochs)
        )


def limited(limit: int | float, length: int | None) -> int | None:
    """Return the number of batches that a limit allows; None: all."""
    if limit == 1.0 and isinstance(limit, float):
        return None
    return limit if isinstance(limit, int) else int(limit * (length or 0))


@block("end")
class End(Block):
    """`max_epochs` and `max_steps`."""

    epochs: int = one_of(2, 3, 3)
    steps: int | None = one_of(None, None, 4, 5, 7)


@block("val")
class NoValidation(Block):
    """No validation."""


@block("val", times=3)
class Validation(Block):
    """A validation loader, and when it is used."""

    kind: str = one_of("in order", "ready batches", "broken samples", "list", "stream")
    interval: int | float = one_of(1.0, 1.0, 2, 3, 0.5)
    every: int | None = one_of(1, 1, 2, None)
    """`check_val_every_n_epoch`"""
    sanity: int = one_of(0, 2)

    def fits(self, program: Program) -> bool:
        if self.every is None and isinstance(self.interval, float):
            return False
        if self.kind == "stream" and program.limit.val != 1.0:
            return False  # which leaves it in the middle
        if isinstance(self.interval, int) and self.every is not None:
            # Refused if an epoch has fewer batches.
            enough = not program.data.has_length() or len(program.data.made_for(0)) >= self.interval
            return self.interval == 2 and program.limit.train in (1.0, 3, 100) and not program.data.reload and enough
        return self.interval != 0.5 or program.data.has_length()

    def loader(self) -> Any:
        """Return a new loader."""
        if self.kind == "ready batches":
            return DataLoader(objects.ReadyBatches(7), batch_size=None)
        if self.kind == "list":
            return [objects.batch_of([1, 2, 3]), objects.batch_of([4])]
        if self.kind == "stream":
            return DataLoader(objects.StreamThatGoesOn(7), 3)
        broken = self.kind == "broken samples"
        return DataLoader(objects.Numbers(7), 3, collate_fn=objects.without_broken if broken else None)


@block("optimizer")
class Optimizer(Block):
    """An optimizer and its schedule."""

    kind: str = one_of("SGD", "momentum", "AdamW")
    schedule: str | None = one_of(None, "epoch", "step", "every second step")

    def made_for(self, net: nn.Module) -> tuple[Any, Any]:
        """Return an optimizer and a scheduler, or None."""
        kinds = {"SGD": torch.optim.SGD, "momentum": torch.optim.SGD, "AdamW": torch.optim.AdamW}
        options = {"momentum": 0.9} if self.kind == "momentum" else {}
        optimizer = kinds[self.kind](net.parameters(), lr=0.1, **options)
        if self.schedule is None:
            return optimizer, None
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def configured_for(self, net: nn.Module) -> Any:
        """Return what `configure_optimizers` returns."""
        optimizer, scheduler = self.made_for(net)
        if scheduler is None:
            return optimizer
        interval = "epoch" if self.schedule == "epoch" else "step"
        frequency = 2 if self.schedule == "every second step" else 1
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "frequency": frequency}]

    def is_due(self, interval: str, count: int) -> bool:
        """Whether the schedule steps after so many steps or epochs."""
        return self.schedule == interval or (self.schedule == f"every second {interval}" and count % 2 == 0)


@block("items")
class Items(Block):
    """The loss is a mean over samples, or over items that `num_items` counts."""

    counted: bool = one_of(False, False, False, True)


@block("saves")
class Saves(Block):
    """Checkpoints: every few steps or each epoch, by one callback or two, and at the start of a run."""

    steps: int | None = one_of(1, 2, 3, None)
    twice: bool = one_of(False, False, True)
    at_start: bool = one_of(False, False, True)


@block("guard")
class NoGuard(Block):
    """Nothing watches the steps."""

    bad: ClassVar[int] = -1


@block("guard")
class Guard(Block):
    """BadStepGuard, and a sample whose loss is not finite."""

    action: str = one_of("skip", "rewind", "rewind")
    bad: int = one_of(0, 2, 3, 5, 100, 101, 202)
    """The number of the sample."""

    def fits(self, program: Program) -> bool:
        return program.search.kind == "none"


@block("again")
class Again(Block):
    """A second `fit` of the same trainer and module, with new loaders."""

    fits_done: int = one_of(1, 1, 1, 2)


@block("search")
class Search(Block):
    """A search before the training, with the loaders of the training."""

    kind: str = one_of("none", "none", "none", "none", "rate", "batch size", "throughput")

    def fits(self, program: Program) -> bool:
        loader = program.data.made_for(0)
        plain = type(loader) is DataLoader and isinstance(loader.batch_size, int)  # others are refused
        return self.kind not in ("batch size", "throughput") or plain


@block("draws")
class Draws(Block):
    """Whether samples and training draw random numbers, of which a resume knows the next one."""

    drawn: bool = one_of(False, False, True)

    def fits(self, program: Program) -> bool:
        # By hand nobody knows the numbers: the uninterrupted run is what is right, to the bit.
        once = program.again.fits_done == 1  # a second fit begins with other numbers after a resume
        return not self.drawn or (isinstance(program.guard, NoGuard) and bool(program.stops) and once)


def is_bad(guard: Any, numbers: list[int]) -> bool:
    """Whether the loss of a batch is not finite."""
    return guard.bad in numbers
