"""The end of a run tells what its time went into, and BoundProfiler what to change; long waits are compared."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, Logger
from trainer.callbacks import BoundProfiler, ModelCheckpoint, ModelSummary
from trainer.callbacks.bound_profiler import (
    COMMUNICATION,
    COMPUTE,
    device_spans,
    exclusive_seconds,
)
from trainer.metrics.phases import TRANSFER

LONG = 0.2


class SlowData(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        time.sleep(LONG)
        return torch.ones(4), torch.ones(1)


class SlowHook(Callback):
    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        time.sleep(4 * LONG)


class SlowLogger(Logger):
    def log_metrics(self, metrics: Any, step: int) -> None:
        time.sleep(4 * LONG)


class SlowState(Callback):
    """A state that takes long to collect for a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(4 * LONG)
        return {"x": 1}


class SlowStep(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(4 * LONG)
        return super().training_step(batch, batch_idx)


class SlowTransfer(Toy):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(4 * LONG)
        return batch


def saving(folder: Path) -> dict[str, Any]:
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1)
    return {"callbacks": [SlowState(), checkpoint], "enable_checkpointing": True}


CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "data wait": (lambda folder: {"data": DataLoader(SlowData(), batch_size=4)}, "num_workers=0"),
    "callbacks": (lambda folder: {"callbacks": [SlowHook()]}, 'profiler="simple"'),
    "logging": (lambda folder: {"logger": SlowLogger(), "log_every_n_steps": 1}, "log_every_n_steps (it is 1)"),
    "saving": (saving, "async_save=True"),
    "transfer to device": (lambda folder: {"module": SlowTransfer()}, "in the dataset or in collate_fn"),
    "compute": (lambda folder: {"module": SlowStep()}, "`trainer tune throughput` measures their gain"),
}


@pytest.mark.parametrize("bound", CASES)
def test_what_bounds_a_run_is_named(bound: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, advice = CASES[bound]
    settings = make(tmp_path)
    module, data = settings.pop("module", Toy()), settings.pop("data", loader(4))
    callbacks = [ModelSummary(), *settings.pop("callbacks", [])]
    profiler = BoundProfiler(first_step=1, steps=2)
    trainer = quiet(max_epochs=1, profiler=profiler, callbacks=callbacks, default_root_dir=tmp_path, **settings)
    trainer.fit(module, data)
    printed = capsys.readouterr().out
    assert f"Bound by {bound}" in printed
    assert advice in profiler.summary()
    on_host = "the steps and the rest" if bound == "compute" else bound
    assert f"s of the host: {on_host} " in printed
    assert "says what to change" not in printed  # this is it
    assert sum(trainer.run.times.shares().values()) == pytest.approx(1)


@pytest.mark.parametrize(("callback", "hint"), [(SlowHook(), True), (Callback(), False)])
def test_the_line_of_a_run_names_the_profiler_where_something_else_than_the_steps_takes_most(
    callback: Callback, hint: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Toy() if hint else SlowStep()
    quiet(max_epochs=1, callbacks=[ModelSummary(), callback], default_root_dir=tmp_path).fit(module, loader(4))
    assert ('Trainer(profiler="bound") says what to change' in capsys.readouterr().out) == hint


def test_a_short_run_says_that_no_steps_were_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(max_steps=2, profiler="bound").fit(SlowStep(), loader(4))  # longer than whatever a busy machine adds
    printed = capsys.readouterr().out
    assert "no steps were profiled: the run had fewer than 13" in printed
    assert "Bound by the steps and the rest. BoundProfiler(first_step=1, steps=1)" in printed


def test_slow_storage_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that takes long for each flush, as network storage does."""
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(LONG), flush(file)))
    profiler = BoundProfiler(first_step=1, steps=1)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    settings: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [checkpoint], "default_root_dir": tmp_path}
    trainer = quiet(max_steps=4, profiler=profiler, **settings)
    trainer.fit(Toy(), loader(4))
    assert checkpoint.write_seconds is not None
    assert checkpoint.write_seconds > 2 * LONG
    reported = re.search(r"Bound by saving.* took ([\d.]+) s for ([\d.]+) MB. The storage is slow", profiler.summary())
    assert reported is not None
    assert float(reported[1]) == pytest.approx(checkpoint.write_seconds, abs=0.1)
    size = sum(file.stat().st_size for file in Path(checkpoint.last_model_path).iterdir())
    assert float(reported[2]) == pytest.approx(size / 1e6, rel=0.2)


def test_a_time_of_a_device_counts_once() -> None:
    class Event:
        device_type = SimpleNamespace(name="CUDA")

        def __init__(self, name: str, start: float, end: float) -> None:
            self.name, self.time_range = name, SimpleNamespace(start=start * 1e6, end=end * 1e6)

    events = [
        Event("ncclDevKernel_AllReduce", 0, 4),
        Event("sgemm", 1, 3),
        Event("sgemm", 2, 3.5),
        Event("Memcpy HtoD", 3, 6),
    ]
    seconds = exclusive_seconds(device_spans(events, "cuda"))
    assert seconds == {COMPUTE: 2.5, TRANSFER: 2.5, COMMUNICATION: 1.0}
