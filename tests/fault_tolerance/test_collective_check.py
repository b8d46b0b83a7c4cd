"""A collective that only some processes call raises an error at once."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.helpers.processes import fork_ranks, run_distributed
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.distributed.process_group import SingleProcess
from trainer.errors import TrainerError
from trainer.fault_tolerance.collective_check import CollectiveCheck
from trainer.precision import PRECISIONS
from trainer.strategies import STRATEGIES, DDPStrategy
from trainer.strategies.distributed import DistributedStrategy

SCRIPT = """
import os
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.strategies import FSDPStrategy

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

class ByHand(Net):
    automatic_optimization = False
    def training_step(self, batch, batch_idx):
        optimizer, odd = self.optimizers(), self.trainer.rank == 1 and batch_idx == 2
        for _ in range({"a backward more": 1 + odd, "a backward less": 1 - odd}.get(sys.argv[2].split(",")[0], 1)):
            self.manual_backward(self.layer(batch[0]).square().mean())
        self.log("number", float(batch_idx))
        optimizer.step()
        optimizer.zero_grad()

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
    "a backward more": lambda t: None,
    "a backward less": lambda t: None,
    "a backward more, in a long epoch": lambda t: None,
    "late": lambda t: (t.rank and __import__("time").sleep(3), t.read_metrics(), t.save_checkpoint("by hand")),
}
by_hand = sys.argv[2].startswith("a backward")
samples = 64 + (int(os.environ.get("RANK", 0)) if sys.argv[2] == "other samples" else 0)
if by_hand:
    samples = 480 if "long" in sys.argv[2] else 24
data = DataLoader(TensorDataset(torch.ones(samples, 4)), 4)
hybrid = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 1))
strategy = hybrid if sys.argv[1] == "hybrid" else sys.argv[1]
trainer = Trainer(
    strategy=strategy, devices=2, accelerator="cpu", max_steps=50 if by_hand else 6, logger=False,
    callbacks=[Wrong(), ModelCheckpoint(every_n_train_steps=3)] if sys.argv[2] == "rank 0 reads" else Wrong(),
    enable_checkpointing=sys.argv[2] == "rank 0 reads", enable_progress_bar=False, enable_model_summary=False,
    watchdog_seconds=100, log_every_n_steps=20,
)
trainer.fit(ByHand() if by_hand else Net(), data)
print("done")
"""

MESSAGES = {
    ("fsdp", "rank 0 saves"): ("rank 0 calls save_checkpoint (in ", "<lambda>), and rank 1 has gone on without"),
    ("ddp", "rank 0 saves"): ("rank 0 calls save_checkpoint (in ", "<lambda>), and rank 1 has gone on without"),
    ("ddp", "another call"): (" calls read_metrics (in ", " calls save_checkpoint (in "),
    # Rank 1 answers with a call of the same name by another callback.
    ("ddp", "rank 0 reads"): (" calls read_metrics (in checkpoint.py, ", ", <lambda>)"),
    ("ddp", "in a step"): (
        "rank 1 calls save_checkpoint (in ",
        "training_step), and rank 0 waits in all_reduce",
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
    running = {key: fork_ranks("train.py", *key) for key in [*MESSAGES, ("ddp", "late")]}
    try:
        results = {key: one.wait() for key, one in running.items()}
    finally:
        for one in running.values():
            one.kill()
    for key, message in MESSAGES.items():
        result = results[key].check(1)
        assert all(one in result.stderr for one in message), result.stderr
        assert "has been no progress" not in result.stderr
        assert result.stderr.count("Traceback (most recent call last)") == 1, result.stderr
    assert results["ddp", "late"].check(0).stdout.count("done") == 2


SHARING = [name for name, kind in STRATEGIES.items() if issubclass(kind, DistributedStrategy)]


@pytest.mark.parametrize("strategy", [*SHARING, "hybrid"])
def test_a_process_that_waits_where_the_other_cannot_come(strategy: str) -> None:
    """Rank 1 makes a call inside of a step, and rank 0 waits in what the strategy communicates by."""
    Path("train.py").write_text(SCRIPT)
    errors = fork_ranks("train.py", strategy, "in a step").wait().check(1).stderr
    assert "rank 1 calls save_checkpoint (in train.py, training_step), and rank 0 waits in " in errors
    assert ": they wait for each other. " in errors
    assert "has been no progress" not in errors
    assert "rank 0 stops because rank 1 failed" in errors


BACKWARDS = {
    "a backward more": (0, 3, "the end of epoch 0"),
    "a backward less": (1, 2, "the end of epoch 0"),
    "a backward more, in a long epoch": (0, 20, "step 20"),  # at the first flush of the log
}
"""The rank that finds the other one waiting, its number of backwards, and where it is."""


def test_processes_that_call_manual_backward_different_numbers_of_times() -> None:
    Path("train.py").write_text(SCRIPT)
    running = {case: fork_ranks("train.py", "ddp", case) for case in BACKWARDS}
    try:
        for case, (rank, backwards, place) in BACKWARDS.items():
            errors = running[case].wait().check(1).stderr
            assert f"rank {rank} calls {backwards} times manual_backward" in errors
            assert f" times optimizer.step until {place}, and rank {1 - rank} waits in all_" in errors
            assert "training_step (" in errors
            assert ": they wait for each other. All processes have to make the same calls" in errors
            assert "has been no progress" not in errors
    finally:
        for one in running.values():
            one.kill()


CALLS = {
    "a backward more": "rank 1 calls block layer after layer in training_step",
    "a backward less": "rank 1 calls nothing of the module in training_step",
    "a backward more, in a long epoch": "rank 1 calls block layer after layer in training_step",
}


def test_processes_that_come_to_a_block_different_numbers_of_times() -> None:
    """Under fsdp it is the forward before the backward that is reported."""
    Path("train.py").write_text(SCRIPT)
    running = {case: fork_ranks("train.py", "fsdp", case) for case in CALLS}
    try:
        for case, words in CALLS.items():
            errors = running[case].wait().check(1).stderr
            assert words in errors
            assert "has been no progress" not in errors
    finally:
        for one in running.values():
            one.kill()


def gather_numbers(processes: SingleProcess) -> Any:
    return processes.all_gather_object(1)


def gather_words(processes: SingleProcess) -> Any:
    return processes.all_gather_object({"a": 1})


def gather_by_torch(processes: SingleProcess) -> Any:
    values: list[Any] = [None] * processes.world_size
    torch.distributed.all_gather_object(values, processes.rank)
    return values


def gather_differently() -> list[Any]:
    """Return what each rank gets from calls that are the same, or differ between the ranks."""
    strategy = DDPStrategy()
    strategy.setup_environment("cpu", PRECISIONS["32-true"])
    processes, found = strategy.processes, []
    for calls in ((gather_words, gather_words), (gather_numbers, gather_words), (gather_numbers, gather_by_torch)):
        try:
            found.append(calls[processes.rank](processes))
        except (TrainerError, pickle.UnpicklingError, ValueError) as error:
            found.append(str(error))
    return found


def test_values_of_different_functions_are_not_taken_for_each_other() -> None:
    first, second = run_distributed(gather_differently)
    assert first[0] == second[0] == [{"a": 1}] * 2
    for found in (first, second):
        assert "rank 0 is in gather_numbers of test_collective_check.py, and rank 1 in gather_words" in found[1]
    assert "gather_numbers of test_collective_check.py, and rank 1 in a call that is not the trainer's" in first[2]


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
        with raises_recorded(ConfigError):
            CollectiveCheck(store, rank, 3, lambda: 1).wait_for_all(call)
