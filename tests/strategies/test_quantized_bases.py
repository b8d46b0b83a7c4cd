"""Frozen weights that torchao has quantized, with float32 adapters: trained, saved, resumed; or refused in words."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.compare import assert_same_bits
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import ConfigError, TrainModule
from trainer.callbacks import ModelCheckpoint

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")

KINDS = ("NF4", "Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
SAMPLES = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 64) * 0.1), nn.Parameter(torch.randn(64, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + x @ self.a.t() @ self.b.t())


def quantize(net: nn.Sequential, kind: str) -> None:
    layers: list[Any] = [layer.base for layer in net]
    if kind == "NF4":
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        for layer in layers:
            layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao import quantization

        quantization.quantize_(net, getattr(quantization, kind)(), filter_fn=lambda _, name: name.endswith("base"))
    for layer in layers:
        layer.weight.requires_grad_(False)


class Net(TrainModule):
    def __init__(self, kind: str, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net, self.losses = nn.Sequential(Adapted(), Adapted()), list[float]()
        quantize(self.net, kind)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - 0.3).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(name: str, kind: str, steps: int, folder: Path, only: bool, precision: str = "32-true", seed: int = 1) -> Net:
    module, saving = Net(kind, seed), ModelCheckpoint(folder, trainable_only=only)
    options: dict[str, Any] = {"max_steps": steps, "max_epochs": 9, "precision": precision, "callbacks": saving}
    trainer = WAYS[name].trainer(enable_checkpointing=True, default_root_dir=folder, **options)
    trainer.fit(module, DataLoader(SAMPLES, WAYS[name].micro_batch), ckpt_path="last")
    return module


def resumed(name: str, folder: Path) -> None:
    for kind in KINDS:
        for only, precision in ((False, "32-true"), (True, "bf16-mixed")):
            place = folder / f"{name}-{kind}-{only}".replace(" ", "")
            whole = fit(name, kind, 4, place / "whole", only, precision)
            first = fit(name, kind, 2, place / "parts", only, precision)
            # A full checkpoint brings the base, too; else it has to be the same.
            second = fit(name, kind, 4, place / "parts", only, precision, seed=1 if only else 2)
            assert whole.losses == first.losses + second.losses
            for one, other in zip(whole.parameters(), second.parameters(), strict=True):
                if one.requires_grad:
                    assert_same_bits(one.detach(), other.detach())


def by_hand(kind: str) -> list[float]:
    module = Net(kind)
    optimizer = module.configure_optimizers()
    for batch in SAMPLES.split(8)[:2]:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return module.losses


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_each(resumed, selected(request, "name"), tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("name", ["single", "DDP x2"])
def test_a_quantized_base_is_saved_and_resumed_to_the_bit(name: str, ends: Any) -> None:
    skip_if_missing(name)
    assert name in ends


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_a_hand_written_loop(kind: str, tmp_path: Path) -> None:
    assert fit("single", kind, 2, tmp_path, False).losses == by_hand(kind)


def test_another_quantized_base_is_refused(tmp_path: Path) -> None:
    fit("single", "Int8WeightOnlyConfig", 2, tmp_path, True)
    with pytest.raises(Exception, match=r"another base model.*base\.weight\.qdata"):
        fit("single", "Int8WeightOnlyConfig", 4, tmp_path, True, seed=2)


@pytest.mark.parametrize("way", ["FSDP x1", "ZeRO-2 x1", "ZeRO-3 x1"])
def test_strategies_that_shard_refuse_it_before_the_first_step(way: str) -> None:
    skip_if_missing(way)
    with raises_recorded(ConfigError):
        WAYS[way].trainer(max_steps=1).fit(Net("Int8WeightOnlyConfig"), SAMPLES.split(8))


@pytest.mark.parametrize("kind", KINDS)
def test_torchao_lacks_what_sharding_needs(kind: str) -> None:
    """On the day that this fails, `fsdp` may take such weights: see `KINDS` of trainer/model/unsupported.py."""
    weight: Any = Net(kind).net[0].base.weight.detach()
    lacking = {
        "NF4": lambda: weight[:32],
        "Int8WeightOnlyConfig": lambda: torch.chunk(weight, 2),
        "Float8WeightOnlyConfig": lambda: weight.new_zeros(weight.shape),
    }
    for operation in (lacking[kind], lambda: weight.flatten()):
        with pytest.raises((NotImplementedError, AssertionError)):
            operation()
