"""StragglerMonitor finds the process that keeps the others waiting."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer.callbacks import StragglerMonitor
from trainer.callbacks.straggler_monitor import StepTimes
from trainer.errors import ConfigError

SLOW_S = 0.1


def times(rank: int, data: float, forward: float, rest: float = 1.0, steps: int = 10) -> StepTimes:
    """Return the times of several equal steps, in seconds."""
    return StepTimes(rank, f"node{rank}", steps, data * steps, forward * steps, rest * steps)


def looks(callback: StragglerMonitor, *every: list[StepTimes]) -> list[str]:
    """Return the messages after several looks."""
    messages = []
    for one in every:
        messages += callback._compare(one)
    return messages


def test_who_is_slow_each_time_is_named_once_with_what_it_waits_for() -> None:
    slow_data = [times(0, 0.1, 0.2), times(1, 0.1, 0.2), times(2, 0.5, 0.2)]
    messages = looks(StragglerMonitor(), *[slow_data] * 5)
    assert messages == [
        "rank 2 on node2 keeps the others waiting: its part of a step takes 700.0 ms, the median of all is 300.0 ms. "
        "Most of it is waiting for data (500.0 ms, the median is 100.0): look at its disk and its num_workers."
    ]
    slow_forward = [times(0, 0.1, 0.9), times(1, 0.1, 0.2), times(2, 0.1, 0.2)]
    assert "rank 0 on node0" in (messages := looks(StragglerMonitor(patience=1), slow_forward))[0]
    assert "Most of it is the forward (900.0 ms, the median is 200.0)" in messages[0]


def test_who_is_slow_now_and_then_is_not_named_nor_who_is_slow_by_next_to_nothing() -> None:
    slow, even = [times(0, 0.1, 0.9), times(1, 0.1, 0.2), times(2, 0.1, 0.2)], [times(r, 0.1, 0.2) for r in range(3)]
    assert looks(StragglerMonitor(), slow, slow, even, slow, slow) == []
    little = [times(0, 0.0, 0.009), times(1, 0.0, 0.001), times(2, 0.0, 0.001)]
    assert looks(StragglerMonitor(patience=1), little) == []


def test_the_table_has_the_slowest_first() -> None:
    callback = StragglerMonitor(max_rows=2)
    callback.total = {rank: times(rank, 0.1 * rank, 0.2) for rank in range(4)}
    lines = callback.table().splitlines()
    assert lines[1].split() == ["rank", "3", "node3", "300.000", "200.000", "1000.000", "1500.000", "500.000"]
    assert lines[2].startswith("rank 2")
    assert lines[3].endswith("the median is 300.000")


class Clock:
    """A clock that advances by a second with every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_every_step_but_the_first_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    callback = StragglerMonitor(every_n_steps=2, clock=Clock())
    trainer = quiet(max_epochs=2, callbacks=[callback], accumulate_grad_batches=2)
    trainer.fit(Toy(), loader(8), loader(1))
    assert callback.total[0].steps == 7
    # Two forwards in each step, a second by this clock each.
    assert callback.total[0].forward == 14.0
    assert capsys.readouterr().out.count("rank 0") == 1


def test_what_is_wrong_is_reported() -> None:
    with raises_recorded(ConfigError):
        StragglerMonitor(every_n_steps=0, patience=0, max_rows=0, factor=1.0)


def of_two(which: str) -> tuple[dict[int, StepTimes], list[str]]:
    """Train with a slow forward or slow data on rank 1; return what rank 0 has measured and logged."""
    messages: list[str] = []

    class Slow(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if which == "forward" and self.trainer.rank == 1:
                time.sleep(SLOW_S)
            return super().training_step(batch, batch_idx)

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("trainer").addHandler(Collect(logging.WARNING))
    callback = StragglerMonitor(every_n_steps=3, patience=2)
    trainer = quiet(devices=2, strategy="ddp", max_epochs=1, callbacks=[callback])
    trainer.fit(Slow(), loader(20))
    return callback.total, [text for text in messages if "keeps the others waiting" in text]


def test_two_processes_wait_for_the_slow_one_and_it_is_named() -> None:
    (total, messages), (also, quiet_one) = run_distributed(of_two, 2, "forward")
    assert total == also
    assert {rank: one.steps for rank, one in total.items()} == {0: 9, 1: 9}
    assert total[1].forward > 9 * SLOW_S > total[0].forward
    assert total[0].rest > total[1].rest
    assert len(messages) == 1
    assert messages[0].startswith("rank 1 on ")
    assert "Most of it is the forward" in messages[0]
    assert quiet_one == []
