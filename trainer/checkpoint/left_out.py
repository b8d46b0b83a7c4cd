"""Write a checkpoint without what it cannot hold, and name that in its info."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.serialization import UnstorableError, place
from trainer.checkpoint.storage import StoragePath
from trainer.distributed.process_group import SingleProcess
from trainer.distributed.sendable import sendable
from trainer.errors import CheckpointError, first_of, printable

log = logging.getLogger("trainer")

LEFT_OUT = "left_out"
"""The names, in the info of a checkpoint, of what it could not hold."""
_REMOVABLE = {"callbacks": 1, "added": 1, "model": 1, "data": 0, "hyperparameters": 2, "engine": 2}
"""Entries that may lack a part, and the number of keys that lead to the part; 0: the whole entry."""


@sendable
class LeftOutError(CheckpointError):
    """A checkpoint was written without what it cannot hold."""


def write_the_rest(
    write: Callable[[dict[str, Any], dict[str, Any]], None],
    state: dict[str, Any],
    info: dict[str, Any],
    weights_alone: Mapping[str, Any],
    processes: SingleProcess,
    sharded: bool,
) -> None:
    """Call `write` with a state and its info, and once more without what cannot be stored. Collective.

    Args:
        sharded: all processes write; else rank 0.
        weights_alone: all of these entries take the place of those in the state if one of them cannot be stored: from
            such a checkpoint no training continues. If anything else cannot be stored, nothing is written.

    Raises:
        LeftOutError: something was left out, and the rest is written.
        Exception: what `write` has raised on one process, on all.
    """
    problem: Exception | None = None
    if processes.is_global_zero or sharded:
        try:
            try:
                write(state, info)
            except UnstorableError as refused:
                left_out = _take_all_out(state, info, refused, weights_alone)
                write(state, info)
                raise LeftOutError(f"{refused} The checkpoint was written, without {first_of(left_out)}.") from refused
        except Exception as error:
            problem = error
    problems = processes.all_gather_object(problem)
    problems[processes.rank] = problem  # with its own class and traceback
    first = next(filter(None, problems), None)
    if first is not None:
        raise first


def _take_all_out(
    state: dict[str, Any], info: dict[str, Any], refused: UnstorableError, weights_alone: Mapping[str, Any]
) -> list[str]:
    """Take what cannot be stored out of a state, and note it in its info; return its names."""
    needed = {path[0] for path, _ in refused.refused} - _REMOVABLE.keys()
    if not needed <= weights_alone.keys():
        raise refused
    info[LEFT_OUT] = left_out = [*dict.fromkeys(_take_out(state, *path) for path, _ in refused.refused)]
    if needed:
        state |= weights_alone
        info["weights_only"] = True
    return left_out


def _take_out(state: dict[str, Any], key: str, *path: Any) -> str:
    """Take the part at a path out of a state; return its name."""
    parts, owner = [key, *path[: _REMOVABLE.get(key, 0)]], state
    for part in parts[:-1]:
        owner = owner.get(part, {})  # another process may have found it, in a part that this one lacks
    if parts == [key]:
        state[key] = {}
    else:
        owner.pop(parts[-1], None)
    return place(parts)


def report_left_out(path: StoragePath, logs: bool) -> list[str]:
    """Return the names of what a checkpoint could not hold, and perhaps log a warning of them."""
    left_out = read_manifest(path).info.get(LEFT_OUT)
    names = [*map(str, left_out)] if isinstance(left_out, list) else []
    if names and logs:
        words = "%s was written without what could not be stored, which therefore begins again: %s"
        log.warning(words, printable(str(path)), printable(first_of(names)))
    return names
