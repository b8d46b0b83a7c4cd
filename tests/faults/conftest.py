"""A folder for trainings that write many checkpoints."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def memory_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where the system has one: a killed process loses nothing there that it would keep on a disk,
    and nobody waits for a disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("runs")
        return
    with tempfile.TemporaryDirectory(prefix="trainer-tests-", dir=memory) as folder:
        yield Path(folder)
