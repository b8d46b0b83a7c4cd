"""Recompilations are counted by cause, and a warning comes for causes that return."""

from __future__ import annotations

import logging

import pytest

from trainer.model.recompilation import MOST_WARNINGS, RecompilationMonitor


def test_a_cause_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = RecompilationMonitor(threshold=3)
    for _ in range(5):
        monitor.add_recompilation("size", "the size changes")
    monitor.add_recompilation("number", "a number changes")
    assert monitor.recompilations == {"size": 5, "number": 1}
    assert [record.getMessage() for record in caplog.records] == ["the size changes"]
    assert caplog.records[0].levelno == logging.WARNING


def test_warnings_end(caplog: pytest.LogCaptureFixture) -> None:
    monitor = RecompilationMonitor()
    for length in range(2 * MOST_WARNINGS):
        monitor.add_recompilation(length, f"length {length}")
    assert len(caplog.records) == MOST_WARNINGS
    assert caplog.records[-1].getMessage() == "length 9 That was the last warning of this kind."
