"""The state of DeepSpeed's engines is saved by name and shard, and read by any strategy on any number of processes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.helpers.deepspeed_runs import (
    ENGINES,
    SHARD_ALL,
    Net,
    Running,
    by_hand,
    differences,
    gather_full,
    strictly,
)
from tests.helpers.processes import run_distributed
from trainer.errors import CheckpointError
from trainer.strategies.deepspeed.strategy import (
    DeepSpeedStage1Strategy,
    DeepSpeedStage3Strategy,
)
from trainer.strategies.single import SingleDeviceStrategy

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")

SUMMED_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
LOW = {
    **ENGINES,
    # In this case ZeRO 1 has a class of its own.
    "1, summed in fp32": lambda: DeepSpeedStage1Strategy(SUMMED_IN_FP32),
    "3, summed in fp32": lambda: DeepSpeedStage3Strategy({**SHARD_ALL, **SUMMED_IN_FP32}),
}
CELLS = [
    *(("32-true", engine) for engine in ENGINES),
    *(("bf16-mixed", engine) for engine in LOW),
    *(("bf16-true", engine) for engine in ("2", "3")),
]
TAKING_OVER = ("2", "3")


def everything(of_one_process: dict[str, Any]) -> dict[str, Any]:
    """Run everything that the tests below check in one start of the processes."""
    strictly()
    found: dict[str, Any] = {"resumed": {}, "states": {}, "losses": {}, "taken over": {}}
    for precision, engine in CELLS:
        found["resumed"][precision, engine], state = resumed(precision, engine)
        if precision == "32-true":
            found["states"][engine] = state
    for source, state in {"one process": of_one_process, **found["states"]}.items():
        for engine in TAKING_OVER:
            run = Running(ENGINES[engine](), late=True, state=state, seed=7)
            found["taken over"][source, engine] = run.steps(3)
            run.strategy.teardown()
    found["wrong"] = wrong_states(of_one_process)
    return found


def resumed(precision: str, engine: str) -> tuple[dict[str, Any], Any]:
    """Train to the end, resume from the state in the middle, and compare the bits."""
    run = Running(LOW[engine](), precision)
    run.steps(3)
    middle = run.state()
    losses = run.steps(3)
    end = run.state()
    run.strategy.load_module_state(middle["model"])
    run.strategy.load_optimizer_state(run.optimizer, middle["optimizer"])
    run.scheduler.load_state_dict(middle["scheduler"])
    run.done = 3
    back = run.steps(3)
    run.strategy.teardown()
    # A checkpoint may be written after the training.
    after = {
        "model": gather_full(run.strategy, run.strategy.module_state()),
        "optimizer": gather_full(run.strategy, run.strategy.optimizer_state(run.optimizer)),
    }
    other = Running(LOW[engine](), precision, late=True, state=middle, seed=5)
    at_once = differences({**other.state(), "scheduler": None}, {**middle, "scheduler": None})
    again = other.steps(3)
    different = differences(other.state(), end)
    other.strategy.teardown()
    return {
        "at once": at_once,
        "same losses": again == losses and back == losses,
        "different": different,
        "after the end": differences(after, {name: end[name] for name in after}),
        "dtypes": {str(tensor.dtype) for name, tensor in end["model"].items() if name != "shift"},
    }, middle


def wrong_states(state: dict[str, Any]) -> dict[Any, str]:
    """Return the messages about states that do not fit."""
    found: dict[Any, str] = {}
    for engine in ("1", "3"):
        run = Running(ENGINES[engine]())
        strategy, optimizer = run.strategy, run.optimizer
        without = {name: tensor for name, tensor in state["model"].items() if name != "first.bias"}
        later = {**state["optimizer"]["state"]["first.bias"], "step": torch.tensor(9.0)}
        of_two_times = {**state["optimizer"], "state": {**state["optimizer"]["state"], "first.bias": later}}
        with pytest.raises(CheckpointError) as missing:
            strategy.load_module_state(without)
        with pytest.raises(CheckpointError) as shape:
            strategy.load_module_state({**state["model"], "first.bias": torch.zeros(9)})
        with pytest.raises(CheckpointError) as kind:
            strategy.load_optimizer_state(optimizer, {**state["optimizer"], "kind": "SGD"})
        with pytest.raises(CheckpointError) as steps:
            strategy.load_optimizer_state(optimizer, of_two_times)
        errors = {"missing": missing, "shape": shape, "kind": kind, "steps": steps}
        found.update({(engine, what): str(caught.value) for what, caught in errors.items()})
        run.strategy.teardown()
    return found


def middle_of_one_process() -> tuple[dict[str, Any], list[float]]:
    run = Running(SingleDeviceStrategy())
    losses = run.steps(3)
    return run.state(), losses


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("state"))
    try:
        return run_distributed(everything, 2, middle_of_one_process()[0])[0]
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("precision", "engine"), CELLS)
def test_a_resumed_training_has_the_same_bits(found: dict[str, Any], precision: str, engine: str) -> None:
    cell = found["resumed"][precision, engine]
    assert cell["at once"] == []
    assert cell["same losses"]
    assert cell["different"] == []
    assert cell["after the end"] == []


@pytest.mark.parametrize(("precision", "engine"), CELLS)
def test_the_weights_of_a_state_are_master_weights(found: dict[str, Any], precision: str, engine: str) -> None:
    assert found["resumed"][precision, engine]["dtypes"] == {"torch.float32"}


@pytest.mark.parametrize("engine", TAKING_OVER)
@pytest.mark.parametrize("source", ["one process", *ENGINES])
def test_an_engine_goes_on_from_any_other(found: dict[str, Any], source: str, engine: str) -> None:
    assert found["taken over"][source, engine] == pytest.approx(by_hand()[0][3:], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("source", ENGINES)
def test_one_process_goes_on_from_any_engine(found: dict[str, Any], source: str) -> None:
    state = found["states"][source]
    of_one, _ = middle_of_one_process()
    assert list(state["model"]) == list(of_one["model"])
    assert {name: set(values) for name, values in state["optimizer"]["state"].items()} == {
        name: set(values) for name, values in of_one["optimizer"]["state"].items()
    }
    assert Running(SingleDeviceStrategy(), state=state, seed=3).steps(3) == pytest.approx(
        by_hand()[0][3:], rel=1e-5, abs=1e-5
    )


@pytest.mark.parametrize("engine", ["1", "3"])
def test_a_state_that_does_not_fit_is_refused(found: dict[str, Any], engine: str) -> None:
    wrong = found["wrong"]
    assert 'Missing key(s) in state_dict: "first.bias"' in wrong[engine, "missing"]
    assert "size mismatch for first.bias" in wrong[engine, "shape"]
    assert "the state of SGD, but configure_optimizers gave AdamW" in wrong[engine, "kind"]
    assert (
        "step=9 for 'first.bias', and 3 for others" in wrong[engine, "steps"] or "step=3 for" in wrong[engine, "steps"]
    )


def test_tied_and_frozen_parameters_and_buffers_are_there(found: dict[str, Any]) -> None:
    torch.manual_seed(0)
    start = Net().state_dict()
    for state in found["states"].values():
        model = state["model"]
        assert torch.equal(model["last.weight"], model["tied.weight"])
        assert torch.equal(model["frozen.weight"], start["frozen.weight"])
        assert torch.equal(model["shift"], start["shift"])
        assert "tied.weight" not in state["optimizer"]["state"]
        assert "frozen.weight" not in state["optimizer"]["state"]
