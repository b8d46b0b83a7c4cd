"""A training that records its steps and its last weights, for runs that are killed and compared."""

from __future__ import annotations

import hashlib
from pathlib import Path

SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint

folder, steps, pause, *rest = sys.argv[1:]


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(float(pause))
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Steps(Callback):
    def on_train_step_end(self, trainer, module, *args):
        with open(f"{folder}/steps-{trainer.rank}", "a") as file:
            file.write(f"{trainer.global_step}\\\\n")

    def on_fit_end(self, trainer, module):
        if trainer.rank == 0:
            torch.save(module.state_dict(), f"{folder}/weights")


data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
trainer = Trainer(
    devices=int(rest[0]) if rest and rest[0].isdigit() else "auto", accelerator="cpu", max_steps=int(steps), seed=1,
    logger=False,
    default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
    max_restarts=int(rest[1]) if len(rest) > 1 else 0,
    callbacks=[ModelCheckpoint(every_n_train_steps=5), Steps()],
)
trainer.fit(Net(), DataLoader(data, batch_size=4, shuffle=True), ckpt_path="last" if "last" in rest else None)
""".replace("\\\\n", "\\n")

EVERY = 5
"""Steps from checkpoint to checkpoint."""


def steps_of(folder: Path, rank: int = 0) -> list[int]:
    """Return the steps that a rank has done, including repeated ones."""
    path = folder / f"steps-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def weights_of(folder: Path) -> str:
    """Return a checksum of the last weights."""
    import torch

    state = torch.load(folder / "weights", weights_only=True)
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def make(folder: Path) -> Path:
    """Write the script, make an empty folder for its output, and return the script's path."""
    (folder / "out").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"
