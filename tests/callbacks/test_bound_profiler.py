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

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, Logger
from trainer.callbacks import BoundProfiler, ModelCheckpoint, ModelSummary
from trainer.callbacks.bound_profiler import (
    COMMUNICATION,
    COMPUTE,
    TimeShares,
    device_spans,
    exclusive_seconds,
    stragglers,
)
from trainer.metrics.phases import DATA, TRANSFER

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


class SlowUpdate(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        time.sleep(LONG)
        return super().step(closure)


class LargeUpdate(Toy):
    """Nearly all of a step is the update."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowUpdate(self.parameters(), lr=0.1, fused=self.fused)


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_is_advised_with_a_bound_of_its_gain(fused: bool) -> None:
    profiler = BoundProfiler(first_step=1, steps=4)
    quiet(max_epochs=2, profiler=profiler).fit(LargeUpdate(fused), loader(8))
    reported = re.search(r"updates are (\d+)% of it: fused=True, at most ([\d.]+) times the speed", profiler.summary())
    if fused:
        assert reported is None
        assert "Bound by compute. compile=True" in profiler.summary()
        return
    assert reported is not None
    updates, compute = int(reported[1]) / 100, float(profiler.summary().partition("compute")[2].partition("%")[0]) / 100
    assert updates > 0.2
    assert 1 - 1 / float(reported[2]) == pytest.approx(updates * compute, abs=0.02)


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


class SlowOnOne(SlowStep):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (super() if self.trainer.rank == 1 else super(SlowStep, self)).training_step(batch, batch_idx)


def told_of_two_processes() -> list[str]:
    """Train where the second process waits for its data, and where its steps are slow."""
    slow_data = DataLoader(SlowData() if os.environ["RANK"] == "1" else loader(4).dataset, batch_size=2)
    reported = []
    for module, data in ((Toy(), slow_data), (SlowOnOne(), loader(8))):
        profiler = BoundProfiler(first_step=1, steps=1)
        quiet(max_epochs=1, devices=2, strategy="ddp", profiler=profiler).fit(module, data)
        reported.append(profiler.summary())
    return reported


def test_of_several_processes_the_one_that_holds_up_the_others_is_described() -> None:
    of_data, of_steps = run_distributed(told_of_two_processes, 2)[0]
    for reported, part in ((of_data, "data wait"), (of_steps, "compute")):
        assert re.search(r"^rank 1 \(.*\), for which the others wait:", reported)
        assert f"Bound by {part}" in reported
        assert re.search(rf"rank 1 \(.*\) spends \d+% in {part}, the median rank", reported)


def test_processes_that_differ_a_little_are_no_stragglers() -> None:
    even = [TimeShares("a", {DATA: 0.02}, 0.0), TimeShares("b", {DATA: 0.05}, 0.0), TimeShares("c", {DATA: 0.06}, 0.0)]
    assert not stragglers(even)
    assert stragglers([*even, TimeShares("d", {DATA: 0.5}, 0.0)]) == [
        "rank 3 (d) spends 50% in data wait, the median rank 5%: the others wait for it in every step."
    ]
