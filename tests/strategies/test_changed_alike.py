"""Parameters that a forward changes by a process's own batch are refused where each process holds all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from trainer import ConfigError, TrainModule

NAMES = ("DDP x2", "ZeRO-2 x2")


class Base(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.changed(self.layer(batch[0])).square().mean()

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ActNorm(Base):
    """As Glow's: a scale from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.is_new = True

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_new:
            self.scale.data.copy_(1 / x.detach().std(0))
        self.is_new = False
        return x * self.scale


class MaxNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Embedding(64, 4, max_norm=0.5)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale((x * 1000).long().sum(1) % 64)


class Normalized(Base):
    """As SwAV's prototypes: the change follows from the weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.weight.copy_(nn.functional.normalize(self.scale.weight))
        return self.scale(x)


class Frozen(Base):
    """A part is frozen where the optimizer is made."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x)

    def configure_optimizers(self) -> Any:
        self.scale.requires_grad_(False)
        return super().configure_optimizers()


def _train(name: str, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in (ActNorm, MaxNorm, Normalized, Frozen):
        torch.manual_seed(1)
        data = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
        trainer, module = WAYS[name].trainer(max_steps=3, default_root_dir=folder), kind()
        try:
            trainer.fit(module, data)
        except ConfigError as error:
            found[kind.__name__] = str(error), trainer.global_step
        else:
            found[kind.__name__] = {key: value.clone() for key, value in module.state_dict().items()}
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_each(_train, NAMES, str(tmp_path_factory.mktemp("alike")))


@pytest.mark.parametrize("name", NAMES)
def test_they_are_refused_in_the_first_step(name: str, found: dict[str, list[Any]], tmp_path: Path) -> None:
    skip_if_missing(name)
    for rank in found[name]:
        for kind, parameter in (("ActNorm", "scale"), ("MaxNorm", "scale.weight")):
            message, steps = rank[kind]
            assert message.startswith(f"{parameter} changed within the forward of a step, on each process by its own")
            assert steps == 0
    for kind in ("Normalized", "Frozen"):
        one, other = (rank[kind] for rank in found[name])
        assert all(torch.equal(one[key], other[key]) for key in one)
