"""Blocks of a loop with an Engine, the loop itself, and what it means, by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any

import torch

from tests.helpers.programs import objects
from tests.helpers.programs.blocks import Block, EngineProgram, Program, block, one_of
from tests.helpers.programs.data import part
from tests.helpers.programs.record import Record
from tests.helpers.programs.reference import loss_of, make_net
from trainer import Engine

_TO_THE_END = ("one after the other", "chain", "zip_longest")


@block("second", of=("Engine",))
class Second(Block):
    """How the loop reads its loader, and a second one beside it."""

    reading: str = one_of("for", "next", "zip", "next of the second", "again and again", *_TO_THE_END)
    """`for` and `next`: there is no second loader. "again and again": a second loader that begins again at its end."""
    kind: str = one_of("in order", "by epoch", "no state", "state has the epoch", "set_epoch resets")
    samples: int = one_of(6, 4, 14, 40)
    left_at: int = one_of(0, 0, 0, 2)
    """The batch of the first loader after which the loop is left by `break`, before it saves; 0: none."""

    def fits(self, program: Program) -> bool:
        if self.reading in ("for", "next"):
            return True
        if self.reading == "next of the second":
            return self.samples == 40
        if self.reading in _TO_THE_END and not self.left_at:
            return True
        # Such a stream goes on where a loop has left it.
        cut = self.reading == "zip" or self.left_at > 0
        return self.kind != "state has the epoch" and not (cut and self.kind == "no state")

    def two(self) -> bool:
        """Whether there is a second loader."""
        return self.reading not in ("for", "next")

    def loader(self) -> Any:
        """Return a new second loader."""
        return part(self.kind, self.samples, 200)


@block("saving", of=("Engine",))
class Saving(Block):
    """When the loop saves."""

    steps: int = one_of(1, 2, 3)
    after_epochs: bool = one_of(False, True)
    """Whether it also saves between two epochs."""
    after_load: bool = one_of(False, True)
    """Whether it saves again, right after it has loaded."""


@block("breaks", many=True, of=("Engine",))
class Break(Block):
    """The process ends after a step, or between two epochs, and the program is started again."""

    step: int = one_of(1, 2, 3, 4, 5, 6, 7, 8)


class _EndedError(Exception):
    """Ends the loop."""


def run_engine(program: EngineProgram, folder: Path) -> Record:
    """Run the program, started again after each break."""
    record = Record()
    objects.TOLD.clear()
    logging.getLogger("trainer").setLevel(logging.CRITICAL)
    for one in (*program.breaks, None):
        record.begin_process()
        with suppress(_EndedError):
            _loop(program, folder / "saved", record, one and one.step)
    record.told = {*objects.TOLD}
    return record


def _loop(program: EngineProgram, path: Path, record: Record, end: int | None) -> None:
    second = program.second
    with Engine(accelerator="cpu", devices=1, seed=1) as engine:
        net = make_net()
        model, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        data = program.data.made_for(0)
        loader = engine.setup_dataloaders(data)
        other: Any = engine.setup_dataloaders(second.loader()) if second.two() else None
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if path.exists():
            engine.load(path, state)
            if program.saving.after_load:
                engine.save(path, state)
        for epoch in range(loader.epoch, 3):
            program.data.change(data, epoch)
            for pair in read(second.reading, loader, other):
                optimizer.zero_grad()
                loss, facts = losses_of(model, pair)
                engine.backward(loss)
                number = loader.batch - 1 if pair[0] is not None else 99 + other.batch
                record.add_batch(epoch, number, facts[0], state["step"], *facts[1:])
                optimizer.step()
                state["step"] += 1
                if loader.batch == second.left_at != 0:
                    break
                if state["step"] % program.saving.steps == 0:
                    engine.save(path, state)
                if state["step"] == end:
                    raise _EndedError
            if program.saving.after_epochs:
                engine.save(path, state)
        record.end_fit(net, state["step"])


def read(how: str, loader: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of an epoch, with those of a second loader."""
    if how == "for":
        for batch in loader:
            yield batch, None
    elif how == "next":
        batches = iter(loader)
        while (batch := next(batches, None)) is not None:
            yield batch, None
    elif how == "zip":
        yield from zip(loader, other, strict=False)
    elif how == "zip_longest":
        yield from zip_longest(loader, other)
    elif how == "chain":
        # Both begin here: a generator expression asks for its iterator at once.
        yield from chain(((batch, None) for batch in loader), ((None, batch) for batch in other))
    elif how == "one after the other":
        for batch in loader:
            yield batch, None
        for batch in other:
            yield None, batch
    else:
        others = iter(other)
        for batch in loader:
            beside = next(others, None)
            if beside is None:
                others = iter(other)
                beside = next(others)
            yield batch, beside


def losses_of(net: Any, pair: tuple[Any, Any]) -> tuple[torch.Tensor, tuple[list[int], list[int], float]]:
    """Return the loss of the batches of one step or two, and what is recorded of them."""
    found = [None if one is None else loss_of(net, one, items=False) for one in pair]
    loss = sum(one[0] for one in found if one is not None)
    first, second = ([] if one is None else one[1] for one in found)
    return loss, (first, second, loss.item())  # type: ignore[arg-type,union-attr,return-value]


class _ByHand:
    """A loader whose epochs are counted: each `iter` begins the next one."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.epochs = loader, count()

    def __iter__(self) -> Iterator[Any]:
        objects.set_epoch(self.loader, next(self.epochs))
        return iter(self.loader)


def engine_by_hand(program: EngineProgram, orders: list[dict[int, list[list[int]]]] | None = None) -> Record:
    """Train by hand, as `run_by_hand` does for a Trainer."""
    record, net, step = Record(), make_net(), 0
    objects.TOLD.clear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data, other = program.data.made_for(0), _ByHand(program.second.loader())
    for epoch in range(3):
        program.data.change(data, epoch)
        batches = program.data.batches(data, epoch) if orders is None else map(objects.batch_of, orders[0][epoch])
        first = second = 0
        for pair in read(program.second.reading, batches, other):
            optimizer.zero_grad()
            loss, facts = losses_of(net, pair)
            loss.backward()
            first, second = first + (pair[0] is not None), second + (pair[1] is not None)
            number = first - 1 if pair[0] is not None else 99 + second
            record.add_batch(epoch, number, facts[0], step, *facts[1:])
            optimizer.step()
            step += 1
            if first == program.second.left_at != 0:
                break
    record.end_fit(net, step)
    record.told = {*objects.TOLD} | {0, 1, 2}
    return record
