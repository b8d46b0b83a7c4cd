"""DeviceStatsMonitor logs the load of the machine at the steps that are logged."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.callbacks import CSVLogger, DeviceStatsMonitor

pytest.importorskip("psutil", reason='needs psutil: pip install "exact-trainer[dev]"')

STATS = ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent")


def test_the_cpu_before_and_after_each_logged_step(tmp_path: Path) -> None:
    trainer = quiet(
        max_epochs=1,
        log_every_n_steps=4,
        logger=CSVLogger(tmp_path),
        callbacks=DeviceStatsMonitor(),
        num_sanity_val_steps=0,
    )
    trainer.fit(Toy(), loader(8), loader(2))
    with open(tmp_path / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["DeviceStatsMonitor.on_train_batch_end/cpu_percent"]]
    assert [row["step"] for row in rows] == ["4", "8"]
    for hook in ("on_train_batch_start", "on_train_batch_end"):
        for name in STATS:
            assert all(0 <= float(row[f"DeviceStatsMonitor.{hook}/{name}"]) <= 100 for row in rows)
    assert "DeviceStatsMonitor.on_validation_batch_end/cpu_vm_percent" in trainer.callback_metrics


def test_without_cpu_stats_nothing_is_logged_on_a_cpu() -> None:
    trainer = quiet(max_epochs=1, log_every_n_steps=1, callbacks=DeviceStatsMonitor(cpu_stats=False))
    trainer.fit(Toy(), loader(4))
    assert not [name for name in trainer.callback_metrics if "DeviceStats" in name]


def test_a_missing_logger_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        quiet(max_steps=1, callbacks=DeviceStatsMonitor()).fit(Toy(), loader(4))
    assert "DeviceStatsMonitor has no logger" in caplog.text


def test_wrong_options_are_refused() -> None:
    with raises_recorded(ConfigError):
        DeviceStatsMonitor(cpu_stats="yes")  # type: ignore[arg-type]
