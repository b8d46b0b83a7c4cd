"""held_generators: save and restore the random generators of a program: the global ones, and those of its objects."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

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


def states_with(owners: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators, and of those that the owners hold, as data."""
    own = {
        owner: {name: state for name, one in held.items() if (state := generator_state(one))}
        for owner, held in named_generators(owners).items()
    }
    return {**rng_state(device), "own": own}


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
