"""Random generators that users' objects hold are state: a resumed run draws from them as one that never stopped."""

from __future__ import annotations

import itertools
import os
import random
import signal
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable
from functools import cached_property, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, SequentialLR
from torch.utils.data import DataLoader

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, DataModule
from trainer.callbacks import BadStepGuard, ModelCheckpoint
from trainer.checkpoint.generator_states import check_rng_state
from trainer.errors import CheckpointError
from trainer.loop.training_state import load_training_state

STEPS, EPOCHS = 3, 2
KINDS: dict[str, Any] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "numpy": np.random.default_rng,
    "philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "twister": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "sfc64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "legacy": np.random.RandomState,
    "python": random.Random,
}
PLACES = (
    *("module", "part", "listed", "hidden", "method", "class", "late", "epoch"),
    *("data", "optimizer", "callback", "inside a callback", "global"),
)
STOPS: dict[str, Any] = {
    "epoch's end": ("stop", STEPS),
    "inside an epoch": ("stop", STEPS + 2),
    "killed inside an epoch": ("kill", STEPS + 3),
    "killed at an epoch's first step": ("kill", STEPS + 1),
    "in validation": ("signal", STEPS),
    "killed in validation": ("kill in validation", STEPS),
    "twice": ("stop", 2),
}


def normal(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.randn((), generator=generator))
    return float(generator.gauss(0, 1) if isinstance(generator, random.Random) else generator.normal())


class Source:
    """A user's object that holds a generator, perhaps deep inside."""

    def __init__(self, generator: Any) -> None:
        self.inner = {"of": [generator]}

    def __call__(self) -> float:
        return normal(self.inner["of"][0])


class NoisySGD(SGD):
    def __init__(self, parameters: Any, generator: Any) -> None:
        super().__init__(parameters, 0.1)
        self.noise = generator

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.01 * normal(self.noise)
        return super().step(closure)


class Held(Callback):
    """Draws at the end of each step, and stops the run."""

    def __init__(self, generator: Any, inside: bool, how: str = "", step: int = -1) -> None:
        self.noise = Source(generator) if inside and generator is not None else generator
        self.how, self.step = how, step

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if self.noise is not None:
            drawn = self.noise() if isinstance(self.noise, Source) else normal(self.noise)
            module.layer.bias.data += 0.01 * drawn
        if trainer.global_step == self.step and self.how == "stop":
            trainer.stop("the test")
        if trainer.global_step == self.step and self.how == "kill":
            raise KeyboardInterrupt

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if trainer.global_step == self.step and self.how == "kill in validation":
            raise KeyboardInterrupt


class Data(DataModule):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.noise = generator

    def train_dataloader(self) -> Any:
        return loader(STEPS)

    def val_dataloader(self) -> Any:
        return loader(2)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch if self.noise is None else (batch[0] + 0.1 * normal(self.noise), batch[1])


class Noisy(Toy):
    """Draws in training and in validation from a generator at one place."""

    def __init__(self, place: str, make: Any) -> None:
        super().__init__()
        self.make = make
        self.place, self.part = place, nn.Identity()
        new = make(1)
        if place == "module":
            self.noise = new
        if place == "part":
            self.part.noise = new
        if place == "listed":
            self.sources = [Source(new)]
        if place == "hidden":
            self.hidden = [nn.Identity()]
            self.hidden[0].noise = new
        if place == "method":
            self.draws = Source(new).__call__
        if place == "class":
            type(self).of_class = new
        if place in ("late", "epoch"):
            self.noise = None
        if place == "global":
            globals()["NOISE"] = new

    def on_train_epoch_start(self) -> None:
        if self.place == "epoch":
            self.noise = self.make(self.current_epoch)

    def draw(self) -> float:
        if self.place in ("module", "late", "epoch"):
            if self.noise is None:
                self.noise = self.make(1)
            return normal(self.noise)
        if self.place == "part":
            return normal(self.part.noise)
        if self.place == "listed":
            return self.sources[0]()
        if self.place == "hidden":
            return normal(self.hidden[0].noise)
        if self.place == "class":
            return normal(self.of_class)
        return normal(NOISE) if self.place == "global" else self.draws() if self.place == "method" else 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.draw())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.draw()
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        new = self.make(1)
        return NoisySGD(self.parameters(), new) if self.place == "optimizer" else super().configure_optimizers()


NOISE: Any = None


def fit(folder: Path, place: str, kind: str, how: str = "", step: int = -1, **options: Any) -> list[Any]:
    """Train, perhaps up to a stop, from the last checkpoint; return the weights."""
    make = KINDS[kind]
    torch.manual_seed(0)
    module = Noisy(place, make)
    data = Data(make(1) if place == "data" else None)
    held = Held(make(1) if "callback" in place else None, place != "callback", how, step)
    saves = ModelCheckpoint(every_n_train_steps=2) if how == "kill" else ModelCheckpoint(save_on_exception=False)
    settings = {"max_epochs": EPOCHS, "num_sanity_val_steps": 1, "enable_checkpointing": True} | options
    trainer = quiet(callbacks=[held, saves], default_root_dir=folder, **settings)
    try:
        trainer.fit(module, datamodule=data, ckpt_path="last")
    except (KeyboardInterrupt, SystemExit):
        assert how, "the run that goes on has to end by itself"
    return [value.tolist() for value in module.state_dict().values()]


@pytest.mark.parametrize("place", PLACES)
def test_a_resumed_run_draws_on(place: str, tmp_path: Path) -> None:
    for number, (kind, stop) in enumerate((kind, stop) for kind in KINDS for stop in STOPS):
        if number % len(PLACES) != PLACES.index(place):
            continue
        how, step = STOPS[stop]
        whole = fit(tmp_path / f"whole {number}", place, kind)
        folder = tmp_path / f"{number}"
        for further in (0, STEPS) if stop == "twice" else (0,):
            fit(folder, place, kind, how, step + further)
        assert fit(folder, place, kind) == whole, (kind, stop)


DRAWN, IN_A_PARTIAL = random.Random(1), random.Random(1)


class Hidden(Noisy):
    """Draws from a generator that is not in plain sight: inside a method's code, or of a container."""

    def __init__(self, place: str) -> None:
        super().__init__(place, KINDS["python"])
        self.queue = deque([random.Random(1)])
        self.space = Namespace(noise=random.Random(1))
        self.user = UserDict(noise=random.Random(1))

    def draw(self) -> float:
        return float(getattr(self, self.place)())

    def comprehension(self) -> float:
        return sum([sum(DRAWN.random() for _ in range(2)) for _ in range(2)])

    def function(self) -> float:
        return (lambda: (lambda: DRAWN.random())())()

    @staticmethod
    def static() -> float:
        return DRAWN.random()

    @classmethod
    def of_class(cls) -> float:
        return DRAWN.random()

    @property
    def number(self) -> float:
        return DRAWN.random()

    @cached_property
    def source(self) -> Callable[[], float]:
        return lambda: DRAWN.random()

    def times(self, source: random.Random) -> float:
        return source.random()

    partial = partialmethod(times, IN_A_PARTIAL)
    of_a_property = lambda self: self.number  # noqa: E731
    cached = lambda self: self.source()  # noqa: E731
    in_a_queue = lambda self: self.queue[0].random()  # noqa: E731
    in_a_namespace = lambda self: self.space.noise.random()  # noqa: E731
    in_a_dict_around_a_dict = lambda self: self.user["noise"].random()  # noqa: E731


HIDDEN = (
    *("comprehension", "function", "static", "of_class", "of_a_property", "cached", "partial"),
    *("in_a_queue", "in_a_namespace", "in_a_dict_around_a_dict"),
)


def resumed(folder: Path, make: Callable[[], Noisy]) -> tuple[list[Any], list[Any]]:
    """Train a module in one go, and with a stop inside an epoch; return the weights of both."""

    def weights(name: str, step: int = -1) -> list[Any]:
        torch.manual_seed(0)
        module, held = make(), Held(None, False, "stop", step)
        options = {"max_epochs": EPOCHS, "enable_checkpointing": True, "num_sanity_val_steps": 0}
        trainer = quiet(callbacks=[held], default_root_dir=folder / name, **options)
        trainer.fit(module, loader(STEPS), ckpt_path="last")
        return [value.tolist() for value in module.state_dict().values()]

    weights("stopped", STEPS + 1)
    return weights("whole"), weights("stopped")


@pytest.mark.parametrize("place", HIDDEN)
def test_those_not_in_plain_sight(place: str, tmp_path: Path) -> None:
    def make() -> Hidden:
        for one in (DRAWN, IN_A_PARTIAL):  # not by a method, whose names are looked at
            one.seed(1)
        return Hidden(place)

    whole, after_a_stop = resumed(tmp_path, make)
    assert after_a_stop == whole


class Late(Noisy):
    """Makes the generator when it first draws, in something that it holds."""

    def __init__(self, place: str) -> None:
        super().__init__(place, KINDS["python"])
        self.named: dict[str, random.Random] = {}
        self.numbered: dict[int, random.Random] = {}
        self.several: list[random.Random] = []
        self.space = Namespace(noise=None)
        self.deep = [{"of": Namespace(named={})}]

    def draw(self) -> float:
        return float(getattr(self, self.place)())

    def dict(self) -> float:
        return self.named.setdefault("noise", random.Random(1)).random()

    def other_keys(self) -> float:
        return self.numbered.setdefault(7, random.Random(1)).random()

    def list(self) -> float:
        self.several = self.several or [random.Random(1)]
        return self.several[0].random()

    def object(self) -> float:
        self.space.noise = self.space.noise or random.Random(1)
        return self.space.noise.random()

    def deep_inside(self) -> float:
        return self.deep[0]["of"].named.setdefault("noise", random.Random(1)).random()


@pytest.mark.parametrize("place", ["dict", "other_keys", "list", "object", "deep_inside"])
def test_those_made_later(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, after_a_stop = resumed(tmp_path, lambda: Late(place))
    lacking = {"other_keys": "numbered.0 of module", "list": "several.0 of module"}
    if place in lacking:
        assert f"their states are not restored: {lacking[place]}" in caplog.text
    else:
        assert after_a_stop == whole


class Scheduled(Noisy):
    """Multiplies the learning rate by numbers from a generator of the scheduler, or draws from that of a group."""

    def __init__(self, place: str) -> None:
        super().__init__(place, KINDS["python"])

    def configure_optimizers(self) -> Any:
        if self.place == "group":
            return NoiseOfGroups([{"params": self.parameters(), "noise": random.Random(1)}], 0.1)
        optimizer = SGD(self.parameters(), 0.1)
        scheduler: Any = RandomRates(optimizer)
        if self.place == "inside":
            scheduler = SequentialLR(optimizer, [RandomRates(optimizer), RandomRates(optimizer)], [2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class NoiseOfGroups(SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += 0.01 * group["noise"].random()
        return super().step(closure)


class RandomRates(LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.noise, self.several = random.Random(1), [random.Random(2)]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [rate * self.noise.random() * self.several[0].random() for rate in self.base_lrs]


@pytest.mark.parametrize("place", ["own", "inside", "group"])
def test_those_of_a_scheduler_or_a_group(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, after_a_stop = resumed(tmp_path, lambda: Scheduled(place))
    assert after_a_stop == whole
    assert "random generators" not in caplog.text


class Unstable(Noisy):
    """Has a loss that is not finite in the second step of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 1 else loss


def test_a_rewind_takes_them_back(tmp_path: Path) -> None:
    class Note(Callback):
        def __init__(self) -> None:
            self.at: dict[int, list[float]] = {}

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            state = torch.Generator()
            state.set_state(module.noise.get_state())
            self.at.setdefault(trainer.global_step, []).append(normal(state))

    note, guard = Note(), BadStepGuard("rewind", max_bad_steps=3)
    saves = ModelCheckpoint(every_n_train_steps=1)
    trainer = quiet(
        callbacks=[note, guard, saves], default_root_dir=tmp_path, enable_checkpointing=True, max_steps=STEPS
    )
    trainer.fit(Unstable("module", KINDS["torch"]), loader(STEPS), loader(1))
    assert guard.bad_steps
    assert len(note.at[1]) > 1
    assert len({*note.at[1]}) == 1


def test_searches_and_checks_leave_them(tmp_path: Path) -> None:
    class Saves(Noisy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.global_step == 0:  # the rehearsal
                self.draw()

    def weights(place: str, sanity: int, checkpointing: bool) -> list[Any]:
        torch.manual_seed(0)
        module = Saves(place, KINDS["numpy"])
        folder = tmp_path / f"{place} {sanity} {checkpointing}"
        held = Held(KINDS["numpy"](1) if "callback" in place else None, True)
        quiet(
            callbacks=[held],
            max_epochs=1,
            num_sanity_val_steps=sanity,
            default_root_dir=folder,
            enable_checkpointing=checkpointing,
        ).fit(module, datamodule=Data(KINDS["numpy"](1) if place == "data" else None))
        return [value.tolist() for value in module.state_dict().values()]

    for place in ("module", "listed", "late", "data", "inside a callback", "global"):
        assert weights(place, 2, True) == weights(place, 0, False), place


class Holder:
    """Has a generator once it was asked for a number."""

    def draw(self) -> float:
        if getattr(self, "noise", None) is None:
            self.noise = random.Random(1)
        return self.noise.random()


class HolderOfNone(Holder):
    def __init__(self) -> None:
        self.noise = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Holder, HolderOfNone])
def test_a_check_takes_back_what_it_made(kind: type[Holder]) -> None:
    def weights(sanity: int) -> list[Any]:
        class Draws(Toy):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                holder.draw()
                super().validation_step(batch, batch_idx)

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                assert self.global_step or vars(holder) == before
                return super().training_step(batch, batch_idx) * holder.draw()

        torch.manual_seed(0)
        module, holder = Draws(), kind()
        module.holder, before = holder, dict(vars(holder))
        quiet(max_epochs=1, num_sanity_val_steps=sanity).fit(module, loader(STEPS), loader(2))
        return [value.tolist() for value in module.state_dict().values()]

    assert weights(1) == weights(0)


def test_generators_of_a_program_that_was_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, "part", "numpy", "stop", 2)
    fit(tmp_path, "part", "python")
    told = "random generators of the checkpoint that this program does not have, or has of another kind"
    assert f"{told}: their states are not restored: noise of module part" in caplog.text


def test_callbacks_keep_theirs_in_another_order(tmp_path: Path) -> None:
    class Draws(Callback):
        def __init__(self, size: float) -> None:
            self.size, self.noise = size, random.Random(1)

        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            for _ in range(int(self.size)):
                self.noise.random()

    def drawn(epochs: int, sizes: tuple[int, ...]) -> dict[float, Any]:
        draws = [Draws(size) for size in sizes]
        trainer = quiet(callbacks=draws, max_epochs=epochs, enable_checkpointing=True, default_root_dir=tmp_path)
        trainer.fit(Toy(), loader(2), ckpt_path="last")
        return {one.size: one.noise.random() for one in draws}

    drawn(1, (1, 5))
    last = random.Random(1), random.Random(1)
    expected = {size: [one.random() for _ in range(size * 4 + 1)][-1] for size, one in zip((1, 5), last, strict=True)}
    assert drawn(2, (5, 1)) == expected


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, "part", "torch", "stop", 2)
    (path,) = tmp_path.rglob("checkpoints/*step*")
    checkpoint = load_training_state(path)
    (own,) = [rng["own"]["module part"] for rng in checkpoint["rng"]]
    for name, damaged in {
        "position": {"torch": own["noise"]["torch"].clone().index_fill_(0, torch.arange(8, 12), 255)},
        "size": {"torch": own["noise"]["torch"][:8]},
        "kind": {"text": "none"},
        "number": 3,
    }.items():
        own["noise"] = damaged
        with raises_recorded(CheckpointError):
            check_rng_state(checkpoint["rng"][0], name)


class OfRank(Noisy):
    """Draws numbers of its own on each process, without a seed in common."""

    def __init__(self) -> None:
        super().__init__("module", lambda _: random.Random(int(os.environ.get("RANK", 0))))


def across(folder: Path, processes: int, stop: int) -> list[Any]:
    module = OfRank()
    held = Held(None, False, "stop", stop)
    options = {"strategy": "ddp", "devices": processes, "max_epochs": 2, "enable_checkpointing": True}
    trainer = quiet(callbacks=[held], default_root_dir=folder, **options)
    torch.manual_seed(0)
    trainer.fit(module, loader(6), ckpt_path="last")
    return [value.tolist() for value in module.state_dict().values()]


def test_each_process_has_its_own(tmp_path: Path) -> None:
    (whole, *_) = run_distributed(across, 2, tmp_path / "whole", 2, -1)
    run_distributed(across, 2, tmp_path / "stopped", 2, 4)
    (resumed, *_) = run_distributed(across, 2, tmp_path / "stopped", 2, -1)
    assert resumed == whole


class OwnLoader(DataLoader[Any]):
    """A loader of the user's, with persistent workers."""


def batches_of(own: Any) -> Any:
    while True:
        yield from own


WAYS_TO_ITERATE: dict[str, Any] = {
    "plain": lambda module: setattr(module, "plain", iter(module.own)),
    "listed": lambda module: setattr(module, "some", [{"listed": iter(module.own)}]),
    "by_yield": lambda module: setattr(module, "by_yield", batches_of(module.own)),
    "cycled": lambda module: setattr(module, "cycled", itertools.cycle(module.own)),
    "": lambda module: [*module.own],
}


@pytest.mark.parametrize("way", WAYS_TO_ITERATE)
def test_an_iterator_over_a_loader_is_named_at_the_first_save(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Iterating(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.own = OwnLoader(loader(4).dataset, 4, num_workers=1, persistent_workers=True)

        def on_train_start(self) -> None:
            WAYS_TO_ITERATE[way](self)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            iterator = self.some[0]["listed"] if way == "listed" else getattr(self, way, iter([batch]))
            return super().training_step(next(iterator), batch_idx)

    trainer = quiet(max_epochs=1)
    trainer.fit(Iterating(), loader(2))
    assert "place of an iterator" not in caplog.text
    for name in ("one", "another"):
        trainer.save_checkpoint(tmp_path / name)
    said = [text for text in caplog.messages if "place of an iterator" in text]
    assert len(said) == bool(way)
    assert all(f"begins again: {way}. Give the loader to the trainer" in text for text in said)
