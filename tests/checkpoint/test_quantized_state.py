"""States of torchao's optimizers of 8 and 4 bits are stored, and have the same bits again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.processes import run_distributed
from trainer import ConfigError, Trainer, TrainModule
from trainer.checkpoint.quantized_state import in_full_precision, quantize_again

optim = pytest.importorskip("torchao.optim", reason="needs torchao")


class Net(TrainModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        if self.kind == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=torch.tensor(1e-2))
        if self.kind == "rounds at random":
            return optim._AdamW(self.parameters(), lr=1e-2, bf16_stochastic_round=True)
        return getattr(optim, self.kind)(self.parameters(), lr=1e-2)


def fit(
    kind: str, steps: int, ckpt_path: Path | None = None, **options: Any
) -> tuple[Trainer, Mapping[str, torch.Tensor]]:
    torch.manual_seed(1)
    module = Net(kind)
    trainer = Trainer(accelerator="cpu", seed=3, max_steps=steps, **{**QUIET, **options})
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(48, 64)), 8), ckpt_path=ckpt_path)
    return trainer, trainer.full_state_dict(everywhere=True)


def resume_sharded(kind: str, folder: Path) -> list[Mapping[str, torch.Tensor]]:
    warnings.simplefilter("ignore", DeprecationWarning)  # of inductor
    options: dict[str, Any] = {"strategy": "fsdp", "devices": 2}
    if kind == "rounds at random":
        options = {"strategy": "ddp", "devices": 2, "precision": "bf16-true"}
    _, expected = fit(kind, 4, **options)
    trainer, _ = fit(kind, 2, **options)
    trainer.save_checkpoint(folder / "c")
    _, found = fit(kind, 4, folder / "c", **options)
    return [expected, found]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchao compiles its steps, and inductor warns
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "rounds at random"])
def test_a_resumed_run_has_the_same_bits(kind: str, tmp_path: Path) -> None:
    options = {"precision": "bf16-true"} if kind == "rounds at random" else {}
    _, expected = fit(kind, 6, **options)
    trainer, _ = fit(kind, 3, **options)
    trainer.save_checkpoint(tmp_path / "c")
    _, found = fit(kind, 6, tmp_path / "c", **options)
    assert_same_bits(found, expected)


def test_a_sharded_run_with_a_learning_rate_in_a_tensor_resumes_to_the_same_bits(tmp_path: Path) -> None:
    for expected, found in run_distributed(resume_sharded, 2, "AdamW", tmp_path):
        assert_same_bits(found, expected)


def test_a_resumed_sharded_run_has_the_same_bits(tmp_path: Path) -> None:
    # Not AdamW4bit, whose compiled step of torchao 0.18 fails with FSDP2's parameters.
    for expected, found in run_distributed(resume_sharded, 2, "AdamW8bit", tmp_path):
        assert_same_bits(found, expected)


def refusal_of_sharded_bfloat16() -> str:
    with pytest.raises(ConfigError) as refused:
        fit("AdamW8bit", 1, strategy="fsdp", devices=2, precision="bf16-true")
    return str(refused.value)


def test_sharded_weights_that_its_optimizer_cannot_update_are_explained() -> None:
    for message in run_distributed(refusal_of_sharded_bfloat16, 2):
        assert "cannot update sharded bfloat16 weights, so use 'bf16-mixed'" in message


def test_replicas_round_at_random_alike(tmp_path: Path) -> None:
    first, second = run_distributed(resume_sharded, 2, "rounds at random", tmp_path)
    assert_same_bits(first, second)
    assert_same_bits(first[0], first[1])


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_again_they_stand_for_the_same_numbers(kind: str) -> None:
    weight = nn.Parameter(torch.zeros(512, 512))
    optimizer = getattr(optim, kind)([weight], lr=0.1)
    spread = torch.randn(512, 512) * torch.rand(512, 1)
    moments = {"exp_avg": spread, "exp_avg_sq": spread.square()}
    for key, values in moments.items():
        optimizer.state[weight][key] = optimizer._new_buffer(weight, key == "exp_avg").copy_(values)
    stored = in_full_precision(dict(optimizer.state[weight]))
    optimizer.state[weight] = dict(stored)
    quantize_again(optimizer)
    for key, values in stored.items():
        assert type(optimizer.state[weight][key]) is not torch.Tensor
        assert torch.equal(optimizer.state[weight][key].dequantize(), values), key
