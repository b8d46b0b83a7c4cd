"""A small, fully random training; it saves often and resumes, on any strategy and store.

However it is disturbed and restarted, it has to end with the bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import CSVLogger, ModelCheckpoint
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

    def __init__(self, width: int = 64) -> None:
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


class Ready(Callback):
    """Print a line when training begins; move the clock at the end of its tenth step by some seconds."""

    def __init__(self, clock_jump: float) -> None:
        self.clock_jump = clock_jump
        self.steps = 0

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero:
            print("ready", trainer.global_step, flush=True)

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps += 1
        if self.steps == 10 and self.clock_jump:
            jump_clock(self.clock_jump, trainer.run_dir)


def jump_clock(seconds: float, folder: Path) -> None:
    """Move the time of day as this process reads it, and the times of the files written so far the other way."""
    now = time.time
    time.time = lambda: now() + seconds
    for path in folder.rglob("*"):
        try:
            os.utime(path, (now() - seconds, now() - seconds))
        except FileNotFoundError:
            continue


def register_flaky_store(rate: float, delay: float, seed: int) -> None:
    """Make `flaky://` URLs an object store in a local folder. All calls are slow, and this fraction fails."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    rng = random.Random(f"{seed} {os.getpid()}")
    errors = (ConnectionResetError("reset by peer"), TimeoutError("timed out"), RuntimeError("a client library's own"))

    class Object(io.BytesIO):
        """Contents that appear at once when they are closed, as in an object store."""

        def __init__(self, path: str) -> None:
            super().__init__()
            self.path = path

        def close(self) -> None:
            if not self.closed:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                put = Path(f"{self.path}.put-{os.getpid()}")
                try:
                    put.write_bytes(self.getvalue())
                except OSError:  # a full disk: a store keeps nothing of it
                    put.unlink(missing_ok=True)
                    raise
                os.replace(put, self.path)
            super().close()

    def flaky(name: str) -> Any:
        real = getattr(LocalFileSystem, name)

        def call(self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(rng.uniform(0, delay))
            if rng.random() < rate:
                raise rng.choice(errors)
            if name == "open" and "w" in (args[0] if args else kwargs.get("mode", "rb")):
                return Object(self._strip_protocol(path))
            return real(self, path, *args, **kwargs)

        return call

    names = ("open", "ls", "info", "exists", "isfile", "isdir", "rm_file", "rm", "pipe_file", "cat_file", "modified")
    store = type("Flaky", (LocalFileSystem,), {"protocol": "flaky", **{name: flaky(name) for name in names}})
    fsspec.register_implementation("flaky", store, clobber=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train to the end, starting from the last checkpoint in the folder."""
    options = parse(arguments)
    torch.set_num_threads(1)
    dirpath = None
    if options.store is not None:
        register_flaky_store(**json.loads(options.store))
        dirpath = f"flaky://{options.folder}/store"
    trainer = Trainer(
        accelerator="cpu",
        strategy=options.strategy,
        devices=options.devices,
        max_epochs=options.epochs,
        max_restarts=options.max_restarts,
        watchdog_seconds=options.watchdog_seconds,
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
            Ready(options.clock_jump),
            ModelCheckpoint(
                dirpath=dirpath,
                every_n_train_steps=options.every_n_train_steps,
                monitor="val_loss",
                save_top_k=2,
                async_save=options.async_save,
                on_write_error=options.on_write_error,
            ),
        ],
    )
    train = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=options.workers)
    validation = DataLoader([torch.full((8,), i / 9) for i in range(9)], batch_size=3)
    trainer.fit(Net(options.width), train, validation, ckpt_path="last")
    print("done", trainer.global_step)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--strategy", default="single_device")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--on-write-error", default="raise")
    parser.add_argument("--every-n-train-steps", type=int, default=1)
    parser.add_argument("--watchdog-seconds", type=float, default=1800.0)
    parser.add_argument(
        "--clock-jump", type=float, default=0.0, help="seconds by which the clock jumps after ten steps"
    )
    parser.add_argument(
        "--store", help="write checkpoints to a failing store: options of register_flaky_store, in JSON"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
