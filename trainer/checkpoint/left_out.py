"""Write a checkpoint without what it cannot hold, and name that in its info."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.serialization import UnstorableError
from trainer.checkpoint.storage import StoragePath
from trainer.distributed.sendable import sendable
from trainer.errors import CheckpointError, first_of, printable

log = logging.getLogger("trainer")

LEFT_OUT = "left_out"
"""The names, in the info of a checkpoint, of what it could not hold."""
_APART = {"callbacks": 1, "added": 1, "model": 1, "data": 0, "hyperparameters": 2, "engine": 2}
"""Entries of which a part may be missing, and how many keys lead to one; 0: the whole entry."""


@sendable
class LeftOutError(CheckpointError):
    """A checkpoint was written without what it cannot hold."""


def left_out_of(info: Mapping[str, Any]) -> list[str]:
    """Return the names of what a checkpoint with this info could not hold."""
    names = info.get(LEFT_OUT)
    return [*map(str, names)] if isinstance(names, list) else []


def report_left_out(path: StoragePath, logs: bool) -> list[str]:
    """Return the names of what a checkpoint could not hold, and perhaps log a warning of them."""
    left_out = left_out_of(read_manifest(path).info)
    if left_out and logs:
        words = "%s was written without what could not be stored, which therefore begins anew: %s"
        log.warning(words, printable(str(path)), printable(first_of(left_out)))
    return left_out


def write_the_rest(
    write: Callable[[dict[str, Any], dict[str, Any]], None],
    state: dict[str, Any],
    info: dict[str, Any],
    weights_alone: Mapping[str, Any],
) -> None:
    """Call `write` with a state and its info, and without what cannot be stored, which is then taken out of both.

    Args:
        weights_alone: entries with which no training goes on, in place of those that cannot be stored; {}: there are
            none, and the write fails.

    Raises:
        LeftOutError: something was left out, and the rest is written.
    """
    try:
        write(state, info)
    except UnstorableError as error:
        refused = error
    else:
        return
    keys = {path[0] for path, _ in refused.refused}
    if "info" in keys or (keys - _APART.keys() and not keys - _APART.keys() <= weights_alone.keys()):
        raise refused
    left_out = [*dict.fromkeys(_take_out(state, *path) for path, _ in refused.refused)]
    if keys - _APART.keys():
        state |= weights_alone
        info["weights_only"] = True
    info[LEFT_OUT] = left_out
    write(state, info)
    raise LeftOutError(f"{refused} The checkpoint was written, without {first_of(left_out)}.") from refused


def _take_out(state: dict[str, Any], key: str, *path: Any) -> str:
    """Take the part of an entry out of a state to which a path leads; return its name."""
    parts = path[: _APART.get(key, 0)]
    if parts:
        owner = state[key]
        for part in parts[:-1]:
            owner = owner[part]
        owner.pop(parts[-1], None)
    elif key in _APART:
        state[key] = {}
    return key + "".join(f"[{part!r}]" for part in parts)
