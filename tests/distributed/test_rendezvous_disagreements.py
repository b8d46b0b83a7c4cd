"""Processes whose settings contradict each other all raise an error instead of waiting."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.helpers.processes import fork_python, start_python
from trainer.distributed.environment import Environment
from trainer.distributed.rendezvous import join_store
from trainer.distributed.store import free_port
from trainer.testing.processes import Result

# Half an hour, the default of a run: the test kills a process that waits for so long.
JOIN = """
import os
from datetime import timedelta
from trainer.errors import ConfigError
from trainer.distributed.environment import detect_environment
from trainer.distributed.rendezvous import join_store

try:
    place = detect_environment()
    store = join_store(place, timedelta(seconds=1800))
    store.set(f"here/{place.rank}", "1")
    store.wait([f"here/{rank}" for rank in range(place.world_size)])
except ConfigError as error:
    print("refused:", error)
else:
    print("joined")
    store.add("left", 1)
    while place.rank == 0 and store.add("left", 0) < place.world_size:
        pass
"""


def join(*ranks: tuple[int, int]) -> list[Result]:
    """Start a process for each rank and world size, and wait until all have ended."""
    Path("join.py").write_text(JOIN)
    port = str(free_port())
    started = [
        fork_python(
            "join.py",
            env={
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            number=number,
        )
        for number, (rank, size) in enumerate(ranks)
    ]
    return [one.wait().check() for one in started]


def test_processes_that_agree_join() -> None:
    assert [one.stdout.strip() for one in join((0, 3), (1, 3), (2, 3))] == ["joined"] * 3


@pytest.mark.parametrize("ranks", [((0, 2), (1, 3)), ((0, 3), (1, 2))])
def test_world_sizes_that_differ_are_reported_on_all(ranks: tuple[tuple[int, int], ...]) -> None:
    for one in join(*ranks):
        assert "refused: the processes do not agree how many they are" in one.stdout
        for rank, size in ranks:
            assert f"rank {rank} has WORLD_SIZE={size}" in one.stdout


@pytest.mark.parametrize("ranks", [((0, 3), (1, 3), (1, 3)), ((0, 2), (0, 2))])
def test_a_rank_that_is_there_twice_is_reported_on_all(ranks: tuple[tuple[int, int], ...]) -> None:
    twice = ranks[-1][0]
    for one in join(*ranks):
        assert f"refused: rank {twice} is there twice: process " in one.stdout
        assert f"both have RANK={twice}. Give each process another RANK" in one.stdout


def test_whoever_comes_late_does_not_stop_those_that_have_met() -> None:
    """A process that joins again is not reported as a duplicate, either."""
    port = free_port()
    environment = Environment(0, 0, 1, 1, 0, 1, "torchrun", "127.0.0.1", port)
    first = join_store(environment, timedelta(seconds=30))
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    late = start_python(JOIN, env={**env, "MASTER_PORT": str(port)}).wait().check()
    assert "refused: rank 0 is there twice" in late.stdout
    assert "If they belong to two runs, give one of them another MASTER_PORT" in late.stdout
    again = join_store(environment, timedelta(seconds=30))
    first.set("key", "1")
    again.set("key", "2")
    assert (first.get("key"), again.get("key")) == (b"1", b"2")
