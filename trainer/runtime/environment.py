"""Which process this is, read from the variables of whatever started it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trainer.errors import raise_problems

_REQUIRED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOW = (
    "Start with torchrun, which sets all of them, or unset them (unset RANK LOCAL_RANK WORLD_SIZE "
    "LOCAL_WORLD_SIZE) to run as a single process."
)


@dataclass(frozen=True)
class Environment:
    """The place of this process among all processes of the run."""

    rank: int = 0
    local_rank: int = 0
    """The number of this process on its own machine."""
    world_size: int = 1
    local_world_size: int = 1
    """Processes on this machine."""
    node_rank: int = 0
    num_nodes: int = 1
    source: str = "single process"
    """Who said so: `"torchrun"` (also our own launcher, and all who set the same variables) or `"single process"`."""
    restart_count: int = 0
    """How often torchrun has restarted the processes (`--max-restarts`)."""


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """The first environment that is recognised; a single process if there is none.

    Raises:
        ConfigError: the variables are incomplete or contradict each other.
    """
    for detect in _DETECTORS:
        environment = detect(environ)
        if environment is not None:
            return environment
    return Environment()


def _torchrun(environ: Mapping[str, str]) -> Environment | None:
    # MASTER_ADDR and MASTER_PORT alone mean nothing: clusters and shell profiles export them by habit.
    if not any(name in environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        return None
    given = ", ".join(f"{name}={environ[name]}" for name in _REQUIRED if name in environ)
    missing = [name for name in _REQUIRED if not environ.get(name)]
    if missing:
        raise_problems([f"{given} set, but not {', '.join(missing)}. {_HOW}"], "the environment")
    problems: list[str] = []

    def number(name: str, default: int = 0) -> int:
        text = environ.get(name, "") or str(default)
        if not text.isdecimal():
            problems.append(f"{name}={text!r} is not a whole number from 0. {_HOW}")
            return default
        return int(text)

    rank, local_rank = number("RANK"), number("LOCAL_RANK")
    world_size, local_world_size = number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE")
    number("MASTER_PORT")
    if not problems:
        if rank >= world_size:
            problems.append(f"RANK={rank} must be smaller than WORLD_SIZE={world_size}. {_HOW}")
        if local_rank >= local_world_size:
            problems.append(f"LOCAL_RANK={local_rank} must be smaller than LOCAL_WORLD_SIZE={local_world_size}. {_HOW}")
        if local_world_size > world_size:
            problems.append(
                f"LOCAL_WORLD_SIZE={local_world_size} must not be larger than WORLD_SIZE={world_size}. {_HOW}"
            )
    raise_problems(problems, "the environment")
    node_name = "GROUP_RANK" if "GROUP_RANK" in environ else "NODE_RANK"
    environment = Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=number(node_name, default=rank // local_world_size),
        num_nodes=number("GROUP_WORLD_SIZE", default=-(-world_size // local_world_size)),
        source="torchrun",
        restart_count=number("TORCHELASTIC_RESTART_COUNT"),
    )
    raise_problems(problems, "the environment")
    return environment


_DETECTORS: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (_torchrun,)
"""In order: the first that recognises its variables decides. Each raises `ConfigError` on half of them."""
