"""A GPT-2 of 124 M parameters, or a tiny one, with its data: the work of the benchmarks on GPUs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks._task import OFF
from examples.gpt.model import Transformer
from trainer import Trainer, TrainModule

SIZES, SMALL_SIZES = (50257, 1024, 12, 768), (64, 16, 2, 32)
"""Vocabulary, context, layers and width."""


class Stopwatch:
    """Measure wall time from one forward pass to a later one, each time with the device idle."""

    def __init__(self, device: str, first: int, last: int) -> None:
        self.device, self.first, self.last = device, first, last
        self.count, self.seconds, self._start = 0, 0.0, 0.0

    def tick(self) -> None:
        self.count += 1
        if self.count in (self.first, self.last):
            if self.device != "cpu":
                torch.accelerator.synchronize()
            now = time.perf_counter()
            self.seconds, self._start = (now - self._start) / (self.last - self.first), now


class GPT2(TrainModule):
    """Predicts each next token; keeps its losses, which are not read while it trains."""

    def __init__(self, watch: Stopwatch, small: bool) -> None:
        super().__init__()
        vocabulary, context, layers, width = sizes(small)
        self.net = Transformer(vocabulary, context, layers, max(1, width // 64), width, dropout=0.0)
        self.watch = watch
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.watch.tick()
        loss = cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


def sizes(small: bool) -> tuple[int, int, int, int]:
    return SMALL_SIZES if small else SIZES


def tokens(samples: int, small: bool) -> torch.Tensor:
    vocabulary, context, _, _ = sizes(small)
    return torch.randint(vocabulary, (samples, context + 1), generator=torch.Generator().manual_seed(0))


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> str:
    """Return the largest memory since `reset_peak`, in GiB; empty if unknown."""
    return f"{torch.cuda.max_memory_allocated() / 2**30:.2f}" if device == "cuda" else ""


def train(strategy: str, device: str, devices: int, samples: int, steps: int, small: bool) -> tuple[Any, float, str]:
    """Train with `samples` in a step over all `devices`; return this process's losses, seconds per step and peak.

    The processes must already exist, as in a function given to `trainer.launch`.
    """
    reset_peak(device)
    torch.manual_seed(0)
    watch = Stopwatch(device, max(1, steps // 4), steps)
    module, data = GPT2(watch, small), tokens(samples * steps, small)
    options = {"accelerator": device, "devices": devices, "strategy": strategy, "precision": "bf16-mixed", **OFF}
    Trainer(**options, max_epochs=1).fit(module, DataLoader(data, samples // devices))
    return torch.stack(module.losses).float().cpu(), watch.seconds, peak(device)
