"""A sampler that shards by itself gives the numbers of a hand-written loop over the same global batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from tests.helpers.processes import once_per_module
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS, StepLosses, run_each, skip_if_missing
from trainer import seed_everything

pytestmark = pytest.mark.timeout(600)

NAMES = ("DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")
SAMPLES = {"padded": 23, "uneven": 13, "ends early": 9}
LENGTHS = {"padded": 3, "uneven": 2, "ends early": 1}
"""Micro-batches of an epoch, on every process: those of the process with the fewest."""
MICRO_BATCH, WINDOW, EPOCHS, RATE = 4, 2, 2, 0.05


class Padded(DistributedSampler[Any]):
    """A user's subclass, which the trainer cannot replace."""


class Uneven(Sampler[int]):
    """Give every second sample to each process, without padding."""

    def __init__(self, samples: int, rank: int) -> None:
        self.num_replicas, self.rank, self.samples = 2, rank, samples

    def __len__(self) -> int:
        return len(range(self.rank, self.samples, 2))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.samples, 2))


def sampler_of(kind: str, rank: int) -> Sampler[int]:
    samples = SAMPLES[kind]
    return Padded(range(samples), 2, rank, shuffle=False) if kind == "padded" else Uneven(samples, rank)


class Module(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def train_all(name: str) -> dict[str, tuple[list[float], dict[str, torch.Tensor], int | None]]:
    return {kind: train(name, kind) for kind in SAMPLES}


def train(name: str, kind: str) -> tuple[list[float], dict[str, torch.Tensor], int | None]:
    recorder = StepLosses()
    trainer = WAYS[name].trainer(
        seed=1, max_epochs=EPOCHS, accumulate_grad_batches=WINDOW, log_every_n_steps=1, callbacks=recorder
    )
    sampler = sampler_of(kind, int(os.environ["RANK"]))
    trainer.fit(Module(), DataLoader(MLP.data(SAMPLES[kind]), MICRO_BATCH, sampler=sampler))
    return recorder.losses, trainer.full_state_dict(everywhere=True), trainer.num_training_batches


def by_hand(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train one process on the samples that both processes have in each window."""
    seed_everything(1)
    module, losses = Module(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    x, y = MLP.data(SAMPLES[kind]).tensors
    ranks = [list(torch.tensor(list(sampler_of(kind, rank))).split(MICRO_BATCH)) for rank in range(2)]
    together = [torch.cat(batches) for batches in zip(*ranks, strict=False)]
    windows = [torch.cat(together[first : first + WINDOW]) for first in range(0, len(together), WINDOW)]
    for _ in range(EPOCHS):
        for indices in windows:
            optimizer.zero_grad()
            loss = mse_loss(module(x[indices]), y[indices])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, module.state_dict()


results = once_per_module(lambda names: run_each(train_all, names), "name")


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_weights_are_those_of_the_same_global_batches(name: str, kind: str, results: Any) -> None:
    skip_if_missing(name)
    losses, weights = by_hand(kind)
    for rank in results[name]:
        found, theirs, length = rank[kind]
        assert found == pytest.approx(losses, rel=1e-5)
        assert length == LENGTHS[kind]
        for key, value in weights.items():
            torch.testing.assert_close(theirs[key], value, rtol=1e-5, atol=1e-6)
