"""A run that is resumed with another micro-batch size keeps its position in the data."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainer import Trainer, TrainModule

SAMPLES = 24


class Seen(TrainModule):
    """A module that records the samples it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen += [int(x) for x in batch[0].flatten()]
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def run(root: Path, batch_size: int, max_steps: int) -> list[int]:
    """Train, and return the samples in the order in which they were used."""
    module = Seen()
    loader = DataLoader(TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), batch_size=batch_size, shuffle=True)
    trainer = Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        seed=3,
        default_root_dir=root,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path="last")
    return module.seen


@pytest.mark.parametrize(("first", "steps", "then"), [(4, 2, 8), (8, 1, 4), (4, 6, 8), (3, 4, 4)])
def test_the_rest_of_the_epoch_is_the_rest_of_the_order(tmp_path: Path, first: int, steps: int, then: int) -> None:
    order = run(tmp_path / "uninterrupted", batch_size=1, max_steps=2 * SAMPLES)
    assert sorted(order[:SAMPLES]) == list(range(SAMPLES))
    assert run(tmp_path / "cut", first, steps) == order[: first * steps]
    going_on = run(tmp_path / "cut", then, steps + 2)
    assert going_on == order[first * steps : first * steps + 2 * then]


def test_the_path_of_a_value_inside_a_batch_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    order = run(tmp_path, batch_size=4, max_steps=1)
    with caplog.at_level(logging.WARNING, logger="trainer"):
        again = run(tmp_path, batch_size=8, max_steps=2)
    assert again[:4] == order
    assert "4 samples of this epoch are used a second time" in caplog.text
