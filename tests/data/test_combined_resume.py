"""Runs over several loaders, stopped at any step, resumed and compared with one that was not: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from trainer import Trainer, TrainModule
from trainer.data.combined_loader import MODES, CombinedLoader

STEPS = 12
STOPS = (1, 4, 9)
"""Steps after which a run is stopped: within the short loader's first round, after it, in the second epoch."""


class OwnLoader(DataLoader[Any]):
    """A subclass, which is iterated as it is: each of several processes takes a part of its batches."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [part + 0 for part in batch]


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = [part for part in (batch.values() if isinstance(batch, dict) else [batch]) if part is not None]
        self.seen.append([round(float(number), 4) for (inputs,) in parts for number in inputs[:, 0]])
        return torch.stack([self.layers(inputs).square().mean() for (inputs,) in parts]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def made(kind: str) -> Any:
    data = TensorDataset(torch.randn(44, 3, generator=torch.Generator().manual_seed(1)))
    few = TensorDataset(10 + torch.randn(12, 3, generator=torch.Generator().manual_seed(2)))
    if kind == "subclass":
        return OwnLoader(data, batch_size=4, shuffle=True)
    loaders = {"long": DataLoader(data, batch_size=4, shuffle=True), "short": DataLoader(few, 4, shuffle=True)}
    return loaders if kind == "dict" else CombinedLoader(loaders, kind)  # type: ignore[arg-type]


def trained(kind: str, folder: Path, steps: int, ckpt_path: Path | None = None) -> Any:
    """Return the weights and what each step has seen."""
    trainer = Trainer(max_steps=steps, seed=5, default_root_dir=folder, **QUIET)
    module = Net()
    trainer.fit(module, made(kind), ckpt_path=ckpt_path)
    if steps < STEPS:
        trainer.save_checkpoint(folder / f"{kind}-{steps}")
    return [value.tolist() for value in module.state_dict().values()], module.seen


def runs(folder: str, kinds: list[str]) -> dict[str, Any]:
    """Return, for each kind, the steps after which a resumed run differed, and what the unbroken run has seen."""
    found = {}
    for kind in kinds:
        unbroken, seen = trained(kind, Path(folder), STEPS)
        differ = []
        for stop in STOPS:
            trained(kind, Path(folder), stop)
            weights, rest = trained(kind, Path(folder), STEPS, Path(folder) / f"{kind}-{stop}")
            if weights != unbroken or rest != seen[stop:]:
                differ.append(stop)
        found[kind] = (differ, seen)
    return found


KINDS = ["dict", *MODES, "subclass"]


@pytest.mark.parametrize("world", [1, 2], ids=["one process", "two processes"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(world: int, tmp_path: Path) -> None:
    ranks = run_distributed(runs, world, str(tmp_path), KINDS)
    for found in ranks:
        assert {kind: differ for kind, (differ, _) in found.items()} == {kind: [] for kind in KINDS}
    # The processes share the samples of an epoch of a subclass: none comes twice.
    epoch = [number for found in ranks for step in found["subclass"][1][: 11 // world] for number in step]
    assert len(epoch) == len(set(epoch)) >= 40
