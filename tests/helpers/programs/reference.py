"""The loop by hand: what a program means, written with torch alone, over the user's own objects."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from tests.helpers.programs import objects
from tests.helpers.programs.blocks import Program
from tests.helpers.programs.record import Record, flattened
from tests.helpers.programs.training import NoValidation, is_bad, limited


def make_net() -> nn.Module:
    """Return the model, in float64 so that rounding hides nothing."""
    net = nn.Linear(3, 1).double()
    nn.init.constant_(net.weight, 0.1)
    nn.init.constant_(net.bias, 0.2)
    return net


def loss_of(net: nn.Module, batch: Any, items: bool) -> tuple[torch.Tensor, list[int], int]:
    """Return the loss, the numbers of the samples, and how many items the loss is a mean of."""
    x, y, numbers, samples = flattened(batch)
    errors = (net(x) - y).square().flatten()
    if not items:
        return errors.mean(), numbers, samples
    weights = torch.tensor([1 + number % 3 for number in numbers])
    return (errors * weights).sum() / weights.sum(), numbers, int(weights.sum())


def weight_of(program: Program, batch: Any) -> int:
    """Return the weight of a batch in logged means, which is that of its loss in a step."""
    return weighed_by_items(batch) if program.items.counted else flattened(batch)[3]


def weighed_by_items(batch: Any) -> int:
    return sum(1 + number % 3 for number in flattened(batch)[2])


def run_by_hand(program: Program, orders: list[dict[int, list[list[int]]]] | None = None) -> Record:
    """Train and return what happened.

    Args:
        orders: the samples of each batch, by fit and epoch, where the order is the product's own.
    """
    record, net = Record(), make_net()
    for fit in range(program.again.fits_done):
        optimizer, scheduler = program.optimizer.made_for(net)
        loader, step, passed = program.data.made_for(0), 0, 0
        for epoch in range(program.end.epochs):
            record.told.add(epoch)
            if step == program.end.steps:
                break
            loader = loader_of(program, loader, epoch)
            given = batches_of(program, loader, epoch, orders and orders[fit])
            total, weight, samples, done, complete = 0.0, 0, 0, 0, False
            while True:
                window = list(islice(given, program.window.of(epoch)))
                complete = not window
                if not window or step == program.end.steps:
                    break
                optimizer.zero_grad()
                losses = [loss_of(net, batch, program.items.counted) for batch in window]
                if not (program.items.counted or program.data.tells_samples()):
                    losses = [(loss, numbers, 1) for loss, numbers, _ in losses]
                rate, weighing = optimizer.param_groups[0]["lr"], sum(items for _, _, items in losses)
                bad = any(is_bad(program.guard, numbers) for _, numbers, _ in losses)
                for place, (loss, numbers, items) in enumerate(losses):
                    (loss * items / weighing).backward()
                    told = math.nan if is_bad(program.guard, numbers) else loss.item()
                    record.add_batch(epoch, done + place, numbers, step, rate, told)
                    if not bad:
                        total += loss.item() * weight_of(program, window[place])
                        weight += weight_of(program, window[place])
                        samples += flattened(window[place])[3]
                done, passed = done + len(window), passed + len(window)
                if not bad:
                    optimizer.step()
                    step += 1
                    if program.optimizer.is_due("step", step):
                        scheduler.step()
                if validates_after(program, loader, epoch, done, passed, len(window)):
                    validate(program, net, record, epoch, step)
            if complete:
                # Not again after the same step, if all steps since were refused: the weights are those.
                validated = any(key[0] == fit and key[2] == step for key in record.validations)
                if validates_at_the_end(program, epoch) and not validated:
                    validate(program, net, record, epoch, step)
                if program.optimizer.is_due("epoch", epoch + 1):
                    scheduler.step()
            # Without a value of its own an epoch ends with the latest one.
            record.means[fit, epoch] = (total / weight, samples) if weight else record.means.get((fit, epoch - 1))
        record.end_fit(net, step)
    return record


def loader_of(program: Program, loader: Any, epoch: int) -> Any:
    """Return the loader of an epoch: a new one where data modules are asked for it, else the same."""
    program.data.change(loader, epoch)
    every = program.data.reload
    return program.data.made_for(epoch) if every and epoch % every == 0 else loader


def batches_of(program: Program, loader: Any, epoch: int, order: dict[int, list[list[int]]] | None) -> Iterator[Any]:
    """Yield the batches of an epoch."""
    length = program.data.length(loader)
    if order is None:
        batches = program.data.batches(loader, epoch)
    else:
        # Of an epoch that the product has not finished the rest is not known, and not trained.
        seen = order.get(epoch, [])
        batches = map(objects.batch_of, chain(seen, [[0]] * ((length or 0) - len(seen))))
    return islice(batches, limited(program.limit.train, length))


def validates_after(program: Program, loader: Any, epoch: int, done: int, passed: int, window: int) -> bool:
    """Whether a validation comes after a window, inside the epoch."""
    val = program.val
    if isinstance(val, NoValidation) or val.interval == 1.0 or (val.every and (epoch + 1) % val.every):
        return False
    interval = val.interval
    if isinstance(interval, float):
        length = program.data.length(loader)
        most = limited(program.limit.train, length)
        interval = max(1, int((length if most is None else min(length, most)) * interval))
    return bool((passed if val.every is None else done) % interval < window)


def validates_at_the_end(program: Program, epoch: int) -> bool:
    """Whether a validation comes after the last window of an epoch."""
    val = program.val
    return not isinstance(val, NoValidation) and val.interval == 1.0 and (epoch + 1) % (val.every or 1) == 0


def validate(program: Program, net: nn.Module, record: Record, epoch: int, step: int) -> None:
    """Validate, and note the mean over all samples."""
    losses, weights, seen = [], [], []
    for batch in islice(iter(program.val.loader()), limited(program.limit.val, None)):
        loss, numbers, _ = loss_of(net, batch, items=False)
        losses.append(loss.item())
        weights.append(weight_of(program, batch) if program.items.counted else len(numbers))
        seen += numbers
    mean = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    record.add_validation(epoch, step, seen, mean)
