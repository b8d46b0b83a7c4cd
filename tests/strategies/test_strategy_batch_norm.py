"""BatchNorm in training: each process its own statistics, reader 0's in evaluations and checkpoints, as with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.shards import materialize

NAMES = ("DDP x2", "FSDP x2", "FSDP x2, SHARD_GRAD_OP", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
BATCH, WINDOW, EPOCHS = 4, 4, 2
"""44 samples on two processes: windows of 32 and 12, whose last micro-batch is half as large."""


class Normed(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []
        torch.manual_seed(5)
        # No bias before a norm: its gradient is nothing but rounding, of which Adam would make steps.
        self.layers = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_validation_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def samples(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(number, 6, generator=torch.Generator().manual_seed(number))
    return features, features.sum(1, keepdim=True)


def by_hand() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with the gradients of two processes, and keep process 0's statistics; return those, and validation losses.

    DDP does no more: it sends process 0's statistics to the others, for whose normalization they are not used.
    """
    module, (x, y), validated = Normed(), samples(44), []
    optimizer = module.configure_optimizers()
    for _ in range(EPOCHS):
        for window in zip(x.split(2 * BATCH * WINDOW), y.split(2 * BATCH * WINDOW), strict=True):
            optimizer.zero_grad()
            for batch in zip(*(part.split(2 * BATCH) for part in window), strict=True):
                for rank in (1, 0):
                    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
                    loss = module.loss([part.chunk(2)[rank] for part in batch])
                    (loss * len(batch[0]) / 2 / len(window[0])).backward()
                    if rank == 1:
                        module.load_state_dict(before, strict=False)
            optimizer.step()
        with torch.no_grad():
            validated.append(float(module.eval().loss(samples(22))))
        module.train()
    return module.state_dict(), validated


def train(name: str, folder: Path) -> Any:
    module = Normed()
    saving = ModelCheckpoint(dirpath=folder / name.replace(" ", ""), filename="last")
    trainer = WAYS[name].trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=WINDOW,
        callbacks=saving,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    loaders = [DataLoader(TensorDataset(*samples(number)), BATCH) for number in (44, 22)]
    trainer.fit(module, *loaders)
    stored = read_checkpoint(saving.last_model_path)["model"]
    return trainer.full_state_dict(everywhere=True), {k: materialize(v) for k, v in stored.items()}, module.validated


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_each(train, selected(request, "name"), tmp_path_factory.mktemp("norms"))


@pytest.mark.parametrize("name", NAMES)
def test_weights_statistics_and_evaluations_are_those_of_a_hand_written_loop(name: str, trained: Any) -> None:
    skip_if_missing(name)
    expected, losses = by_hand()
    for weights, stored, validated in trained[name]:
        for state in (weights, stored):
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(
                    state[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: key + text
                )
        assert validated == pytest.approx(losses, rel=1e-4)
