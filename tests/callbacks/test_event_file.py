"""EventFile: what TensorBoard's own reader finds in it."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from trainer.event_file import EventFile

pytest.importorskip("tensorboard")


def events(path: Path) -> list[Any]:
    """All events; the reader checks each record's checksums."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    return [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]


def points(path: Path) -> list[tuple[int, str, float]]:
    return [(e.step, v.tag, v.simple_value) for e in events(path) for v in e.summary.value]


def test_it_begins_with_the_version_and_keeps_points_in_order() -> None:
    file = EventFile(Path("a"))
    for step in range(300):
        file.add_scalars({"loss": step / 2, "größe/π": -step}, step)
    file.close()
    assert events(file.path)[0].file_version == "brain.Event:2"
    assert points(file.path) == [p for s in range(300) for p in ((s, "loss", s / 2), (s, "größe/π", -s))]


def test_numbers_that_a_float_cannot_hold() -> None:
    file = EventFile(Path("a"))
    file.add_scalars({"a": math.inf, "b": -1e300, "c": math.nan}, 2**40)
    file.close()
    (_, _, a), (step, _, b), (_, _, c) = points(file.path)
    assert (a, b, step) == (math.inf, -math.inf, 2**40)
    assert math.isnan(c)


def test_a_second_file_of_the_same_second_has_a_later_name_and_purges() -> None:
    first, second = EventFile(Path("a")), EventFile(Path("a"), purge_step=7)
    assert first.path.name < second.path.name
    first.close()
    second.close()
    last = events(second.path)[-1]
    assert (last.step, last.session_log.status) == (7, last.session_log.START)


def test_what_cannot_be_written_waits(caplog: pytest.LogCaptureFixture) -> None:
    file = EventFile(Path("a"))
    assert file._file is not None
    path, file.path = file.path, Path("/dev/full")
    file._file.close()
    file._file = None
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            file.add_scalars({"loss": 1.0}, step)
            file.write()
    assert len([r for r in caplog.records if "cannot write" in r.message]) == 1
    file._file.close()
    file._file = open(path, "r+b", buffering=0)  # type: ignore[assignment]  # noqa: SIM115
    file.close()
    assert points(path) == [(0, "loss", 1.0), (1, "loss", 1.0), (2, "loss", 1.0)]
