"""ModelCheckpoint(trainable_only=True): what is left out is what a new process has anyway."""

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
from trainer import Callback, Trainer, TrainModule, seed_everything
from trainer.callbacks import BadStepGuard, ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.errors import CheckpointError


class Student(TrainModule):
    """A student, a frozen base, and a teacher that is frozen and follows the student in a hook."""

    def __init__(self, follows_from: int = 0, rate: float = 1e-4) -> None:
        seed_everything(5)
        super().__init__()
        self.base, self.student, self.teacher = (nn.Linear(4, 4) for _ in range(3))
        self.base.requires_grad_(False)
        self.teacher.requires_grad_(False)
        self.follows_from, self.rate = follows_from, rate  # the default is too little for bfloat16

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features = self.base(batch[0])
        return (self.student(features) - self.teacher(features) - batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step > self.follows_from:
            with torch.no_grad():
                for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    own.lerp_(other, self.rate)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=0.01)


def fit(
    folder: Path,
    steps: int,
    module: Student,
    *callbacks: Callback,
    bad: int | None = None,
    every: int = 1,
    **options: Any,
) -> Any:
    features = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    if bad is not None:
        features[bad] = torch.nan
    saving = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, trainable_only=True, filename="{step}")
    trainer: Trainer = quiet(
        max_steps=steps, callbacks=[*callbacks, saving], enable_checkpointing=True, default_root_dir=folder
    )
    trainer.fit(module, DataLoader(TensorDataset(features), batch_size=8), **options)
    return trainer


@pytest.mark.parametrize("follows_from", [0, 3])
def test_frozen_weights_that_change_are_saved(follows_from: int, tmp_path: Path) -> None:
    """At first before any checkpoint, then after some, and after a resume."""
    full = Student(follows_from)
    fit(tmp_path / "full", 6, full)
    for stop in (2, 4, 6):
        broken = Student(follows_from)
        fit(tmp_path / "broken", stop, broken, ckpt_path="last" if stop > 2 else None)
    assert_same_bits(full.state_dict(), broken.state_dict())
    held = read_checkpoint(tmp_path / "broken" / "step=6")["model"]
    assert sorted({name.partition(".")[0] for name in held}) == ["student", "teacher"]


def test_a_run_goes_back_to_trained_weights_alone(tmp_path: Path) -> None:
    module = Student()
    trainer = fit(tmp_path, 6, module, BadStepGuard("rewind"), bad=20)
    assert trainer.global_step == 6
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
    with raises_recorded(CheckpointError):
        fit(tmp_path / "late", 6, Student(2, rate=0.5), BadStepGuard("rewind"), bad=28, every=2)
