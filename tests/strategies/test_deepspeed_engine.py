"""DeepSpeed's engine gives the numbers of plain torch on two processes."""

from __future__ import annotations

import gc
import os
import shutil
import warnings
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import deepspeed_runs
from tests.helpers.deepspeed_runs import (
    CLIP,
    ENGINES,
    Net,
    Running,
    by_hand,
    differences,
    gather_full,
    strictly,
    windows,
)
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import MLP
from trainer import ConfigError, Trainer
from trainer.precision import PRECISIONS
from trainer.strategies.deepspeed.strategy import (
    DeepSpeedStage1Strategy,
    DeepSpeedStage2OffloadStrategy,
    DeepSpeedStage3Strategy,
)
from trainer.strategies.single import SingleDeviceStrategy
from trainer.strategy import StepOptions

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")

KINDS = [(engine, late) for engine in ENGINES for late in (False, True) if late or engine in ("1", "3")]
SOME = ("1", "3", "2 offload")
"""One engine of each way to hold the weights, for what no other way changes."""


# -- on two processes --------------------------------------------------------------------------------------------------


class SometimesTied(Net):
    """A module that uses some parameters in every other step only; with SGD a gradient of zero changes nothing."""

    used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden) + self.tied(hidden) if self.used else self.last(hidden) + self.scale

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def everything() -> dict[str, Any]:
    """Run everything that the tests below check in one start of the processes, since importing DeepSpeed is slow."""
    strictly()
    found: dict[str, Any] = {"twice": {}, "left": {}, "broken": {}, "unused": {}, "bf16": {}}
    for engine, late in KINDS:
        run = Running(ENGINES[engine](), late=late)
        losses = run.steps(3)
        found["twice"][engine, late] = validated_and_gone_on(run, losses)
        found["left"][engine, late] = left_behind(run.module)
    for engine in ENGINES:
        found["unused"][engine] = with_unused_parameters(engine)
    for engine in SOME:
        found["broken"][engine] = goes_on_after_an_error(engine)
        run = Running(ENGINES[engine](), precision="bf16-mixed", late=True)
        found["bf16"][engine] = run.steps(6), {str(p.dtype) for p in run.module.parameters()}
    found["collected"] = {engine: collected_late(engine) for engine in ("1", "3")}
    found["evaluation only"] = {late: evaluated_only(late) for late in (False, True)}
    found["refused"] = refusals()
    found["last changes"] = {engine: changed_at_last(engine) for engine in ("1", "2")}
    found["by data"] = {engine: changed_by_data(engine) for engine in ("2", "3, small ones not sharded")}
    found["alive"] = alive_afterwards()
    found["linear"] = nn.functional.linear.__module__
    return found


def validated_and_gone_on(run: Running, losses: list[float]) -> dict[str, Any]:
    """Train one half, evaluate the module, and train the other half as a second training."""
    strategy, module = run.strategy, run.module
    state = run.state()
    strategy.teardown()
    strategy.setup_module(module, for_training=False)
    with torch.inference_mode():
        value = float(strategy.call_step("validation_step", windows()[0][0], 0))
    evaluated = differences(gather_full(strategy, strategy.module_state()), state["model"])
    strategy.teardown()
    run.begin()
    kept = differences(gather_full(strategy, strategy.module_state()), state["model"])
    strategy.teardown()
    run.begin(state)
    losses = losses + run.steps(3)
    strategy.teardown()
    plain = Running(SingleDeviceStrategy(), state=state)
    with torch.no_grad():
        expected = float(plain.module.validation_step(windows()[0][0], 0))
    return {
        "losses": losses,
        "evaluated": value - expected,
        "differences": evaluated + kept,
        "keys": list(module.state_dict()) == list(plain.module.state_dict()),
    }


def left_behind(module: nn.Module) -> list[str]:
    """Return the traces that an engine has left in a module after its end."""
    found = []
    for part in module.modules():
        found += [name for name in vars(part) if name.startswith("ds_") or name in ("pre_bwd_fn", "_external_params")]
        found += [str(hook) for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
    return found


def goes_on_after_an_error(engine: str) -> bool:
    """Raise an error in the middle of a forward, and train the same module again."""
    run = Running(ENGINES[engine](), late=True)
    run.steps(1)

    def failing(batch: Any, batch_idx: int) -> None:
        run.module.first(batch[0])
        raise ZeroDivisionError

    run.module.training_step = failing  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        run.steps(1)
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})  # before it was refused
    # No collectives are allowed here, since the other processes could be anywhere.
    run.module.state_dict()
    run.strategy.teardown()
    del run.module.training_step
    run.begin()
    return all(loss == loss for loss in run.steps(2))


def collected_late(engine: str) -> list[str]:
    """Return the changes of the state when Python deletes a former engine after the next training has begun."""
    run = Running(ENGINES[engine]())
    run.steps(1)
    former = run.strategy.engine
    state = run.state()
    run.strategy.teardown()
    start = run.strategy._start

    def start_and_delete(*args: Any) -> None:
        start(*args)
        former.__del__()

    run.strategy._start = start_and_delete  # type: ignore[method-assign]
    run.begin(state)
    different = differences(run.state(), state)
    run.strategy.teardown()
    return different


def with_unused_parameters(engine: str) -> list[float]:
    """Return the error of the weights after each step when some steps leave parameters out."""
    deepspeed_runs.Net = SometimesTied  # type: ignore[misc]
    try:
        run = Running(ENGINES[engine]())
    finally:
        deepspeed_runs.Net = Net  # type: ignore[misc]
    torch.manual_seed(0)
    plain = SometimesTied()
    optimizer = plain.configure_optimizers()
    schedule = deepspeed_runs.schedule(optimizer)
    off = []
    for number, window in enumerate(windows()):
        plain.used = run.module.used = number % 2 == 0  # type: ignore[assignment]
        run.step(window)
        optimizer.zero_grad()
        for batch in window:
            (plain.training_step(batch, 0) / len(window)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        state = gather_full(run.strategy, run.strategy.module_state())
        off.append(max(float((tensor - state[name]).abs().max()) for name, tensor in plain.state_dict().items()))
    return off


def evaluated_only(late: bool) -> tuple[float, list[str]]:
    """Evaluate stage 3 without training; return the error of the result, and the weights that differ."""
    weights = by_hand()[1]
    strategy = DeepSpeedStage3Strategy(deepspeed_runs.SHARD_ALL)
    strategy.setup_environment("cpu", PRECISIONS["32-true"])
    module, plain = Net(late), Net()
    with strategy.init_context(module, will_load_checkpoint=True):
        module.configure_model()
    strategy.setup_module(module, for_training=False)
    strategy.load_module_state(weights)
    plain.load_state_dict(weights)
    with torch.inference_mode():
        value = float(strategy.call_step("validation_step", windows()[0][0], 0))
        off = value - float(plain.validation_step(windows()[0][0], 0))
    different = differences(gather_full(strategy, strategy.module_state()), weights)
    strategy.teardown()
    return off, different


def refusals() -> dict[str, str]:
    """Return the messages about what the engine cannot do."""
    found = {}

    def refused(name: str, optimizers: Any, module: Net | None = None, clip_norm: float | None = None) -> None:
        strategy = DeepSpeedStage1Strategy()
        strategy.setup_environment("cpu", PRECISIONS["32-true"])
        module = Net() if module is None else module
        try:
            strategy.setup_module(module, for_training=True)
            (optimizer,) = strategy.setup_optimizers(optimizers(module), StepOptions(clip_value=clip_norm))
            strategy.clip_gradients(optimizer, 2.0, "norm")
        except ConfigError as error:
            found[name] = str(error)

    sgd = torch.optim.SGD
    refused("two optimizers", lambda m: [sgd(m.first.parameters(), 0.1), sgd(m.last.parameters(), 0.1)])
    refused("not by element", lambda m: [torch.optim.Adafactor(m.parameters())])
    refused("all frozen", lambda m: [sgd([{"params": m.first.parameters()}, {"params": m.frozen.parameters()}], 0.1)])
    refused("other clipping", lambda m: [m.configure_optimizers()], clip_norm=1.0)
    return found


def changed_at_last(engine: str) -> list[str]:
    """Change the weights after the last step; return those that the state after the run has not."""
    run = Running(ENGINES[engine]())
    run.steps(2)
    with torch.no_grad():
        for parameter in run.module.parameters():
            parameter.mul_(0.5)
    changed = {name: tensor.detach().clone() for name, tensor in run.module.state_dict().items()}
    run.strategy.teardown()
    return differences(gather_full(run.strategy, run.strategy.module_state()), changed)


def changed_by_data(engine: str) -> str:
    """Return the message about weights that are changed where nothing counts it."""
    run = Running(ENGINES[engine]())
    run.steps(1)
    for parameter in run.module.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    with pytest.raises(ConfigError) as error:
        run.steps(1)
    run.strategy.teardown()
    return str(error.value)


def alive_afterwards() -> bool:
    """Whether a module of stage 3 stays in memory after its run."""
    run = Running(ENGINES["3"]())
    run.steps(3)
    module = weakref.ref(run.module)
    run.strategy.teardown()
    del run
    gc.collect()
    return module() is not None


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("engine"))
    try:
        return run_distributed(everything, 2)[0]
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("engine", "late"), KINDS)
def test_losses_are_those_by_hand_though_a_module_is_set_up_again(
    found: dict[str, Any], engine: str, late: bool
) -> None:
    twice = found["twice"][engine, late]
    assert twice["losses"] == pytest.approx(by_hand()[0], rel=1e-5, abs=1e-5)
    assert twice["evaluated"] == pytest.approx(0, abs=1e-6)
    assert twice["differences"] == []
    assert twice["keys"]


def test_the_engine_leaves_nothing_behind(found: dict[str, Any]) -> None:
    assert set(map(tuple, found["left"].values())) == {()}
    assert not found["linear"].startswith("deepspeed")


def test_changes_after_the_last_step_are_kept(found: dict[str, Any]) -> None:
    assert found["last changes"] == {"1": [], "2": []}


def test_changes_by_data_are_refused_in_the_first_steps(found: dict[str, Any]) -> None:
    for message in found["by data"].values():
        assert "changed while training by its .data, as in p.data.clamp_(), which DeepSpeed loses" in message


def test_a_module_whose_run_has_ended_is_freed(found: dict[str, Any]) -> None:
    assert not found["alive"]


def test_a_former_engine_may_be_deleted_at_any_time(found: dict[str, Any]) -> None:
    assert found["collected"] == {"1": [], "3": []}


@pytest.mark.parametrize("engine", SOME)
def test_after_an_error_the_module_can_be_used_again(found: dict[str, Any], engine: str) -> None:
    assert found["broken"][engine]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_that_a_step_does_not_use_keeps_its_value(found: dict[str, Any], engine: str) -> None:
    assert found["unused"][engine] == pytest.approx([0.0] * 6, abs=1e-6)


@pytest.mark.parametrize("engine", SOME)
def test_bf16_is_computed_in_bf16_and_close(found: dict[str, Any], engine: str) -> None:
    losses, dtypes = found["bf16"][engine]
    assert dtypes == {"torch.bfloat16"}
    assert losses == pytest.approx(by_hand()[0], rel=0.01)
    assert losses != pytest.approx(by_hand()[0], rel=1e-5)


@pytest.mark.parametrize("late", [False, True])
def test_stage_3_evaluates_without_having_trained(found: dict[str, Any], late: bool) -> None:
    off, different = found["evaluation only"][late]
    assert off == pytest.approx(0, abs=1e-6)
    assert different == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("two optimizers", "2 optimizers, and DeepSpeed's engine takes one"),
        ("not by element", "Adafactor needs full parameters"),
        ("all frozen", "group 1 of the SGD has no parameter that requires a gradient"),
        ("other clipping", "clips by the norm 1.0, as it was at the start, and cannot clip by norm 2.0"),
    ],
)
def test_what_the_engine_cannot_do_is_reported(found: dict[str, Any], what: str, message: str) -> None:
    assert message in found["refused"][what]


# -- DeepSpeed's own Adam ----------------------------------------------------------------------------------------------


class Scheduled(MLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


def trained_by(strategy: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights after four steps with a schedule, and torch's warnings about the schedule."""
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, seed=1, max_epochs=1, enable_checkpointing=False)
    module = Scheduled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(MLP.data(16), 4))
    return trainer.full_state_dict(), [str(one.message) for one in caught if "step()" in str(one.message)]


def trained_by_both() -> Any:
    return trained_by(DeepSpeedStage2OffloadStrategy(cpu_adam=True)), trained_by("single_device")


def test_schedules_reach_cpu_adam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing := [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]:
        pytest.skip(f"DeepSpeed compiles its CPUAdam with {missing[0]}, which is not installed")
    monkeypatch.chdir(tmp_path)
    ((theirs, reported), (weights, nothing)) = run_distributed(trained_by_both, 1)[0]
    assert reported == nothing == []
    for name, weight in weights.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-5, atol=1e-6)
