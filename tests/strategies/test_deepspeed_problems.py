"""Settings that cannot work with DeepSpeed raise an error before anything starts."""

from __future__ import annotations

import copy
import enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.deepspeed_runs import ENGINES, Net
from tests.helpers.strategy_models import MLP
from tests.messages import raises_recorded
from trainer import ConfigError, Trainer
from trainer.precision import PRECISIONS
from trainer.runs.preflight_checks import check_call
from trainer.strategies import DDPStrategy, FSDPStrategy
from trainer.strategies.deepspeed.empty_parameters import RefusingEmptyParameters
from trainer.strategies.deepspeed.problems import optimizer_problems
from trainer.strategies.deepspeed.strategy import (
    DeepSpeedStage1Strategy,
    DeepSpeedStage2OffloadStrategy,
    DeepSpeedStrategy,
)
from trainer.strategy import StepOptions

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


def problems(strategy: DeepSpeedStrategy, precision: str = "32-true", device_type: str = "cpu") -> str:
    return "\n".join(strategy.problems(PRECISIONS[precision], device_type, 2))


class Clipping(Net):
    def configure_gradient_clipping(self, *args: Any) -> None: ...


def training_problems(
    strategy: DeepSpeedStrategy, module: nn.Module, window: int, clip: float | None, algorithm: str
) -> list[str]:
    steps = StepOptions(accumulate_grad_batches=window, clip_value=clip, clip_algorithm=algorithm)
    return strategy.problems(PRECISIONS["32-true"], "cpu", 2, steps, module)


def test_what_a_training_cannot_be() -> None:
    manual = Net()
    manual.automatic_optimization = False
    strategy = DeepSpeedStrategy({"gradient_accumulation_steps": 4, "gradient_clipping": 0.5})
    assert training_problems(DeepSpeedStage1Strategy(), Net(), 3, 1.0, "norm") == []
    (one,) = training_problems(DeepSpeedStage1Strategy(), manual, 1, None, "norm")
    assert "cannot do manual optimization" in one
    (one,) = training_problems(DeepSpeedStage1Strategy(), Clipping(), 1, 1.0, "norm")
    assert "Clipping.configure_gradient_clipping cannot be used" in one
    (one,) = training_problems(DeepSpeedStage1Strategy(), Net(), 1, 1.0, "value")
    assert "Use 'norm', or strategy 'fsdp'" in one
    normed = Net()
    normed.norm = nn.BatchNorm1d(4)
    (one,) = DeepSpeedStage1Strategy().problems(PRECISIONS["bf16-mixed"], "cpu", 2, StepOptions(), normed)
    assert "BatchNorms, whose statistics are float32, cannot on CPUs: norm" in one
    window, clipping = training_problems(strategy, Net(), 3, 1.0, "norm")
    assert "gradient_accumulation_steps" in window
    assert "gradient_clipping" in clipping
    scalar = Net()
    scalar.scale = nn.Parameter(torch.ones(()))
    (one,) = training_problems(DeepSpeedStage1Strategy(), scalar, 1, None, "norm")
    assert "parameters without a dimension: scale" in one


def test_an_optimizer_that_exchanges_weights_is_refused() -> None:
    class ScheduleFree(torch.optim.SGD):
        def train(self) -> None: ...
        def eval(self) -> None: ...

    (one,) = optimizer_problems([ScheduleFree(Net().parameters(), lr=0.1)], cpu_adam=False)
    assert "ScheduleFree.eval() exchanges the weights" in one
    assert optimizer_problems([torch.optim.SGD(Net().parameters(), lr=0.1)], cpu_adam=False) == []


class TrustRatio(torch.optim.Optimizer):
    """Steps by the norm of the parameter over that of the gradient, as LAMB and LARS do."""

    def __init__(self, parameters: Any, lr: float, scaled: bool = True) -> None:
        super().__init__(parameters, {"lr": lr, "scaled": scaled})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = parameter.norm() / parameter.grad.norm() if group["scaled"] else 1.0
                parameter.sub_(parameter.grad * (group["lr"] * ratio))


class Capped(torch.optim.SGD):
    """Makes gradients smaller where the largest one is above a limit, which none or each of a trial may be."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad.abs().max().item() > 1e-9:
                parameter.grad.mul_(0.1)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "alike"),
    [
        (partial(Capped, lr=1e-3), False),
        (partial(torch.optim.AdamW, lr=1e-3, fused=True), True),
        (partial(torch.optim.SGD, lr=1e-3, momentum=0.9, nesterov=True), True),
        (partial(torch.optim.Adafactor, lr=1e-3), False),
        (partial(torch.optim.Muon, lr=1e-3), False),
        (partial(torch.optim.LBFGS, lr=1e-3), False),
        (partial(TrustRatio, lr=1e-3, scaled=False), True),
        (partial(TrustRatio, lr=1e-3), False),
    ],
)
def test_an_optimizer_that_needs_full_parameters_is_refused(make: Any, alike: bool) -> None:
    """Found out by trying it, at a learning rate that a schedule begins with 0, without a change of generators."""
    optimizer = make([nn.Parameter(torch.randn(4, 4))])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    state = torch.get_rng_state()
    problems = optimizer_problems([optimizer], cpu_adam=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [("needs full parameters" in one) for one in problems] == [True] * (not alike)


EVERYTHING_ELSE = {
    "train_batch_size": 1000,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
}


def test_the_trainers_arguments_are_compared_with_the_json_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        Trainer(
            strategy=DeepSpeedStrategy(EVERYTHING_ELSE),
            accelerator="cpu",
            devices=2,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
        )
    for message in (
        "bf16.enabled=true",
        "gradient_accumulation_steps=4",
        "gradient_clipping=0.5",
        "but micro-batch 3 x window 2 x processes 2 = 12",
    ):
        assert message in str(raised.value)


def test_the_loaders_batch_size_is_compared_before_the_start() -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 12}
    trainer = Trainer(strategy=DeepSpeedStrategy(config), accelerator="cpu", devices=2, accumulate_grad_batches=2)
    loader = DataLoader(TensorDataset(torch.zeros(8, 4)), batch_size=4)
    with pytest.raises(ConfigError) as raised:
        trainer.fit(Net(), loader)
    assert "train_micro_batch_size_per_gpu=3" in str(raised.value)
    assert "but micro-batch 4 x window 2 x processes 2 = 16" in str(raised.value)


def test_a_loader_of_the_users_own_is_not_compared() -> None:
    """The batch_size of such a loader may mean anything."""

    class Own(list[Any]):
        batch_size = 99

    config = {"train_micro_batch_size_per_gpu": 4}
    trainer = Trainer(strategy=DeepSpeedStrategy(config), accelerator="cpu", devices=1, max_steps=1, **QUIET)
    check_call(trainer.config, None, "fit", Net(), {"train": Own()}, None, None)


def test_a_clipping_of_0_in_the_json_means_none() -> None:
    (one,) = training_problems(DeepSpeedStrategy({"gradient_clipping": 0.0}), Net(), 1, 1.0, "norm")
    assert "gradient_clip_val=1.0" in one


@pytest.mark.parametrize(("argument", "section"), [("optimizer", "optimizer"), ("parameters", "param")])
def test_kept_on_the_device_and_offloaded_contradict_each_other(argument: str, section: str) -> None:
    config = {"zero_optimization": {"stage": 3, f"offload_{section}": {"device": "cpu"}}}
    kept: dict[str, Any] = {f"offload_{argument}": False}
    assert f'zero_optimization.offload_{section}.device="cpu"' in problems(DeepSpeedStrategy(config, **kept))
    assert problems(DeepSpeedStrategy(config)) == ""


def test_stage_0_is_another_strategy() -> None:
    assert "stage=0" in problems(DeepSpeedStrategy(stage=0))


def test_what_is_possible_has_no_problems() -> None:
    for make in ENGINES.values():
        assert problems(make(), "bf16-mixed") == ""


def test_problems_are_reported_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "stage=4" in problems(DeepSpeedStrategy(stage=4))
    assert "'mps'" in problems(DeepSpeedStage1Strategy(), device_type="mps")
    assert "does not run on CPUs" in problems(DeepSpeedStage1Strategy(), "16-mixed")
    assert "'64-true' is not one of DeepSpeed's" in problems(DeepSpeedStage1Strategy(), "64-true")
    assert "needs stage 3" in problems(DeepSpeedStage1Strategy(offload_parameters="cpu"))
    assert "no effect without offload_optimizer" in problems(DeepSpeedStage1Strategy(cpu_adam=True))
    in_json = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    monkeypatch.setenv("PATH", "")
    assert "g++ and ninja cannot be found" in problems(DeepSpeedStage2OffloadStrategy(cpu_adam=True))
    assert "no effect" not in problems(DeepSpeedStrategy(in_json, cpu_adam=True))


def test_deepspeed_that_is_not_installed_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.strategies.deepspeed.strategy.find_spec", lambda name: None)
    assert 'pip install "deepspeed>=0.19"' in problems(DeepSpeedStage1Strategy())


def test_the_stage_is_the_strategys_or_the_jsons() -> None:
    assert DeepSpeedStrategy().stage == 2
    assert DeepSpeedStrategy({"zero_optimization": {"stage": 3}}).stage == 3
    assert DeepSpeedStrategy({"zero_optimization": {"stage": 3}}).collective_forward
    assert DeepSpeedStage1Strategy({"zero_optimization": {"stage": "auto"}}).stage == 1
    assert str(DeepSpeedStage2OffloadStrategy()) == "deepspeed_stage_2_offload (stage=2, offload_optimizer=cpu)"


def test_deepspeed_takes_the_number_of_the_device_not_the_local_rank() -> None:
    strategy = DeepSpeedStrategy()
    strategy.device = torch.device("cuda", 3)
    assert (strategy.processes.local_rank, strategy._device_number) == (0, 3)
    strategy.device = torch.device("cpu")
    assert strategy._device_number == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the engine's device is seen with a second GPU only")
def test_the_engine_is_on_the_device_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(strategy="deepspeed_stage_2", accelerator="cuda", devices=[1], max_steps=2, **QUIET)
    module = MLP()
    trainer.fit(module, DataLoader(MLP.data(8), 4))
    assert {p.device for p in module.parameters()} == {torch.device("cuda", 1)}


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (DeepSpeedStrategy, "zero_stage"),
        (FSDPStrategy, "state_dict_type"),
        (FSDPStrategy, "cpu_ofload"),
        (DDPStrategy, "find_unused_parameter"),
    ],
)
def test_an_unknown_option_is_refused_with_a_suggestion(kind: Any, option: str) -> None:
    with raises_recorded(ConfigError):
        kind(**{option: 2})
    assert type(copy.deepcopy(kind())) is kind


class Status(enum.Enum):
    """As DeepSpeed's: whether the full values of a parameter are in memory."""

    AVAILABLE = enum.auto()
    NOT_AVAILABLE = enum.auto()


def test_nothing_is_computed_with_an_empty_parameter_alone() -> None:
    module: Any = nn.Linear(2, 2)
    module.weight.ds_status, module.weight.ds_shape = Status.NOT_AVAILABLE, (2, 2)
    module.bias.ds_status = Status.AVAILABLE
    with RefusingEmptyParameters(module, "deepspeed_stage_3"):
        assert torch.equal(torch.ones(2) + module.bias * 0, torch.ones(2))
        assert module.weight.numel() == 4
        with pytest.raises(ConfigError, match=r"^weight is read or changed here, where it is empty"):
            module.weight.sum()
        with pytest.raises(ConfigError, match=r"^weight is read"):
            module.weight.detach().sum()
