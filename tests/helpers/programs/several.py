"""Programs with several optimizers, callbacks, loggers and validation loaders: their blocks, and the loop by hand.

The run is compared with the loop by hand, and a run that is stopped, started again, extended or rewound with one go:
weights, checkpoints and what they hold, and every row, point and medium of the logs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.helpers.programs import objects
from tests.helpers.programs.blocks import SLOTS, Block, Program, block, one_of

SLOTS["Several"] = ["stops"]
OF = ("Several",)
BATCHES = 5
"""Batches of an epoch, of two samples each."""


class SeveralProgram(Program):
    """A program with several of everything."""

    of = "Several"


@block("optimizers", of=OF)
class Optimizers(Block):
    """One to three optimizers, each with a schedule."""

    number: int = one_of(1, 2, 3)
    manual: bool = one_of(False, False, True)
    way: str = one_of("all", "by turns", "the first twice")
    """The optimizers that step in a batch, in manual optimization."""
    schedule: str | None = one_of(None, "epoch", "step")
    momentum: float = one_of(0.0, 0.9)

    def fits(self, program: Program) -> bool:
        return self.manual or self.way == "all"

    def stepping(self, batch_idx: int) -> list[int]:
        """Return the numbers of the optimizers that step in a batch, in order."""
        if self.way == "by turns":
            return [batch_idx % self.number]
        return [*([0] if self.way == "the first twice" else []), *range(self.number)]

    def made_for(self, net: nn.Module) -> tuple[list[Any], list[Any]]:
        """Return the optimizers and their schedulers."""
        tensors = [*net.parameters()]
        parts = {1: [tensors], 2: [tensors[:2], tensors[2:]], 3: [tensors[:2], tensors[2:3], tensors[3:]]}[self.number]
        optimizers = [
            torch.optim.SGD(part, lr=0.05 / (1 + place), momentum=self.momentum) for place, part in enumerate(parts)
        ]
        exponential = torch.optim.lr_scheduler.ExponentialLR
        return optimizers, [exponential(one, 0.9) for one in optimizers if self.schedule is not None]


@block("savers", many=True, of=OF)
class Saver(Block):
    """A ModelCheckpoint beside the first one, which writes everything at each epoch's end or by steps."""

    steps: int | None = one_of(None, 2, 3)
    monitored: bool = one_of(False, True)
    weights_only: bool = one_of(False, True)
    top_k: int = one_of(1, 2, -1)


@block("first", of=OF)
class First(Block):
    """The ModelCheckpoint from which runs go on."""

    steps: int | None = one_of(None, 2, 3)
    monitored: bool = one_of(False, True)


@block("loggers", of=OF)
class Loggers(Block):
    """The loggers, and how often they get values of steps."""

    kinds: str = one_of("csv", "jsonl", "csv jsonl", "csv jsonl tensorboard", "csv csv2 jsonl jsonl2", "tensorboard")
    every: int = one_of(1, 2)
    media: bool = one_of(False, True)


@block("vals", of=OF)
class Vals(Block):
    """Validation loaders, and when they are used."""

    number: int = one_of(1, 2, 3)
    interval: float | int = one_of(1.0, 0.5, 3)


@block("unfreeze", of=OF)
class Unfreeze(Block):
    """The epoch in which the first layer is unfrozen, and by what."""

    epoch: int | None = one_of(None, 1, 2)
    by: str = one_of("a hook", "a group")
    """A group: BaseFinetuning adds one to the optimizer."""

    def fits(self, program: Program) -> bool:
        return self.by == "a hook" or program.optimizers.number == 1


@block("average", of=OF)
class Average(Block):
    """EMAWeightAveraging, after steps or also at epochs' ends."""

    kind: str | None = one_of(None, "steps", "epochs")


@block("early", of=OF)
class Early(Block):
    """None to two EarlyStoppings: by a value that never improves, and by one that always does."""

    patience: int | None = one_of(None, 1, 2, 3)
    second: bool = one_of(False, True)


@block("monitors", of=OF)
class Monitors(Block):
    """LearningRateMonitor and GradNormMonitor."""

    rates: str | None = one_of(None, "step", "epoch")
    norms: bool = one_of(False, True)


@block("ending", of=OF)
class Ending(Block):
    """Whether the finished run is started again, or extended by an epoch; or a step in it is taken back."""

    how: str = one_of("once", "started again", "extended", "rewound")
    epochs: int = one_of(2, 3)

    def fits(self, program: Program) -> bool:
        # Norms of steps that are taken back differ; the end of a shorter run is saved, also between due steps.
        if self.how == "rewound":
            return not program.optimizers.manual and not program.monitors.norms
        by_steps = [one.steps for one in (program.first, *program.savers) if one.steps is not None]
        return self.how != "extended" or (self.epochs > 1 and not by_steps)

    @property
    def bad(self) -> int:
        """The batch of the second epoch whose loss is not finite; -1: none."""
        return 3 if self.how == "rewound" else -1


def make_net(program: Program) -> nn.Module:
    """Return the model, in float64 so that rounding hides nothing."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    with torch.no_grad():
        for number, weight in enumerate(net.parameters()):
            weight.copy_(torch.linspace(-0.3, 0.4, weight.numel()).reshape(weight.shape) + 0.1 * number)
    if program.unfreeze.epoch is not None:
        frozen = [net[0].weight] if program.unfreeze.by == "a hook" else [*net[0].parameters()]
        for weight in frozen:  # an optimizer without any that trains is refused
            weight.requires_grad_(False)
    return net


def training_batch(batch_idx: int) -> Any:
    return objects.batch_of([2 * batch_idx, 2 * batch_idx + 1])


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    return (net(batch["x"]) - batch["y"]).square().mean()


def val_batches(number: int) -> Iterator[Any]:
    """Yield the batches of a validation loader."""
    yield objects.batch_of([20 + number, 21 + number])
    yield objects.batch_of([30 + number])


class Expected:
    """The results of the loop by hand."""

    def __init__(self) -> None:
        self.points: dict[tuple[int, str], list[float]] = {}
        """The logged values by step and name."""
        self.weights: dict[int, list[float]] = {}
        """By step."""
        self.final: list[float] = []
        self.step = 0
        self.scores: dict[int, float] = {}
        self.validated: list[int] = []
        self.epoch_ends: list[int] = []

    def log(self, step: int, name: str, value: float) -> None:
        self.points.setdefault((step, name), []).append(value)

    def kept(self, saver: Any) -> tuple[set[int], int | None]:
        """Return the steps of the checkpoints that a ModelCheckpoint leaves, and that of its best one."""
        due = (
            [*self.epoch_ends] if saver.steps is None else [s for s in range(1, self.step + 1) if s % saver.steps == 0]
        )
        if saver.steps is None:
            due = sorted({*due, *(step for step in self.validated if step not in self.epoch_ends)})
        saves = {step: self.scores.get(step) if saver.monitored else None for step in [*due, self.step]}
        top_k, newest = getattr(saver, "top_k", 1), self.step
        if top_k == -1:
            kept = {*saves}
        elif saver.monitored:
            valued = [step for step, value in saves.items() if value is not None]
            kept = {*sorted(valued, key=lambda step: (saves[step], step))[:top_k]}
        else:
            kept = {*sorted(saves)[-top_k:]}
        valued = [step for step, value in saves.items() if value is not None]
        best = min(valued, key=lambda step: (saves[step], step), default=None)
        return kept | {newest}, best


def flat(net: nn.Module) -> list[float]:
    return [one for weight in net.parameters() for one in weight.detach().flatten().tolist()]


class Loop:
    """The loop by hand."""

    def __init__(self, program: Program) -> None:
        self.program, self.found, self.net = program, Expected(), make_net(program)
        self.optimizers, self.schedulers = program.optimizers.made_for(self.net)
        if program.unfreeze.epoch is not None and program.unfreeze.by == "a group":
            self.optimizers = [torch.optim.SGD(self.net[1].parameters(), lr=0.05, momentum=program.optimizers.momentum)]
            exponential = torch.optim.lr_scheduler.ExponentialLR
            self.schedulers = [exponential(self.optimizers[0], 0.9) for _ in self.schedulers]
        interval = program.vals.interval
        self.every = max(1, int(BATCHES * interval)) if isinstance(interval, float) else interval
        self.inside = interval != 1.0
        self.step = self.waits = 0
        self.stopped = False
        self.average: list[torch.Tensor] | None = None

    def run(self) -> Expected:
        """Train."""
        for epoch in range(self.program.ending.epochs):
            self._unfreeze(epoch)
            losses = [loss for batch_idx in range(BATCHES) if (loss := self._batch(epoch, batch_idx)) is not None]
            if len(losses) == BATCHES - (epoch == 1 and self.program.ending.bad >= 0):
                if not self.inside:
                    self._validate()
                self._step_schedulers("epoch")
                self.found.epoch_ends.append(self.step)
            elif self.program.average.kind == "epochs":
                self._update_average()
            self.found.log(self.step, "mean", sum(losses) / len(losses))
            if self.stopped:
                break
        self.found.step = self.step
        if self.average is not None:
            load(self.net, self.average)
        self.found.final = flat(self.net)
        return self.found

    def _unfreeze(self, epoch: int) -> None:
        if epoch == self.program.unfreeze.epoch:
            self.net[0].requires_grad_(True)
            if self.program.unfreeze.by == "a group":
                self.optimizers[0].add_param_group({"params": [*self.net[0].parameters()], "lr": 0.02})
                for scheduler in self.schedulers:
                    scheduler.base_lrs.append(0.02)

    def _step_schedulers(self, interval: str) -> None:
        for scheduler in self.schedulers if self.program.optimizers.schedule == interval else ():
            scheduler.step()

    def _batch(self, epoch: int, batch_idx: int) -> float | None:
        """Train a batch and return its loss; None: it is left out, or the run has stopped before it."""
        program, batch = self.program, training_batch(batch_idx)
        if self.stopped and batch_idx > 0:
            return None
        if epoch == 1 and batch_idx == program.ending.bad:
            self._validate_if_due(batch_idx)
            return None
        rate, shown = self.optimizers[0].param_groups[0]["lr"], loss_of(self.net, batch).item()
        for number in program.optimizers.stepping(batch_idx) if program.optimizers.manual else (0,):
            for one in self.optimizers:
                one.zero_grad()
            loss_of(self.net, batch).backward()
            for one in [self.optimizers[number]] if program.optimizers.manual else self.optimizers:
                one.step()
        self.step += 1
        self._step_schedulers("step")
        if program.average.kind is not None:
            self._update_average()
            if program.average.kind == "epochs" and batch_idx == BATCHES - 1:
                self._update_average()
        self.found.weights[self.step] = flat(self.net)
        if self.step % program.loggers.every == 0:
            self.found.log(self.step, "loss", shown)
            self.found.log(self.step, "rate", rate)
        self._validate_if_due(batch_idx)
        return shown

    def _validate_if_due(self, batch_idx: int) -> None:
        if self.inside and (batch_idx + 1) % self.every == 0:
            self._validate()

    def _update_average(self) -> None:
        now = [weight.detach().clone() for weight in self.net.parameters()]
        before = now if self.average is None else self.average
        self.average = [0.5 * a + 0.5 * b for a, b in zip(before, now, strict=True)]

    def _validate(self) -> None:
        trained = [weight.detach().clone() for weight in self.net.parameters()]
        if self.average is not None:
            load(self.net, self.average)
        means, losses = [], []
        for number in range(self.program.vals.number):
            of_loader = [(loss_of(self.net, batch).item(), len(batch["id"])) for batch in val_batches(number)]
            means.append(sum(loss * size for loss, size in of_loader) / sum(size for _, size in of_loader))
            losses += [loss for loss, _ in of_loader]
        load(self.net, trained)
        for number, mean in enumerate(means):
            self.found.log(self.step, "val" if len(means) == 1 else f"val/dataloader_idx_{number}", mean)
        score = sum(losses) / len(losses)
        for name, value in {"score": score, "flat": 1.0, "falling": -float(self.step)}.items():
            self.found.log(self.step, name, value)
        self.found.scores[self.step] = score
        self.found.validated.append(self.step)
        self.waits += len(self.found.validated) > 1
        patience = self.program.early.patience
        self.stopped = self.stopped or (patience is not None and self.waits >= patience)


def run_by_hand(program: Program) -> Expected:
    """Train by hand."""
    return Loop(program).run()


def load(net: nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for own, other in zip(net.parameters(), weights, strict=True):
            own.copy_(other)


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)
