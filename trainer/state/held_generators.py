"""held_generators: save and restore the random generators of a program: the global ones, and those of its objects."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
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
)

log = logging.getLogger("trainer")


def parts_of(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Return the modules and optimizers, and those in them, by name, as owners for the functions below."""
    parts: dict[str, Any] = {
        f"{name} {path}".rstrip(): part for name, one in modules.items() for path, part in one.named_modules()
    }
    return parts | {
        f"{name} {path}".rstrip(): part
        for name, one in optimizers.items()
        for path, part in optimizers_inside(one).items()
    }


def states_with(owners: Mapping[str, Any], device: torch.device, saves: bool = False) -> dict[str, Any]:
    """Return the states of the global generators, and of those that the owners hold, as data.

    Args:
        saves: they are for a checkpoint, which does not have the places of iterators that the owners hold: say so once.
    """
    contents: dict[int, dict[Any, Any]] = {}
    own = {
        owner: {name: state for name, one in held.items() if (state := generator_state(one))}
        for owner, held in named_generators(owners, contents).items()
    }
    if saves:
        held = [pair for inside in contents.values() for pair in inside.items() if isinstance(pair[1], Iterator)]
        # A loader that has one for its persistent workers begins anew by it in each epoch.
        _report_iterators(tuple(str(name) for name, one in held if name != "_iterator" and _reads_a_loader(one)))
    return {**rng_state(device), "own": own}


def _reads_a_loader(value: Iterator[Any]) -> bool:
    """Whether an iterator is one over a DataLoader, a function with `yield` that has one, or any `cycle`."""
    if isinstance(value, GeneratorType) and value.gi_frame is not None:
        within = (value.gi_yieldfrom, *value.gi_frame.f_locals.values())
        return any(isinstance(one, DataLoader) or _is_of_loader(one) for one in within)
    return _is_of_loader(value) or type(value) is itertools.cycle


def _is_of_loader(value: Any) -> bool:
    return type(value).__module__.startswith(("torch.utils.data.", "torchdata.")) and isinstance(value, Iterator)


@cache
def _report_iterators(names: tuple[str, ...]) -> None:
    if names:
        log.warning(
            "checkpoints do not have the place of an iterator over a loader that the program itself holds, which a "
            "resumed run begins anew: %s. Give the loader to the trainer, as one of several (a dict, a list, or a "
            "trainer.utilities.CombinedLoader); with an Engine, to engine.setup_dataloaders.",
            printable(first_of(names)),
        )


def set_states_with(owners: Mapping[str, Any], state: dict[str, Any], device: torch.device) -> list[str]:
    """Restore what `states_with` returned; a generator that an owner does not have yet is made.

    Returns:
        the names of generators that are not there, or are of another kind.
    """
    set_rng_state(state, device)
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


def report_lacking(names: Sequence[str]) -> None:
    """Say that a program does not have generators of which a checkpoint has the states."""
    if names:
        log.warning(
            "random generators of the checkpoint that this program does not have, or has of another kind: their states "
            "are not restored: %s",
            printable(first_of(names)),
        )


@contextmanager
def isolated_with(
    owners: Mapping[str, Any], others: Sequence[OwnGenerator], device: torch.device, keeps_new: bool = False
) -> Iterator[None]:
    """Restore the states of the global generators, of those that the owners hold, and of others, on exit.

    Args:
        keeps_new: generators that are made meanwhile stay. Else they are taken from the objects that were there before,
            which make them again, from the start.
    """
    contents: dict[int, dict[Any, Any]] = {}
    own = {id(one): one for held in named_generators(owners, contents).values() for one in held.values()}
    with isolated_rng(device, [*map(OwnGenerator, own.values()), *others]):
        try:
            yield
        finally:
            for owner, held in named_generators({} if keeps_new else owners).items():
                for path, one in held.items():
                    if id(one) not in own:
                        take_back(owners[owner], path, contents)
