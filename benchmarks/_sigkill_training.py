"""A small training in which everything is random; it saves after every step and resumes.

Killed anywhere and restarted until it ends, it has to end with the bits of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer import Trainer, TrainModule
from trainer.callbacks import CSVLogger, LambdaCallback, ModelCheckpoint
from trainer.testing import FaultCallback


class Noisy(Dataset):
    """Points with noise from each of the three generators that augmentations use."""

    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(8) + float(np.random.rand()) + random.random()
        return index / 38 + noise


class Net(TrainModule):
    """Dropout and batch statistics; the target is the mean of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 1)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch).squeeze(1) - batch.mean(1)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch).squeeze(1) - batch.mean(1)).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    data = Noisy()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        val_check_interval=4,
        log_every_n_steps=1,
        seed=7,
        default_root_dir=options.folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(),
        callbacks=[
            FaultCallback(),
            LambdaCallback(on_train_start=lambda trainer, module: print("ready", trainer.global_step, flush=True)),
            ModelCheckpoint(every_n_train_steps=1, monitor="val_loss", save_top_k=2),
        ],
    )
    train = DataLoader(data, batch_size=4, shuffle=True, num_workers=options.workers)
    validation = DataLoader([torch.full((8,), i / 9) for i in range(9)], batch_size=3)
    trainer.fit(Net(options.width), train, validation, ckpt_path="last")
    print("done", trainer.global_step)


if __name__ == "__main__":
    main()
