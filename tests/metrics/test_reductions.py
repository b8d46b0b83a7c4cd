"""Running reductions equal Python's, whatever is pending, and keep their bits in a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trainer.metrics.metric_log import LogOptions, MetricLog
from trainer.metrics.reductions import Accumulator, to_host, total_of
from trainer.metrics.state import load_metrics_state, metrics_state


def result(accumulator: Accumulator) -> float:
    value, weight = accumulator.host_value(iter(to_host(accumulator.tensors())))
    assert value is not None
    return value / weight


@pytest.mark.parametrize("weight", [3.0, torch.tensor(3.0)], ids=["host", "device"])
def test_a_mean_so_far_is_over_all_weights(weight: Any) -> None:
    accumulator = Accumulator("mean")
    assert accumulator.local_value() is None
    accumulator.add(torch.tensor(2.0), 1)
    accumulator.add(torch.tensor(6.0), weight)
    assert float(accumulator.local_value()) == 5.0  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [[4] * 200, [4] * 199 + [1], [1, 2, 3, 4, 5] * 40], ids=["same", "last", "mixed"])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_mean_is_that_of_python(weights: list[int], count: int) -> None:
    values = torch.randn(count).unbind()
    accumulator = Accumulator("mean")
    for value, weight in zip(values, weights, strict=False):
        accumulator.add(value, weight)
    used = weights[:count]
    expected = math.fsum(float(v) * w for v, w in zip(values, used, strict=True)) / sum(used)
    assert result(accumulator) == pytest.approx(expected, rel=1e-14)


def test_numbers_of_several_kinds() -> None:
    accumulator = Accumulator("mean")
    for value in (torch.tensor(1.5), torch.tensor(2**40 + 1), 4.0, torch.tensor(0.5, dtype=torch.bfloat16)):
        accumulator.add(value, 1)
    assert result(accumulator) == (2**40 + 1 + 6) / 4


def test_a_value_is_copied_when_it_is_added() -> None:
    accumulator, total = Accumulator("mean"), torch.zeros(())
    for _ in range(4):
        total += 1
        accumulator.add(total, 1)
    assert result(accumulator) == 2.5


def test_numbers_of_several_kinds_in_turns() -> None:
    accumulator = Accumulator("mean")
    for number in range(300):
        accumulator.add(
            torch.tensor(number, dtype=(torch.float32, torch.int64, torch.float64)[number % 3]), 1 + number % 2
        )
    weights = [1 + number % 2 for number in range(300)]
    assert result(accumulator) == sum(n * w for n, w in enumerate(weights)) / sum(weights)


def test_a_value_with_a_gradient_holds_no_graph() -> None:
    accumulator = Accumulator("mean")
    parameter = torch.ones((), requires_grad=True)
    accumulator.add(parameter * 3, 1)
    accumulator.add(parameter * 5, 1)
    assert not any(tensor.requires_grad for tensor in accumulator.tensors())
    assert result(accumulator) == 4


def test_values_of_inference_mode_and_of_training_go_together() -> None:
    accumulator = Accumulator("mean")
    with torch.inference_mode():
        for number in range(70):
            accumulator.add(torch.tensor(float(number)), 1)
    for number in range(70, 200):
        accumulator.add(torch.tensor(float(number)), 1)
    assert result(accumulator) == sum(range(200)) / 200


def log_of(values: list[torch.Tensor]) -> MetricLog:
    log = MetricLog(torch.nn.Linear(1, 1), lambda value: [value])
    log.scope = log.train
    log.start_batch(None, samples=1)
    add(log, values)
    return log


def add(log: MetricLog, values: list[torch.Tensor]) -> None:
    for value in values:
        log.log("loss", value, None, *LogOptions(on_step=False, on_epoch=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stop", [1, 64, 70, 128, 150])
def test_a_mean_that_went_through_a_checkpoint_has_the_same_bits(stop: int, dtype: torch.dtype) -> None:
    values: list[Any] = list((torch.randn(200) * 1e3).to(dtype).unbind())
    uninterrupted = log_of(values)
    broken, resumed = log_of(values[:stop]), log_of([])
    load_metrics_state(resumed, [metrics_state(broken)], torch.device("cpu"))
    add(resumed, values[stop:])
    assert resumed.read_epoch(resumed.train).all == uninterrupted.read_epoch(uninterrupted.train).all


def test_a_logged_tensor_may_have_any_shape_of_one_element() -> None:
    log = log_of([torch.tensor(1.0), torch.tensor([2.0]), torch.tensor([[6.0]])])
    assert log.read_epoch(log.train).all == {"loss": 3.0}


def test_to_look_at_a_mean_changes_no_bit_of_it() -> None:
    values: list[Any] = list((torch.randn(200) * 1e3).unbind())
    uninterrupted, looked = log_of(values), log_of([])
    for value in values:
        add(looked, [value])
        looked.peek_epoch(looked.train)
    assert looked.read_epoch(looked.train).all == uninterrupted.read_epoch(uninterrupted.train).all


@pytest.mark.parametrize("shapes", [[(), ()], [(), (1,), (1, 1)]], ids=["alike", "several shapes"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_total_of_losses_is_finite_only_if_all_are(shapes: list[tuple[int, ...]], bad: float) -> None:
    losses = [torch.full(shape, 2.0) for shape in shapes]
    assert float(total_of(losses)) == 2.0 * len(shapes)
    assert not math.isfinite(total_of([*losses, torch.tensor(bad)]))
    assert float(total_of([torch.tensor(6e4, dtype=torch.float16)] * 2)) > 1e5
