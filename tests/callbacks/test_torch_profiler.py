"""TorchProfiler writes traces of the chosen steps, with the names of the loop's phases."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.callbacks import LambdaCallback, SimpleProfiler, TorchProfiler
from trainer.metrics.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, TRANSFER


def events(trace: Path) -> list[dict[str, Any]]:
    with gzip.open(trace) as file:
        return list(json.load(file)["traceEvents"])


def named(trace: Path) -> dict[str, int]:
    """Return the number of complete events by name."""
    counts: dict[str, int] = {}
    for event in events(trace):
        if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op"):
            counts[event["name"]] = counts.get(event["name"], 0) + 1
    return counts


def test_a_trace_of_the_steps_asked_for() -> None:
    profiler = TorchProfiler(wait=2, warmup=1, active=3, record_shapes=True)
    own = LambdaCallback(on_train_step_end=lambda trainer, module: None)
    trainer = quiet(max_epochs=1, callbacks=[own, profiler], accumulate_grad_batches=2)
    trainer.fit(Toy(), loader(20))
    (trace,) = profiler.traces
    assert trace == trainer.run_dir / "profile" / "rank0.6.pt.trace.json.gz"
    counts = named(trace)
    assert counts[FORWARD] == counts[BACKWARD] == counts[TRANSFER] == 3 * 2
    assert counts[OPTIMIZER] == 3
    assert counts[DATA] >= 3 * 2
    assert counts["LambdaCallback.on_train_step_end"] == 3
    assert sum(name.startswith("ProfilerStep#") for name in counts) == 3
    linear = [event for event in events(trace) if event.get("name") == "aten::linear"]
    assert [[4, 4], [1, 4], [1]] in [event["args"]["Input Dims"] for event in linear]
    table = trace.with_name("rank0.6.txt").read_text()
    assert FORWARD in table
    assert "Self CPU" in table


def test_operators_are_inside_their_part() -> None:
    profiler = TorchProfiler(wait=0, warmup=1, active=1)
    quiet(max_epochs=1, callbacks=[profiler]).fit(Toy(), loader(3))
    of = events(profiler.traces[0])
    (forward,) = [event for event in of if event.get("name") == FORWARD and event.get("cat") == "user_annotation"]
    linear = [event for event in of if event.get("name") == "aten::linear"]
    assert linear
    assert all(forward["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= forward["ts"] + forward["dur"] for e in linear)


def test_repeated(tmp_path: Path) -> None:
    profiler = TorchProfiler(wait=1, warmup=1, active=1, repeat=2, dirpath=tmp_path / "traces", with_stack=True)
    quiet(max_epochs=1, callbacks=[profiler, SimpleProfiler()]).fit(Toy(), loader(10))
    assert [trace.name for trace in profiler.traces] == ["rank0.3.pt.trace.json.gz", "rank0.6.pt.trace.json.gz"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "rank0.3.pt.trace.json.gz",
        "rank0.3.txt",
        "rank0.6.pt.trace.json.gz",
        "rank0.6.txt",
    ]


def test_by_name_and_too_short_a_run(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=1, profiler="torch")
    with caplog.at_level(logging.WARNING, "trainer"):
        trainer.fit(Toy(), loader(4))
    assert "wait + warmup + active = 10 steps" in caplog.text
    assert not (trainer.run_dir / "profile").exists()


def test_after_an_error_what_there_is_is_written() -> None:
    class Fails(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 4:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    profiler = TorchProfiler(wait=0, warmup=1, active=10)
    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(max_epochs=1, callbacks=[profiler]).fit(Fails(), loader(8))
    (trace,) = profiler.traces
    assert named(trace)[BACKWARD] == 3
    # torch's profiler can be used again.
    again = TorchProfiler(wait=0, warmup=1, active=1)
    quiet(max_epochs=1, callbacks=[again]).fit(Toy(), loader(3))
    assert len(again.traces) == 1


def test_mistakes() -> None:
    with raises_recorded(ConfigError):
        TorchProfiler(wait=-1, active=0)
    with raises_recorded(ConfigError):
        TorchProfiler(sort_by_key="price")  # type: ignore[arg-type]


def test_a_schedule_and_a_handler_as_in_lightning(tmp_path: Path) -> None:
    taken: list[Any] = []
    profiler = TorchProfiler(
        dirpath=tmp_path / "ops",
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=lambda recorded: taken.append(recorded.key_averages()),
        activities=[torch.profiler.ProfilerActivity.CPU],
    )
    quiet(max_epochs=1, profiler=profiler).fit(Toy(), loader(10))
    assert [sum(one.key == FORWARD for one in averages) for averages in taken] == [1, 1]
    assert not profiler.traces
    assert not (tmp_path / "ops").exists()


def test_names_and_tables_of_files(tmp_path: Path) -> None:
    class Measured(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            with self.trainer.profiler.profile("my part"):
                return super().training_step(batch, batch_idx)

    options: dict[str, Any] = {"wait": 0, "warmup": 1, "active": 1, "sort_by_key": "count"}
    folder = tmp_path / "ops"
    for limit in (2, -1):
        profiler = TorchProfiler(folder, f"of{limit}", row_limit=limit, **options)
        quiet(max_epochs=1, profiler=profiler).fit(Measured(), loader(3))
        assert named(profiler.traces[0])["my part"] == 1
    assert {path.name for path in folder.iterdir()} == {
        f"of{limit}.rank0.2.{ending}" for limit in (2, -1) for ending in ("txt", "pt.trace.json.gz")
    }
    few, every = ((folder / f"of{limit}.rank0.2.txt").read_text().splitlines() for limit in (2, -1))
    assert len(every) > len(few) + 20


def on_a_process(folder: str) -> list[str]:
    profiler = TorchProfiler(wait=0, warmup=1, active=2, dirpath=folder)
    quiet(max_epochs=1, strategy="ddp", callbacks=[profiler]).fit(Toy(), loader(8))
    return [trace.name for trace in profiler.traces]


def test_one_file_for_each_process(tmp_path: Path) -> None:
    written = run_distributed(on_a_process, 2, str(tmp_path / "traces"))
    assert written == [["rank0.3.pt.trace.json.gz"], ["rank1.3.pt.trace.json.gz"]]
    assert all(named(tmp_path / "traces" / name)[BACKWARD] == 2 for (name,) in written)
