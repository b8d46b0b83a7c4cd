"""Train on two processes, and cause trouble at a step on the named ranks.

Each argument is a JSON object: root, how, who ("0", "1", "both", "none"), options of the Trainer, whether checkpoints
are written in the background, seconds until the deadline, and a way of `strategy_runs` under which a transformer is
trained in place of a small net. Trouble comes once: what goes on from a checkpoint is left in peace.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.strategy_models import GPT
from tests.helpers.strategy_runs import WAYS
from trainer import Trainer, TrainModule
from trainer.callbacks import CSVLogger, ModelCheckpoint
from trainer.fault_tolerance.fault_points import VARIABLE, parse_faults
from trainer.strategies import STRATEGIES

STEPS, TROUBLE = 14, 7


class Net(TrainModule):
    def __init__(self, root: Path, how: str, here: bool) -> None:
        super().__init__()
        self.root, self.how, self.here = root, how, here
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.here and self.trainer.global_step == TROUBLE:
            self.trouble()
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def trouble(self) -> None:
        mark = self.root / f"trouble{os.environ.get('RANK')}"
        if mark.exists():
            return
        mark.touch()
        if self.how == "error":
            raise ValueError("deliberate")
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "locked":  # as a C extension that hangs without releasing the GIL
            time.sleep(1)
            ctypes.PyDLL(None).sleep(3600)
        if self.how == "slow":
            time.sleep(2.5)
        if self.how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[self.how])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Divided(GPT):
    """A transformer that a `Way` may divide over processes."""

    root: Path
    how: str
    here: bool
    trouble = Net.trouble

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.here and self.trainer.global_step == TROUBLE:
            self.trouble()
        return nn.functional.dropout(super().training_step(batch, batch_idx), 0.1)


def task(root: Path, how: str, here: bool, way: str | None) -> tuple[TrainModule, DataLoader[Any]]:
    """Return the module and its data."""
    numbers = torch.Generator().manual_seed(0)
    if way is None:
        x, y = torch.randn(64, 4, generator=numbers), torch.randn(64, 1, generator=numbers)
        return Net(root, how, here), DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
    module = Divided(ragged=True, tied=True, frozen=True, experts=4 if "EP" in way else 0)
    module.root, module.how, module.here = root, how, here
    return module, DataLoader(module.data(64), WAYS[way].micro_batch, shuffle=True)


def fit(
    root: str,
    how: str = "none",
    who: str = "none",
    deadline: float | None = None,
    async_save: bool = False,
    way: str | None = None,
    **options: Any,
) -> None:
    rank = os.environ.get("RANK")
    Path(root).mkdir(exist_ok=True)
    ckpt_path = options.pop("ckpt_path", "last")
    if deadline is not None and who in (rank, "both"):
        options |= {"deadline": datetime.now() + timedelta(seconds=deadline), "deadline_margin": 0}
    if way is not None:
        strategy = STRATEGIES[WAYS[way].strategy](**dict(WAYS[way].options))
        options = {"strategy": strategy, "devices": WAYS[way].processes, "accumulate_grad_batches": 2, **options}
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 2, "max_steps": STEPS, "seed": 1, "log_every_n_steps": 1, **options},
        default_root_dir=root,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=CSVLogger(),
        callbacks=[ModelCheckpoint(every_n_train_steps=5, async_save=async_save)],
    )
    try:
        # The trainer has seeded the random numbers for the weights.
        module, loader = task(Path(root), how, who in (rank, "both"), way)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    finally:
        if rank is not None:
            code = getattr(sys.exc_info()[1], "code", None)
            sys.stdout.write(f"{root} {trainer.global_step} {trainer.stop_reason} {code}\n")
            for fault in parse_faults(os.environ.get(VARIABLE, "")):
                if rank == str(fault.rank):
                    sys.stdout.write(f"{fault}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    runs = [json.loads(argument) for argument in sys.argv[1:]]
    for run in runs:
        try:
            fit(**run)
        except SystemExit:
            if len(runs) == 1 or "RANK" not in os.environ:
                raise
