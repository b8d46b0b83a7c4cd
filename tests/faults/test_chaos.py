"""Trainings that are disturbed at random end with the bits of undisturbed ones: `python -m benchmarks chaos`."""

from __future__ import annotations

import sys

import pytest

from benchmarks.chaos import chaos, drawn
from trainer.strategies import STRATEGIES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def test_a_training_killed_three_times() -> None:
    """On the way a file cannot be written, and the clock jumps."""
    assert chaos(0, seed=22, strategies=["single_device"], trials=1) == []


def test_every_strategy(minutes: float, request: pytest.FixtureRequest) -> None:
    assert chaos(minutes, seed=1000 * request.config.getoption("seed")) == []


def test_a_trial_is_drawn_from_its_seed_alone() -> None:
    names = list(STRATEGIES)
    trials = [drawn(seed, names) for seed in range(300)]
    assert [str(drawn(seed, names)) for seed in range(300)] == [str(trial) for trial in trials]
    assert [list(map(str, drawn(seed, names).starts)) for seed in range(9)] == [
        list(map(str, trial.starts)) for trial in trials[:9]
    ]
    assert {trial.strategy for trial in trials} == set(names)
