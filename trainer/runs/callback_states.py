"""Find the state of each callback in a checkpoint by what the callback is, not by its place in the list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.callback import Callback

OF_CALLBACK = "callback "
"""The beginning of the name of a callback among the owners of random generators."""


class Restored(NamedTuple):
    """The states of a checkpoint, sorted by their owners in this run."""

    owners: dict[str, Callback]
    """The callbacks by the keys that their states have in the checkpoint."""
    ambiguous: list[str]
    """Keys of states that may belong to several callbacks of this run, and are not restored."""
    unused: list[str]
    """Keys of the other states."""


def callbacks_by_state_key(callbacks: list[Callback]) -> dict[str, Callback]:
    """Return the callbacks by `state_key`; further callbacks with the same key get a number."""
    by_key: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.state_key, 1
        while key in by_key:
            number += 1
            key = f"{callback.state_key}-{number}"
        by_key[key] = callback
    return by_key


def states_of_generators(
    callbacks: list[Callback], checkpoint: Mapping[str, Any], rng: dict[str, Any]
) -> dict[str, Any]:
    """Return the states of random generators in a checkpoint, by the names that their callbacks have in this run."""
    names = {OF_CALLBACK + key: OF_CALLBACK + now for key, now in keys_here(callbacks, checkpoint).items()}
    own = {}
    for owner, states in rng.get("own", {}).items():
        if owner in names or not owner.startswith(OF_CALLBACK):
            own[names.get(owner, owner)] = states
    return {**rng, "own": own}


def keys_here(callbacks: list[Callback], checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that the callbacks of a checkpoint's states have in this run, by their keys in the checkpoint."""
    now = {id(callback): key for key, callback in callbacks_by_state_key(callbacks).items()}
    return {key: now[id(callback)] for key, callback in owners_of_states(callbacks, checkpoint).owners.items()}


def identities(callbacks: list[Callback]) -> dict[str, dict[str, str]]:
    """Return for each key of `callbacks_by_state_key` the `state_key`, and a fingerprint of the arguments."""
    by_key = callbacks_by_state_key(callbacks)
    return {key: {"of": one.state_key, "made_with": _made_with(one)} for key, one in by_key.items()}


def _made_with(callback: Callback) -> str:
    return str(vars(callback).get("_made_with", ""))  # missing if a user's `__new__` does not call the base's


def owners_of_states(callbacks: list[Callback], checkpoint: Mapping[str, Any]) -> Restored:
    """Find the callback of each state by its `state_key`, and by its arguments if several have the same key.

    Callbacks that are alike in both may stand for each other. The only one of a `state_key` takes its only state, even
    if its arguments were changed.
    """
    states: Mapping[str, Any] = checkpoint["callbacks"]
    saved: Mapping[str, Mapping[str, str]] = checkpoint.get("callback_identities", {})
    owners: dict[str, Callback] = {}
    ambiguous: list[str] = []
    for state_key in dict.fromkeys(callback.state_key for callback in callbacks):
        mine = [callback for callback in callbacks if callback.state_key == state_key]
        made_with = {key: one["made_with"] for key, one in saved.items() if one["of"] == state_key}
        found = _made_alike(mine, made_with)
        if len(mine) == len(made_with) == 1:
            found = dict(zip(made_with, mine, strict=True))
        if len(found) < len(mine):
            ambiguous += [key for key in made_with if key in states and key not in found]
        owners |= found
    unused = [key for key in states if key not in owners and key not in ambiguous]
    return Restored(owners, ambiguous, unused)


def _made_alike(callbacks: list[Callback], made_with: Mapping[str, str]) -> dict[str, Callback]:
    """Return the callbacks by the keys of the states whose callbacks were made with the same arguments.

    Args:
        made_with: fingerprints of arguments, by the keys of states.
    """
    owners: dict[str, Callback] = {}
    for arguments in dict.fromkeys(made_with.values()):
        alike = [key for key, one in made_with.items() if one == arguments]
        to_give = [callback for callback in callbacks if _made_with(callback) == arguments]
        if len(alike) <= len(to_give):  # else which of them is missing would be a guess
            owners |= dict(zip(alike, to_give, strict=False))
    return owners
