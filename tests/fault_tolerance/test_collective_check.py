"""A collective that only some processes call raises an error at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from tests.helpers.processes import Running, fork_python
from trainer import ConfigError
from trainer.fault_tolerance.collective_check import CollectiveCheck

SCRIPT = """
import os
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        if sys.argv[2] == "in a step" and self.trainer.global_step == 3 and self.trainer.rank == 1:
            self.trainer.save_checkpoint("by hand")
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Wrong(Callback):
    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 3:
            CALLS[sys.argv[2]](trainer)
    def on_train_epoch_end(self, trainer, module):
        if sys.argv[2] == "at an epoch's end" and trainer.is_global_zero:
            trainer.save_checkpoint("by hand")
    def on_fit_start(self, trainer, module):
        assert trainer.global_rank == trainer.rank == trainer.local_rank == int(os.environ.get("LOCAL_RANK", 0))
    def on_fit_end(self, trainer, module):
        if sys.argv[2] == "at the end" and trainer.rank == 1:
            trainer.full_state_dict()

CALLS = {
    "rank 0 saves": lambda t: t.is_global_zero and t.save_checkpoint("by hand"),
    "another call": lambda t: t.read_metrics() if t.rank else t.save_checkpoint("by hand"),
    "rank 0 reads": lambda t: t.is_global_zero and t.read_metrics(),
    "at an epoch's end": lambda t: None,
    "at the end": lambda t: None,
    "in a step": lambda t: None,
    "other samples": lambda t: None,
    "late": lambda t: (t.rank and __import__("time").sleep(3), t.read_metrics(), t.save_checkpoint("by hand")),
}
samples = 64 + (int(os.environ.get("RANK", 0)) if sys.argv[2] == "other samples" else 0)
data = DataLoader(TensorDataset(torch.ones(samples, 4)), 4)
trainer = Trainer(
    strategy=sys.argv[1], devices=2, accelerator="cpu", max_steps=6, logger=False,
    callbacks=[Wrong(), ModelCheckpoint(every_n_train_steps=3)] if sys.argv[2] == "rank 0 reads" else Wrong(),
    enable_checkpointing=sys.argv[2] == "rank 0 reads", enable_progress_bar=False, enable_model_summary=False,
    watchdog_seconds=100,
)
trainer.fit(Net(), data)
print("done")
"""

TOLD = {
    ("fsdp", "rank 0 saves"): ("rank 0 calls save_checkpoint (in ", "<lambda>), and rank 1 has gone on without"),
    ("ddp", "rank 0 saves"): ("rank 0 calls save_checkpoint (in ", "<lambda>), and rank 1 has gone on without"),
    ("ddp", "another call"): (" calls read_metrics (in ", " calls save_checkpoint (in "),
    # Rank 1 answers with a call of the same name by another callback.
    ("ddp", "rank 0 reads"): (" calls read_metrics (in checkpoint.py, ", ", <lambda>)"),
    ("ddp", "in a step"): (
        "rank 1 calls save_checkpoint (in ",
        "training_step), and rank 0 waits for it in all_reduce",
    ),
    ("ddp", "other samples"): ("the training loader, samples in an epoch: 64 on rank 0, and 65 on rank 1",),
    # Rank 1 reads the values logged in the hook.
    ("ddp", "at an epoch's end"): (
        "rank 0 calls save_checkpoint (in ",
        "on_train_epoch_end), and rank 1 has gone on without",
    ),
    ("ddp", "at the end"): ("rank 1 calls full_state_dict (in ", "on_fit_end), and rank 0 has gone on without"),
}


def test_a_call_on_some_processes_is_reported() -> None:
    """All cases share one start of two processes; in the last one a process is only late."""
    Path("train.py").write_text(SCRIPT)
    running: dict[tuple[str, str], Running] = {key: fork_python("train.py", *key) for key in [*TOLD, ("ddp", "late")]}
    try:
        results = {key: one.wait() for key, one in running.items()}
    finally:
        for one in running.values():
            one.kill()
    for key, words in TOLD.items():
        result = results[key].check(1)
        assert all(one in result.stderr for one in words), result.stderr
        assert "has been no progress" not in result.stderr
        assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr
    assert results["ddp", "late"].check(0).stdout.count("done") == 2


class Counting:
    """A store that counts its requests."""

    def __init__(self, store: HashStore, requests: Counter[str]) -> None:
        self._store, self._requests = store, requests

    def __getattr__(self, name: str) -> Any:
        def request(*args: Any) -> Any:
            self._requests[name] += 1
            return getattr(self._store, name)(*args)

        return request


def test_the_requests_grow_with_the_processes_not_with_their_square() -> None:
    """All ranks but 0 have come when rank 0 does, so that none waits; then each needs its own requests only."""
    world, requests, store = 1024, Counter[str](), HashStore()
    for rank in range(1, world):
        store.set(f"collective/1/{rank}", "save")
    CollectiveCheck(Counting(store, requests), 0, world, lambda: 1).wait_for_all("save")  # type: ignore[arg-type]
    for rank in range(1, world):
        CollectiveCheck(Counting(store, requests), rank, world, lambda: 1).wait_for_all("save")  # type: ignore[arg-type]
    assert sum(requests.values()) <= 4 * world, requests


def test_each_rank_names_the_call_of_the_others() -> None:
    store = HashStore()
    for rank, call in ((1, "save"), (2, "read")):
        store.set(f"collective/1/{rank}", call)
    for rank, call in enumerate(("save", "save", "read")):
        with pytest.raises(ConfigError, match="rank 0 calls save, and rank 2 calls read"):
            CollectiveCheck(store, rank, 3, lambda: 1).wait_for_all(call)
