from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.helpers.processes import wait_until
from tests.messages import raises_recorded
from trainer import Trainer
from trainer.errors import ConfigError
from trainer.fault_tolerance.deadline import Deadline
from trainer.fault_tolerance.stop import DEADLINE, EXIT_RETRY, StopCoordinator, exit_code
from trainer.settings import read_deadline


def test_readings() -> None:
    utc = datetime(2030, 5, 31, 16, 0, tzinfo=UTC)
    for text in ("2030-05-31T18:00+02:00", "2030-05-31T16:00Z", "2030-05-31 16:00:00+00:00"):
        assert read_deadline(text) == utc
    local = read_deadline("2030-05-31T18:00")
    assert (local.hour, local.tzinfo is not None) == (18, True)
    assert read_deadline(datetime(2030, 5, 31, 18, 0)) == local
    with pytest.raises(ValueError, match="tomorrow"):
        read_deadline("tomorrow")


def test_asks_to_stop_so_much_before() -> None:
    coordinator = StopCoordinator(None)
    deadline = Deadline(datetime.now().astimezone() + timedelta(seconds=30.3), margin=30.0)
    deadline.start(coordinator)
    assert coordinator.check(0) is None
    wait_until(lambda: coordinator.requested)
    assert deadline.when > datetime.now().astimezone() + timedelta(seconds=5)
    assert coordinator.check(1) == DEADLINE
    assert exit_code(DEADLINE) == EXIT_RETRY == 75
    deadline.stop()
    deadline.stop()


def test_stops_no_more_when_it_is_stopped() -> None:
    coordinator = StopCoordinator(None)
    deadline = Deadline(datetime.now().astimezone() + timedelta(hours=1), margin=0.0)
    deadline.start(coordinator)
    assert any(thread.name == "deadline" for thread in threading.enumerate())
    deadline.stop()
    assert not any(thread.name == "deadline" for thread in threading.enumerate())
    assert not coordinator.requested


def test_learns_its_margin() -> None:
    deadline = Deadline(datetime.now().astimezone() + timedelta(hours=1))
    assert deadline.margin == 65  # no save is known
    deadline.saved(2.0)
    deadline.saved(1.0)
    assert deadline.margin == pytest.approx(8)
    coordinator = StopCoordinator(None)
    deadline.start(coordinator)
    for step in range(3):
        coordinator.check(step)
    time.sleep(1.3)  # a long step
    wait_until(lambda: 8.7 < deadline.margin < 20, 20, deadline.margin)
    deadline.stop()


def test_arguments() -> None:
    with pytest.raises(ConfigError) as error:
        Trainer(deadline="2020-01-01T00:00", deadline_margin=-1, watchdog_seconds=-1, max_restarts=-1)
    for text in ("is over", "deadline_margin=-1", "watchdog_seconds=-1", "max_restarts=-1"):
        assert text in str(error.value)
    with raises_recorded(ConfigError):
        Trainer(deadline="soon")
    Trainer(watchdog_seconds=None, max_restarts=2, deadline=datetime.now() + timedelta(hours=1))
