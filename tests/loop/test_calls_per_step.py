"""A step calls few functions of ours: what can be decided once is decided when a run starts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer as package
from trainer import Trainer, TrainModule
from trainer.callbacks import CSVLogger, TensorBoardLogger

ROOT = Path(package.__file__).resolve().parent.parent
OURS = tuple(str(ROOT / folder) for folder in ("trainer", "strategies", "callbacks"))


class Counting(TrainModule):
    """Count the calls of our Python functions from the forward `first` to the forward `last`."""

    def __init__(self, first: int, last: int, names: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.first, self.last, self.names = first, last, [f"name{number}" for number in range(names)]
        self.forwards = self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._count()
        loss = self.layer(batch).mean()
        for name in self.names:
            self.log(name, loss, prog_bar=True)
        return loss

    def _count(self) -> None:
        self.forwards += 1
        if self.forwards == self.first:
            sys.setprofile(self._seen)
        elif self.forwards == self.last:
            sys.setprofile(None)

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        if frame.f_code is TrainModule.__getattr__.__code__:  # in the place of nn.Module's
            return
        if event == "call" and str(Path(frame.f_code.co_filename).resolve()).startswith(OURS):
            self.calls += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def calls(make: Callable[[], Counting], **settings: Any) -> int:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    module = make()
    Trainer(**{"max_epochs": 1, **quiet, **settings}).fit(module, [torch.ones(2, 4)] * 20, [torch.ones(2, 4)] * 2)
    assert module.forwards >= module.last
    return module.calls


@pytest.mark.parametrize(
    ("names", "settings", "most"),
    [(0, {}, 22), (1, {}, 29), (0, {"val_check_interval": 10}, 22), (0, {"accumulate_grad_batches": 4}, 17)],
    ids=["off", "one log", "validation inside epochs", "four micro-batches"],
)
def test_a_step_calls_few_functions(names: int, settings: dict[str, Any], most: int) -> None:
    assert calls(lambda: Counting(4, 8, names), **settings) <= 4 * most


@pytest.mark.parametrize(("micro_batches", "most"), [(1, 32), (4, 26)], ids=["a step", "four micro-batches"])
def test_a_step_with_all_on_calls_few_functions_more(micro_batches: int, most: int, tmp_path: Path) -> None:
    """Two of them read the clock around the hooks at the end of a micro-batch and of a step."""
    everything: dict[str, Any] = {
        "enable_progress_bar": True,
        "enable_checkpointing": True,
        "logger": [CSVLogger(), TensorBoardLogger()],
        "default_root_dir": tmp_path,
        "accumulate_grad_batches": micro_batches,
    }
    assert calls(lambda: Counting(8, 12, names=1), **everything) <= 4 * most
