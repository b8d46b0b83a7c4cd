"""TensorBoard's own reader reads the event files of TensorBoardLogger."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from trainer.callbacks.tensorboard import _EventFile

pytest.importorskip("tensorboard")


def events(path: Path) -> list[Any]:
    """Return all events; the reader checks the checksums of each record."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    return [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]


def points(path: Path) -> list[tuple[int, str, float]]:
    return [(e.step, v.tag, v.simple_value) for e in events(path) for v in e.summary.value]


def test_numbers_that_a_float_cannot_hold() -> None:
    file = _EventFile(Path("a"))
    file.add_scalars({"a": math.inf, "b": -1e300, "c": math.nan}, 2**40)
    file.flush()
    (_, _, a), (step, _, b), (_, _, c) = points(file.path)
    assert (a, b, step) == (math.inf, -math.inf, 2**40)
    assert math.isnan(c)


def test_a_second_file_of_the_same_second_has_a_later_name_and_purges() -> None:
    first, second = _EventFile(Path("a")), _EventFile(Path("a"), purge_step=7)
    assert first.path.name < second.path.name
    last = events(second.path)[-1]
    assert (last.step, last.session_log.status) == (7, last.session_log.START)


def test_points_are_kept_while_the_disk_is_full(caplog: pytest.LogCaptureFixture) -> None:
    file = _EventFile(Path("a"))
    path, file.path = file.path, Path("/dev/full")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            file.add_scalars({"loss": 1.0}, step)
            file.flush()
    assert len([r for r in caplog.records if "cannot write" in r.message]) == 1
    file.path = path
    file.flush()
    assert points(path) == [(0, "loss", 1.0), (1, "loss", 1.0), (2, "loss", 1.0)]
