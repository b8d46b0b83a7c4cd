"""Calls are made in order by one thread; a client that hangs or fails holds up nobody."""

from __future__ import annotations

import logging
import threading

import pytest

from trainer.metrics import background_calls
from trainer.metrics.background_calls import BackgroundCalls


def test_in_order_and_in_another_thread() -> None:
    calls, done = BackgroundCalls("Mine"), []
    for number in range(100):
        calls.call(lambda n: done.append((n, threading.current_thread().name)), number)
    assert calls.wait(60)
    assert done == [(number, "Mine-calls") for number in range(100)]
    calls.call(done.clear)  # a new thread, after the first has ended
    assert calls.wait(60)
    assert not done


def test_what_is_not_done_is_known(caplog: pytest.LogCaptureFixture) -> None:
    calls, go_on = BackgroundCalls("Mine"), threading.Event()
    calls.call(go_on.wait, keep="first")
    calls.call(print)
    calls.call(print, keep="third")
    assert calls.unfinished() == ["first", "third"]
    assert not calls.wait(0.01)
    assert "Mine: 3 calls are not done after 0 s, and are given up" in caplog.text
    go_on.set()
    assert calls.wait(60)
    assert calls.unfinished() == []


def test_an_error_is_reported_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    def fail(number: int) -> None:
        raise OSError(f"no route {number}")

    calls, done = BackgroundCalls("Mine"), []
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            calls.call(fail, number)
        calls.call(done.append, 1)
        assert calls.wait(60)
    assert done == [1]
    assert caplog.text.count("Mine: OSError in fail: no route 0. Training goes on.") == 1
    assert "no route 1" not in caplog.text
    assert "Mine: 3 calls failed, and for 0 there was no room" in caplog.text


def test_a_client_that_hangs_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_calls, "LONGEST_QUEUE", 3)
    calls, go_on = BackgroundCalls("Mine"), threading.Event()
    for _ in range(5):
        calls.call(go_on.wait)
    go_on.set()
    assert calls.wait(60)
    assert "0 calls failed, and for 2 there was no room" in caplog.text
