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


def run_by_hand(program: Program) -> Expected:
    """Train by hand."""
    found, net = Expected(), make_net(program)
    optimizers, schedulers = program.optimizers.made_for(net)
    if program.unfreeze.epoch is not None and program.unfreeze.by == "a group":
        optimizers[0] = torch.optim.SGD(net[1].parameters(), lr=0.05, momentum=program.optimizers.momentum)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9) for _ in schedulers]
    average: list[torch.Tensor] | None = None
    interval = program.vals.interval
    every = max(1, int(BATCHES * interval)) if isinstance(interval, float) else interval
    inside, step, waits, stopped = interval != 1.0, 0, 0, False

    def update_average() -> None:
        nonlocal average
        now = [weight.detach().clone() for weight in net.parameters()]
        average = now if average is None else [0.5 * a + 0.5 * b for a, b in zip(average, now, strict=True)]

    def validate() -> None:
        nonlocal waits, stopped
        trained = [weight.detach().clone() for weight in net.parameters()]
        if average is not None:
            load(net, average)
        sums, total, counts = [], 0.0, 0
        for number in range(program.vals.number):
            losses = [(loss_of(net, batch).item(), len(batch["id"])) for batch in val_batches(number)]
            sums.append(sum(loss * size for loss, size in losses) / sum(size for _, size in losses))
            total, counts = total + sum(loss for loss, _ in losses), counts + len(losses)
        for number, mean in enumerate(sums):
            found.log(step, "val" if len(sums) == 1 else f"val/dataloader_idx_{number}", mean)
        found.scores[step] = total / counts
        found.validated.append(step)
        found.log(step, "score", total / counts)
        found.log(step, "flat", 1.0)
        found.log(step, "falling", -float(step))
        load(net, trained)
        waits += len(found.validated) > 1
        stopped = stopped or (program.early.patience is not None and waits >= program.early.patience)

    for epoch in range(program.ending.epochs):
        if epoch == program.unfreeze.epoch:
            net[0].requires_grad_(True)
            if program.unfreeze.by == "a group":
                optimizers[0].add_param_group({"params": [*net[0].parameters()], "lr": 0.02})
                for scheduler in schedulers:
                    scheduler.base_lrs.append(0.02)
        losses = []
        for batch_idx in range(BATCHES):
            batch = training_batch(batch_idx)
            if epoch == 1 and batch_idx == program.ending.bad:
                continue
            rate = optimizers[0].param_groups[0]["lr"]
            shown = loss_of(net, batch).item()
            losses.append(shown)
            for number in program.optimizers.stepping(batch_idx) if program.optimizers.manual else (0,):
                stepping = [optimizers[number]] if program.optimizers.manual else optimizers
                for one in optimizers:
                    one.zero_grad()
                loss = loss_of(net, batch)
                if loss.requires_grad:
                    loss.backward()
                for one in stepping:
                    one.step()
            step += 1
            if program.optimizers.schedule == "step":
                for scheduler in schedulers:
                    scheduler.step()
            if program.average.kind is not None:
                update_average()
                if program.average.kind == "epochs" and batch_idx == BATCHES - 1:
                    update_average()
            found.weights[step] = flat(net)
            if step % program.loggers.every == 0:
                found.log(step, "loss", shown)
                found.log(step, "rate", rate)
            if inside and (batch_idx + 1) % every == 0:
                validate()
                if stopped and batch_idx < BATCHES - 1:
                    if program.average.kind == "epochs":
                        update_average()
                    break
        else:
            if not inside:
                validate()
            if program.optimizers.schedule == "epoch":
                for scheduler in schedulers:
                    scheduler.step()
            found.epoch_ends.append(step)
        found.log(step, "mean", sum(losses) / len(losses))
        if stopped:
            break
    found.step = step
    if average is not None:
        load(net, average)
    found.final = flat(net)
    return found


def load(net: nn.Module, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for own, other in zip(net.parameters(), weights, strict=True):
            own.copy_(other)


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)
