"""Unusual layers, parameters and buffers: trained, saved and resumed under every strategy, or refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import CheckpointError, ConfigError, Engine, TrainModule
from trainer.callbacks import EMAWeightAveraging, ModelCheckpoint

STRATEGIES = ("single_device", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


class Unusual(TrainModule):
    """A regression through an unusual layer, which a subclass makes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = self.make(), nn.Linear(4, 1)
        self.extra = self.make_extra()

    def make(self) -> nn.Module:
        return nn.Linear(4, 4)

    def make_extra(self) -> nn.Parameter | None:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.last(self.first(batch[0])).square().mean()
        return loss if self.extra is None else loss + self.extra.abs().sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Counting(nn.Linear):
    """A layer whose state is not in tensors alone."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "inside": [torch.full((2,), float(self.calls))]}

    def set_extra_state(self, state: Any) -> None:
        assert torch.equal(state["inside"][0], torch.full((2,), float(state["calls"])))
        self.calls = state["calls"]


class CountingInATensor(Counting):
    """A layer whose extra state is a tensor, as Transformer Engine's is."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.calls])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state)


class ExtraState(Unusual):
    def make(self) -> nn.Module:
        return Counting(4, 4)


class ExtraStateInATensor(Unusual):
    def make(self) -> nn.Module:
        return CountingInATensor(4, 4)


class Expanded(Unusual):
    """A buffer whose elements share their memory."""

    def make(self) -> nn.Module:
        layer = super().make()
        layer.register_buffer("shared", torch.zeros(1).expand(5))
        return layer


class Transposed(Unusual):
    """A weight that is not contiguous, as those of a model in channels_last are not."""

    def make(self) -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.randn(4, 4).t())
        return layer


def fit(module: Unusual, folder: Path, strategy: str, steps: int, average: bool = False, **options: Any) -> Any:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    callbacks = [ModelCheckpoint(folder, save_top_k=-1), *([EMAWeightAveraging(decay=0.5)] if average else [])]
    trainer = quiet(
        enable_checkpointing=True, max_steps=steps, strategy=strategy, devices=1, callbacks=callbacks, **options
    )
    batches = DataLoader(TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1))), 8)
    trainer.fit(module, batches, ckpt_path="last" if any(folder.glob("*")) else None)
    return trainer.full_state_dict()


@pytest.mark.parametrize("kind", [ExtraState, ExtraStateInATensor, Expanded, Transposed])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_has_the_same_bits(kind: type[Unusual], strategy: str, tmp_path: Path) -> None:
    average = kind is ExtraState
    unbroken = fit(kind(), tmp_path / "unbroken", strategy, 6, average)
    module = kind()
    fit(kind(), tmp_path / "broken", strategy, 2, average)
    resumed = fit(module, tmp_path / "broken", strategy, 6, average)
    assert_same_bits(resumed, unbroken)
    if isinstance(module.first, Counting):
        assert module.first.calls == 6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_extra_state_goes_from_every_strategy_to_every_other(strategy: str, tmp_path: Path) -> None:
    for step, other in enumerate(("single_device", strategy, "single_device"), 1):
        module = ExtraState()
        fit(module, tmp_path / "run", other, 2 * step)
        assert isinstance(module.first, Counting)
        assert module.first.calls == 2 * step


@pytest.mark.parametrize("first", ["fit", "validate"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_module_of_an_earlier_run_is_trained(strategy: str, first: str, tmp_path: Path) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    module = Unusual()
    module.register_buffer("seen", torch.zeros(2))
    batches = DataLoader(TensorDataset(torch.randn(16, 4)), 8)
    if first == "validate":
        quiet(strategy=strategy, devices=1).validate(module, batches)
    else:
        fit(module, tmp_path / "first", strategy, 2)
    fit(module, tmp_path / "second", strategy, 2)
    assert module.trainer.global_step == 2


def test_a_lazy_layer_gets_its_shape_in_an_evaluation() -> None:
    module = Lazy()
    quiet().validate(module, DataLoader(TensorDataset(torch.randn(16, 4)), 8))
    assert module.first.weight.shape == (4, 4)


def test_an_expanded_buffer_that_no_checkpoint_holds_stays_as_it_is(tmp_path: Path) -> None:
    module = Unusual()
    module.register_buffer("mask", torch.zeros(1).expand(5), persistent=False)
    fit(module, tmp_path / "run", "single_device", 2)
    assert module.mask.stride() == (0,)


def test_a_loop_of_ones_own_refuses_lazy_layers() -> None:
    layer = nn.LazyLinear(4)
    with Engine(accelerator="cpu") as engine, raises_recorded(ConfigError):
        engine.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))


class Lazy(Unusual):
    def make(self) -> nn.Module:
        return nn.LazyLinear(4)


class Scalar(Unusual):
    def make_extra(self) -> nn.Parameter:
        return nn.Parameter(torch.ones(()))


class Empty(Unusual):
    def make_extra(self) -> nn.Parameter:
        return nn.Parameter(torch.ones(0))


class Complex(Unusual):
    def make_extra(self) -> nn.Parameter:
        return nn.Parameter(torch.ones(2, dtype=torch.complex64))


class Scripted(Unusual):
    def make(self) -> nn.Module:
        return torch.jit.script(super().make())  # type: ignore[no-any-return]


class Compiled(Unusual):
    def make(self) -> nn.Module:
        return torch.compile(super().make(), backend="eager")  # type: ignore[return-value]


SHARDING = STRATEGIES[2:]
REFUSED: dict[type[Unusual], tuple[str, ...]] = {
    Lazy: STRATEGIES,
    Scalar: SHARDING,
    Empty: ("fsdp", "deepspeed_stage_3"),
    Complex: SHARDING[1:],
    Scripted: ("fsdp", "deepspeed_stage_3"),
    Compiled: ("deepspeed_stage_3",),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_strategy_cannot_train_is_refused_before_the_first_step(
    kind: type[Unusual], strategy: str, tmp_path: Path
) -> None:
    if strategy in REFUSED[kind]:
        with raises_recorded(ConfigError):
            fit(kind(), tmp_path / "run", strategy, 2)
    else:
        fit(kind(), tmp_path / "run", strategy, 2)


@pytest.mark.parametrize(
    "buffer",
    [torch.ones(3).to(torch.float8_e4m3fn).view(torch.bits8), torch.eye(3).to_sparse()],
    ids=["bits", "sparse"],
)
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_a_buffer_that_no_checkpoint_can_hold_is_named_before_the_first_step(
    buffer: torch.Tensor, strategy: str, tmp_path: Path
) -> None:
    module = Unusual()
    module.register_buffer("odd", buffer)
    with raises_recorded(CheckpointError):
        fit(module, tmp_path / "run", strategy, 2)
    assert module.trainer.global_step == 0
