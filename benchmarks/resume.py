"""Cost of resuming in the middle of an epoch, and of reproducible random numbers in data loading.

First part: a DataLoader over a billion samples; time and memory until its first batch, at sample 0 and at sample
10,000,000, for every kind of sampler, next to the first index of torch's own sampler. Each case runs in a separate
process. Second part: time per batch of 32 rows of a dataset, next to torch's own DataLoader, in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainer.data.adapters import make_batch_loader

BATCH = 32


class Huge(Dataset[int]):
    """A dataset whose samples are their indices."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Own(Sampler[int]):
    """A user's sampler, which must be iterated from the start."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


SAMPLERS: dict[str, Callable[[int], Iterable[int]]] = {
    "shuffle=True": lambda n: RandomSampler(range(n)),
    "with replacement": lambda n: RandomSampler(range(n), replacement=True),
    "num_samples=n/2": lambda n: RandomSampler(range(n), num_samples=n // 2),
    "subset of n": lambda n: SubsetRandomSampler(range(n)),
    "n of 1M weights": lambda n: WeightedRandomSampler(torch.rand(1_000_000), n),
    "your own": lambda n: Own(n),
}
MOST_FOR_TORCH = 100_000_000
"""Beyond this torch's own samplers need more memory than most machines have."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks resume", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000_000)
    parser.add_argument("--start", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=25, help="of the second part")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    smaller = min(options.samples // 100, MOST_FOR_TORCH)
    print(f"Time until the first batch of {BATCH}, of {options.samples:,} samples; torch's sampler: of {smaller:,}\n")
    print(f"{'sampler':18}{'at 0':>18}{f'at {options.start:,}':>22}{'torch, at 0':>22}")
    for name, make in SAMPLERS.items():
        cells = [
            in_a_process(first_batch, make, options.samples, 0),
            in_a_process(first_batch, make, options.samples, options.start),
            in_a_process(_first_of_torch, make, smaller, 0),
        ]
        print(f"{name:18}{cells[0]:>18}{cells[1]:>22}{cells[2]:>22}", flush=True)
    print()
    _per_batch(options.rounds)
    return 0


def first_batch(make: Callable[[int], Iterable[int]], samples: int, start: int) -> None:
    loader = DataLoader(Huge(samples), BATCH, sampler=make(samples))
    batches = make_batch_loader(loader, rank=0, world_size=1, seed=1, training=True)
    next(batches.iterate(1, start // BATCH))


def _first_of_torch(make: Callable[[int], Iterable[int]], samples: int, start: int) -> None:
    next(iter(make(samples)))


def in_a_process(task: Callable[..., None], *args: Any) -> str:
    """Return seconds, and MB of memory above the level at the start of the process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(sender, task, *args))
    process.start()
    sender.close()
    try:
        seconds, megabytes = receiver.recv()
    except EOFError:
        return "killed"
    finally:
        process.join()
    return f"{seconds * 1e3:,.0f} ms {megabytes:,.0f} MB"


def _measured(sender: Any, task: Callable[..., None], *args: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    task(*args)
    seconds = time.perf_counter() - begun
    sender.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
    sender.close()
    os._exit(0)


class Noisy(Dataset[Any]):
    """Rows that draw from the named generators."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.data = TensorDataset(torch.randn(8000, 10), torch.randn(8000, 1))
        self.draw = draw

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.draw()
        return self.data[index]


DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "torch": lambda: torch.rand(()),
    "numpy": lambda: np.random.rand(),
    "random": lambda: random.random(),
    "all three": lambda: (torch.rand(()), np.random.rand(), random.random()),
}


def _per_batch(rounds: int) -> None:
    print(f"Microseconds of CPU time per batch of {BATCH}, num_workers=0; the least of {rounds} rounds\n")
    print(f"{'__getitem__ draws':20}{'torch DataLoader':>18}{'seed per batch':>18}{'seed per sample':>18}")
    for name, draw in DRAWS.items():
        loader = DataLoader(Noisy(draw), BATCH, shuffle=True)
        ways: list[Callable[[], Iterable[Any]]] = [lambda loader=loader: loader]  # type: ignore[misc]
        for per_sample in (False, True):
            batches = make_batch_loader(loader, rank=0, world_size=1, seed=1, training=True, seed_per_sample=per_sample)
            ways.append(lambda batches=batches: batches.iterate(0))  # type: ignore[misc]
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            for way, taken in zip(ways, times, strict=True):
                begun = time.process_time()
                batches = sum(1 for _ in way())
                taken.append((time.process_time() - begun) / batches * 1e6)
        print(f"{name:20}" + "".join(f"{min(taken):>18.1f}" for taken in times), flush=True)
