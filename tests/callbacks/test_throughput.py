"""ThroughputMonitor logs rates that agree with each other and with the clock."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import torch

from tests.helpers.clock import Clock
from tests.helpers.processes import run_python
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, Logger
from trainer.callbacks import ThroughputMonitor
from trainer.model.peak_flops import PEAKS, measured_peak, peak_by_name
from trainer.precision import tf32_is_allowed


class Kept(Logger):
    """A logger that keeps the rates by name without the prefix, one dict for each step."""

    def __init__(self) -> None:
        self.rates: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        found = {name.split("/")[1]: value for name, value in metrics.items() if name.startswith("throughput/")}
        if found:
            self.rates[step] = found


def rates(module: Toy | None = None, val: Any = None, batches: int = 12, **options: Any) -> dict[int, dict[str, float]]:
    kept = Kept()
    settings = {
        name: options.pop(name) for name in ("val_check_interval", "accumulate_grad_batches") if name in options
    }
    trainer = quiet(
        max_epochs=1, log_every_n_steps=2, logger=kept, callbacks=[ThroughputMonitor(**options)], **settings
    )
    trainer.fit(module or Toy(), loader(batches), val)
    return kept.rates


def test_rates_agree_with_each_other() -> None:
    found = rates(items_per_batch=7, flops_per_sample=1000.0, peak_flops=1e6, accumulate_grad_batches=3)
    assert list(found) == [2, 4]
    for at in found.values():
        assert at["batches_per_s"] == pytest.approx(3 * at["steps_per_s"])
        assert at["samples_per_s"] == pytest.approx(4 * at["batches_per_s"])
        assert at["tokens_per_s"] == pytest.approx(7 * at["batches_per_s"])
        assert at["flops_per_s"] == pytest.approx(1000 * at["samples_per_s"])
        assert at["mfu"] == pytest.approx(at["flops_per_s"] / 1e6)


def test_lightnings_functions_count_samples_and_items() -> None:
    for at in rates(batch_size_fn=lambda batch: 2 * len(batch[0]), length_fn=lambda batch: 7).values():
        assert at["samples_per_s"] == pytest.approx(8 * at["batches_per_s"])
        assert at["items_per_s"] == pytest.approx(7 * at["batches_per_s"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("trainer.callbacks.throughput.time", clock)
    return clock


class Timed(Toy):
    """A module whose batches take times of a clock."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.advance(self.seconds[batch_idx % len(self.seconds)])
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.advance(5.0)


def test_the_first_step_and_compilation_do_not_count(clock: Clock) -> None:
    found = rates(Timed(clock, 100.0, *[0.01] * 11))
    assert all(at["batches_per_s"] == pytest.approx(100) for at in found.values())

    class Compiles(Timed):
        """Compiles another graph for its sixth batch, which takes a minute."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx in (0, 5):
                torch._dynamo.reset()
                torch.compile(lambda x: x + batch_idx, backend="eager")(torch.ones(1))
                self.clock.advance(60.0)
            return super().training_step(batch, batch_idx)

    found = rates(Compiles(clock, 0.01))
    assert list(found) == [2, 4, 8, 10, 12]  # no step since the compilation at step 6
    assert all(at["batches_per_s"] == pytest.approx(100) for at in found.values())


def test_validation_does_not_count(clock: Clock) -> None:
    found = rates(Timed(clock, 0.01), loader(1), val_check_interval=3)
    assert found[12]["batches_per_s"] == pytest.approx(100)


def test_the_window_forgets_older_steps(clock: Clock) -> None:
    found = rates(Timed(clock, 0.2, 0.2, *[0.002] * 10), window_size=4)
    assert found[2]["batches_per_s"] == pytest.approx(5)
    assert found[12]["batches_per_s"] == pytest.approx(500)


def test_items_and_flops_by_function() -> None:
    found = rates(
        items_per_batch=lambda batch: batch[0].numel(),
        items_name="numbers",
        flops_per_sample=lambda module: 6.0 * sum(p.numel() for p in module.parameters()),
    )
    assert found[12]["numbers_per_s"] == pytest.approx(16 * found[12]["batches_per_s"])
    assert found[12]["flops_per_s"] == pytest.approx(30 * found[12]["samples_per_s"])
    assert "mfu" not in found[12]


def test_an_unknown_device_has_no_mfu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trainer"):
        rates(flops_per_sample=1.0)
    assert sum("Pass peak_flops=" in record.message for record in caplog.records) == 1


def test_a_loader_with_an_unknown_number_of_samples() -> None:
    kept = Kept()
    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(4)]
    quiet(max_epochs=1, log_every_n_steps=2, logger=kept, callbacks=[ThroughputMonitor()]).fit(Toy(), batches)
    assert {"steps_per_s", "batches_per_s"} <= set(kept.rates[4])


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A10", torch.float16, 125),
        ("NVIDIA A10G", torch.float16, None),  # of one cloud: no data sheet
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("NVIDIA RTX A1000", torch.bfloat16, None),
        ("Tesla V100-PCIE-32GB", torch.float16, 112),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, None),
    ],
)
def test_peaks(name: str, dtype: torch.dtype, tflops: float | None) -> None:
    assert not tf32_is_allowed()
    peak = peak_by_name(name, dtype)
    assert peak == (None if tflops is None else tflops * 1e12)


def test_tf32_is_the_peak_of_float32_where_it_is_used() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_by_name("NVIDIA A100-SXM4-40GB", torch.float32) == 156e12
    finally:
        torch.set_float32_matmul_precision("highest")


def test_every_peak_has_a_source_of_the_vendor() -> None:
    assert {urlparse(peaks.source).netloc.split(".", 1)[1] for peaks in PEAKS.values()} == {"nvidia.com"}


def test_a_measured_peak_is_the_operations_of_a_product_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 3.0, 10.0, 10.5, 20.0, 20.25])  # three products are timed
    monkeypatch.setattr("trainer.model.peak_flops.time.perf_counter", lambda: next(readings))
    assert measured_peak(torch.device("cpu"), torch.float32, size=16, repeats=3) == 2 * 16**3 / 0.25


@pytest.mark.gpu
def test_the_peak_of_this_device_is_known() -> None:
    from trainer.model.peak_flops import peak_of

    peak = peak_of(torch.device("cuda"), torch.bfloat16)
    assert peak is None or peak > 1e13


@pytest.mark.parametrize("wrong", [{"window_size": 0}, {"items_per_batch": "many"}, {"peak_flops": -1.0}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with raises_recorded(ConfigError):
        ThroughputMonitor(**wrong)


def test_tf32_set_by_the_new_api(tmp_path: Path) -> None:
    """torch then refuses to answer by the old API, for every dtype."""
    done = run_python(
        "import torch\n"
        "from trainer.model.peak_flops import peak_by_name\n"
        "name = 'NVIDIA A100-SXM4-40GB'\n"
        "before = peak_by_name(name, torch.float32)\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "print(before, peak_by_name(name, torch.float32), peak_by_name(name, torch.bfloat16))\n",
        cwd=tmp_path,
    )
    assert done.check().stdout.split() == ["19500000000000.0", "156000000000000.0", "312000000000000.0"]


def test_two_that_would_log_the_same_names_are_refused() -> None:
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, callbacks=[ThroughputMonitor(), ThroughputMonitor(window_size=5)]).fit(Toy(), [])
