"""Trainings killed at random times resume to the same bits; a short `python -m benchmarks sigkill`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sigkill import disturbed, undisturbed

KILLS = 9


@pytest.mark.slow
def test_a_training_that_is_killed_at_random_ends_with_the_same_bits(memory_folder: Path) -> None:
    epochs = ("--epochs", "60")
    uninterrupted = undisturbed(memory_folder / "uninterrupted", *epochs)
    outcome = disturbed(memory_folder / "killed", uninterrupted, KILLS, 5, 0.5, *epochs)
    assert outcome.problems == []
    assert outcome.kills >= KILLS - 2  # the last processes may end before they are killed
