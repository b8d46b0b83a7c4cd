"""No strategy trains parameters that are on the meta device, where they have no values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import MLP
from trainer import ConfigError, Trainer
from trainer.strategies import STRATEGIES


class Late(MLP):
    """Build a layer without memory in `configure_model`, as `init_empty_weights()` does, or in `__init__`."""

    def __init__(self, deferred: bool, buffer: bool) -> None:
        super().__init__()
        self.deferred, self.buffer = deferred, buffer
        if not deferred:
            self.build()

    def configure_model(self) -> None:
        if self.deferred:
            self.build()

    def build(self) -> None:
        if self.buffer:
            self.register_buffer("table", torch.empty(2, device="meta"), persistent=False)
        else:
            self.head = nn.Linear(2, 2, device="meta")


def refusals(names: list[str]) -> dict[str, list[str]]:
    """Return what each strategy says to a training with each module."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for deferred, buffer in ((True, False), (False, False), (True, True)):
            trainer = Trainer(strategy=name, accelerator="cpu", max_steps=1, **QUIET)
            with pytest.raises(ConfigError) as refused:
                trainer.fit(Late(deferred, buffer), DataLoader(MLP.data(8), 2))
            found[name].append(str(refused.value))
    return found


def test_they_are_refused_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    usable = [name for name, strategy in STRATEGIES.items() if strategy.required_device is None]
    single = [name for name in usable if not STRATEGIES[name].multi_process]
    found = refusals(single) | run_distributed(refusals, 2, [name for name in usable if name not in single])[0]
    assert found.keys() == set(usable)
    for texts in found.values():
        assert len(texts) == 3
        for text, names in zip(texts, ("head.bias, head.weight", "head.bias, head.weight", "table"), strict=True):
            assert f"Late: {names}: on the meta device, without values. Build the layers in configure_model" in text
