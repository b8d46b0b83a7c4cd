"""Frozen weights of other dtypes beside trained float32 ones: their values and dtypes in the full state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import TrainModule
from trainer.callbacks import ModelCheckpoint

DTYPES = (torch.int8, torch.int64, torch.bfloat16)


class Mixed(TrainModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.frozen = nn.Parameter((torch.randn(8, 8) * 3).to(dtype), requires_grad=False)
        self.layer, self.losses = nn.Linear(8, 1), list[float]()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch @ self.frozen.float()).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.layer.parameters(), lr=0.01)


def fit(name: str, dtype: torch.dtype, steps: int, folder: Path) -> tuple[list[float], torch.Tensor]:
    module, saving = Mixed(dtype), ModelCheckpoint(folder, trainable_only=True)
    options: dict[str, Any] = {"max_steps": steps, "max_epochs": 9, "callbacks": saving, "default_root_dir": folder}
    trainer = WAYS[name].trainer(enable_checkpointing=True, **options)
    samples = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(samples, WAYS[name].micro_batch), ckpt_path="last")
    return module.losses, trainer.full_state_dict(everywhere=True)["frozen"]


def resume(name: str, folder: Path) -> dict[str, Any]:
    found = {}
    for dtype in DTYPES:
        place = folder / f"{name}-{dtype}".replace(" ", "")
        whole, _ = fit(name, dtype, 4, place / "whole")
        first, _ = fit(name, dtype, 2, place / "parts")
        second, frozen = fit(name, dtype, 4, place / "parts")
        found[str(dtype)] = (whole == first + second, frozen)
    return found


@pytest.fixture(scope="module")
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_each(resume, selected(request, "name"), tmp_path_factory.mktemp("frozen"))


@pytest.mark.parametrize("name", ["DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2"])
def test_they_keep_their_values_and_their_kind_and_adapters_alone_are_resumed(name: str, states: Any) -> None:
    skip_if_missing(name)
    for found in states[name]:
        for dtype in DTYPES:
            exact, frozen = found[str(dtype)]
            assert exact, dtype
            assert torch.equal(frozen.float(), Mixed(dtype).frozen.detach().float()), dtype
            # DeepSpeed's own 16-bit weights stand for float32 ones.
            assert frozen.dtype is dtype or ("ZeRO" in name and dtype is torch.bfloat16), dtype
