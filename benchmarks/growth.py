"""Growth of times and memory with samples, names, callbacks, parameter groups, parameters, loaders, tensors and ranks.

Each row has the CPU time (or the requests) at growing sizes, and the growth exponent between the last two:
0 is no growth, 1 is in proportion. Sizes take turns, in rounds; the least of the rounds counts, because other processes
only add time. If the step of a hand-written loop also grows, its row follows.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import RandomSampler

from benchmarks._task import OFF
from benchmarks.resume import first_batch, in_a_process
from trainer import Callback, Trainer, TrainModule
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.writing import write_checkpoint
from trainer.fault_tolerance.collective_check import CollectiveCheck

STEPS = 60


class Parts(TrainModule):
    """A module of many small parameters, in groups, that logs many names."""

    def __init__(self, parameters: int = 2, groups: int = 1, names: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(max(parameters, groups))])
        self.groups, self.names = groups, [f"name{number}" for number in range(names)]
        self.times: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.times.append(time.process_time())
        loss = torch.cat([*self.weights]).mean()
        for name in self.names:
            self.log(name, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        weights = [*self.weights]
        return torch.optim.SGD([{"params": weights[number :: self.groups]} for number in range(self.groups)], lr=0.1)


class Counted(Callback):
    """A callback with a hook in each step."""

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None: ...


def step(module: Parts, callbacks: int = 0, loaders: int = 0) -> float:
    """Return the CPU time of a step in microseconds; with loaders, of each validation."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        **OFF,
        callbacks=[Counted() for _ in range(callbacks)],
        num_sanity_val_steps=0,
        val_check_interval=10 if loaders else 1.0,
    )
    trainer.fit(module, [torch.ones(1)] * STEPS, [[torch.ones(1)] for _ in range(loaders)] or None)
    return (module.times[-1] - module.times[STEPS // 3]) / (STEPS - 1 - STEPS // 3) * 1e6


def by_hand(module: Parts) -> float:
    """Return the CPU time of a step of a hand-written loop in microseconds."""
    optimizer = module.configure_optimizers()
    for number in range(STEPS):
        optimizer.zero_grad()
        module.training_step(None, number).backward()
        optimizer.step()
    return (module.times[-1] - module.times[STEPS // 3]) / (STEPS - 1 - STEPS // 3) * 1e6


def save_and_read(tensors: int, read: bool) -> float:
    """Return the CPU time of a save, or of a verified load, of small tensors in microseconds."""
    state = {"model": {f"layers.{number}.weight": torch.ones(4) for number in range(tensors)}}
    gc.collect()  # leftovers of earlier rounds are not counted
    with tempfile.TemporaryDirectory() as folder:
        begun = time.process_time()
        write_checkpoint(Path(folder) / "c", state)
        if read:
            begun = time.process_time()
            read_checkpoint(Path(folder) / "c")
        return (time.process_time() - begun) * 1e6


class CountingStore:
    """A store that counts the keys of its requests."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.keys = 0

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            self.keys += len(arguments[0]) if isinstance(arguments[0], list) else 1
            return getattr(self.store, name)(*arguments)

        return ask


def collective_check(ranks: int, rank: int) -> float:
    """Return the number of keys that a process requests in a collective check after all others have arrived."""
    store: Any = CountingStore()
    for other in range(ranks):
        store.store.set(f"collective/1/{other}", "save_checkpoint")
    store.store.set("collective/1/answer", "=")
    check = CollectiveCheck(store, rank, ranks, lambda: 0)
    check.wait_for_all("save_checkpoint")
    return float(store.keys)


ROWS: dict[str, tuple[tuple[int, ...], Callable[[int], float], str]] = {
    "step, by names logged": ((1, 10, 100), lambda n: step(Parts(names=n)), "us"),
    "step, by callbacks with a hook in it": ((1, 10, 100), lambda n: step(Parts(), callbacks=n), "us"),
    "step, by parameter groups": ((1, 10, 100, 1000), lambda n: step(Parts(groups=n)), "us"),
    "the same by hand, by parameter groups": ((1, 10, 100, 1000), lambda n: by_hand(Parts(groups=n)), "us"),
    "step, by parameters": ((10, 100, 1000, 10_000), lambda n: step(Parts(n)), "us"),
    "the same by hand, by parameters": ((10, 100, 1000, 10_000), lambda n: by_hand(Parts(n)), "us"),
    "step, a validation every 10, by its loaders": ((1, 10, 100), lambda n: step(Parts(), loaders=n), "us"),
    "save, by tensors": ((100, 1000, 10_000, 100_000), lambda n: save_and_read(n, read=False), "us"),
    "verified load, by tensors": ((100, 1000, 10_000, 100_000), lambda n: save_and_read(n, read=True), "us"),
    "collective check, rank 0, by ranks": ((2, 32, 1024), lambda n: collective_check(n, 0), "keys"),
    "collective check, others, by ranks": ((2, 32, 1024), lambda n: collective_check(n, 1), "keys"),
}


def samples() -> None:
    """Print the time to the first batch, and the memory, by the samples of a shuffled set."""
    print("| samples, shuffled | first batch and memory |\n|---|---|")
    for power in (6, 7, 8, 9, 10):
        shown = in_a_process(first_batch, lambda n: RandomSampler(range(n)), 10**power, 0)
        print(f"| 1e{power} | {shown} |", flush=True)


def main(arguments: list[str]) -> int:
    """Run the benchmark and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks growth", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=100_000, help="leave out larger sizes")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows whose name contains it")
    options = parser.parse_args(arguments)
    logging.getLogger("trainer").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if not options.only:
        samples()
    print("\n| | sizes | least of the rounds | grows with the power |\n|---|---|---|---|")
    for name, (sizes, measure, unit) in ROWS.items():
        if options.only and not any(text in name for text in options.only):
            continue
        wanted = [size for size in sizes if size <= options.most]
        rounds = [[measure(size) for size in wanted] for _ in range(options.rounds)]
        least = [min(of_size) for of_size in zip(*rounds, strict=True)]
        power = math.log(least[-1] / least[-2]) / math.log(wanted[-1] / wanted[-2]) if len(wanted) > 1 else math.nan
        shown = ", ".join(f"{value:,.0f}" for value in least)
        print(f"| {name} | {', '.join(f'{size:,}' for size in wanted)} | {shown} {unit} | {power:.2f} |", flush=True)
    return 0
