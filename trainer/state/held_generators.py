"""held_generators: save and restore a program's random generators: the global ones, and the ones in its objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import cycle
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainer.data.sampler_state import named_generators, put_generator, take_back
from trainer.errors import first_of, printable
from trainer.model.reachable import OwnGenerator, is_generator
from trainer.optimizers import optimizers_inside
from trainer.seed import (
    generator_like,
    generator_state,
    isolated_rng,
    rng_state,
    set_generator_state,
    set_rng_state,
    share_random_numbers,
)
from trainer.strategy import Strategy

log = logging.getLogger("trainer")


def parts_of(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return the modules and optimizers, with the ones inside them, by name, as owners for the functions below."""
    parts: dict[str, Any] = {
        f"{name} {path}".rstrip(): part for name, one in modules.items() for path, part in one.named_modules()
    }
    return parts | {
        f"{name} {path}".rstrip(): part
        for name, one in optimizers.items()
        for path, part in optimizers_inside(one).items()
    }


def _reads_a_loader(value: Any) -> bool:
    """Whether a value is an iterator over a DataLoader, a function with `yield` that has one, or any `cycle`."""
    if isinstance(value, GeneratorType) and value.gi_frame is not None:
        within = (value.gi_yieldfrom, *value.gi_frame.f_locals.values())
        return any(isinstance(one, DataLoader) or _is_of_loader(one) for one in within)
    return _is_of_loader(value) or type(value) is cycle


def _is_of_loader(value: Any) -> bool:
    return isinstance(value, Iterator) and type(value).__module__.startswith(("torch.utils.data.", "torchdata."))


@cache
def _report_iterators(names: tuple[str, ...]) -> None:
    if names:
        log.warning(
            "checkpoints do not have the place of an iterator over a loader that the program holds, which a resumed "
            "run begins again: %s. Give the loader to the trainer, or to engine.setup_dataloaders.",
            printable(first_of(names)),
        )


def without_generators(state: Any) -> Any:
    """Return nested data with None for each random generator, whose state is saved by the object that holds it."""
    if type(state) is dict:
        return {key: without_generators(one) for key, one in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(without_generators, state))
    return None if is_generator(state) else state


def with_generators(saved: Any, current: Any) -> Any:
    """Return what `without_generators` returned, with the generators that are in its places in the current data."""
    if type(saved) is type(current) is dict:
        return {key: with_generators(one, current.get(key)) for key, one in saved.items()}
    if type(saved) in (list, tuple) and type(saved) is type(current) and len(saved) == len(current):
        return type(saved)(map(with_generators, saved, current))
    return current if is_generator(current) else saved


@contextmanager
def isolated_with(
    owners: Mapping[str, Any], others: Sequence[OwnGenerator], device: torch.device, keeps_new: bool = False
) -> Iterator[None]:
    """Restore the states of the global generators, of the owners' generators, and of others, on exit.

    Args:
        keeps_new: generators that are made in the block stay. Otherwise they are taken from the objects that were there
            before, which make them again, from the start.
    """
    contents: dict[int, dict[Any, Any]] = {}
    own = {id(one): one for held in named_generators(owners, contents).values() for one in held.values()}
    with isolated_rng(device, [*map(OwnGenerator, own.values()), *others]):
        try:
            yield
        finally:
            for owner, held in named_generators({} if keeps_new else owners).items():
                for path in [path for path, one in held.items() if id(one) not in own]:
                    take_back(owners[owner], path, contents)


class Generators:
    """The random generators of a run: the global ones, and the ones in the user's objects.

    Args:
        owners: returns the user's objects that may hold generators, by name.
        strategy: of the run.
    """

    to_restore: dict[str, Any] | None = None
    """The states in the checkpoint, until the first epoch restores them."""
    of_epoch: dict[str, Any] | None = None
    """The states before the first hook of the epoch in progress, where users have one: see `repeating`."""
    of_loaders: dict[str, Any] | None = None
    """The states before the loaders were made again; None: for the first loaders, which need no state."""
    epoch_of_loaders = 0
    """The epoch for which the loaders were made."""

    def __init__(self, owners: Callable[[], Mapping[str, Any]], strategy: Strategy) -> None:
        self._owners, self._strategy = owners, strategy

    def state(self, saves: bool = False) -> dict[str, Any]:
        """Return the states of all generators as data.

        Args:
            saves: they are for a checkpoint, which lacks the places of iterators that the owners hold: warn once.
        """
        contents: dict[int, dict[Any, Any]] = {}
        own = {
            owner: {name: state for name, one in held.items() if (state := generator_state(one))}
            for owner, held in named_generators(self._owners(), contents).items()
        }
        if saves:
            names = []
            for inside in contents.values():
                for name, one in inside.items():
                    # A loader with persistent workers has an iterator, `_iterator`, that begins again in each epoch.
                    if isinstance(one, Iterator) and name != "_iterator" and _reads_a_loader(one):
                        names.append(str(name))
            _report_iterators(tuple(names))
        return {**rng_state(self._strategy.device), "own": own}

    def set_state(self, state: dict[str, Any]) -> list[str]:
        """Restore a result of `state`; a generator that an owner does not have yet is made.

        Returns:
            the names of generators that are missing, or are of another kind.
        """
        set_rng_state(state, self._strategy.device)
        owners = self._owners()
        held = named_generators(owners)
        own = [(owner, name, one) for owner, states in state.get("own", {}).items() for name, one in states.items()]
        for owner, name, saved in own:
            if owner in owners and name not in held.get(owner, {}):
                put_generator(owners[owner], name, generator_like(saved))
        held = named_generators(owners)
        return [
            f"{name} of {owner}"
            for owner, name, saved in own
            if name not in held.get(owner, {}) or not set_generator_state(held[owner][name], saved)
        ]

    def isolated(self, others: Sequence[OwnGenerator] = (), keeps_new: bool = False) -> AbstractContextManager[None]:
        """Restore the states of all these generators, and of others, on exit; see `isolated_with`."""
        return isolated_with(self._owners(), others, self._strategy.device, keeps_new)

    def share(self) -> None:
        """Have all processes of one model draw the same numbers from now on. Collective."""
        share_random_numbers(self._strategy.processes, self._strategy.device)

    def resume(self, state: dict[str, Any], of_epoch: dict[str, Any] | None) -> None:
        """Keep the states of a checkpoint until `restore`; those `of_epoch` are from before its first hook."""
        self.to_restore, self.of_epoch = state, of_epoch

    def restore(self) -> None:
        """Restore the states from the checkpoint, once in a resumed run. Collective."""
        if self.to_restore is not None:
            lacking = self.set_state(self.to_restore)
            self.to_restore = None
            self.share()
            if lacking and self._strategy.processes.is_global_zero:
                log.warning(
                    "random generators of the checkpoint that this program does not have, or has of another kind: "
                    "their states are not restored: %s",
                    printable(first_of(lacking)),
                )

    def begin_epoch(self, hooked: bool) -> None:
        """Keep the states before the first hook of an epoch, which a resumed run calls again."""
        self.of_epoch = self.state() if hooked else None

    def begin_loaders(self) -> None:
        """Keep the states before loaders are made, which a resumed run makes again."""
        self.of_loaders = self.state()

    def draw_loaders_from(self, state: dict[str, Any] | None) -> None:
        """Make the loaders of a resumed run with the same random numbers as before."""
        self.of_loaders = state
        if state is not None:
            self.set_state(state)

    def state_of_epoch(self) -> dict[str, Any]:
        """Return the states for calling the epoch's loaders and its first hook again."""
        return {"epoch": self.epoch_of_loaders, "loaders": self.of_loaders or {}, "hook": self.of_epoch or {}}
