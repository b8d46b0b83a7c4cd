"""A torchmetrics object whose `compute` returns None is not logged, as in Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

import trainer
from tests.helpers.toy import loader


class Perhaps(MeanMetric):
    """A mean that has no value before it has seen anything."""

    def compute(self) -> Any:
        return super().compute() if self.weight > 0 else None


def results(library: Any, folder: Path) -> Any:
    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = Perhaps(), Perhaps()

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.used.update(torch.tensor([1.0, 3.0]))
            self.log("used", self.used)

        def on_test_epoch_end(self) -> None:
            self.log("unused", self.unused)

    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    return library.Trainer(accelerator="cpu", default_root_dir=folder, **options).test(Module(), loader(2))


@pytest.mark.filterwarnings("ignore")
def test_a_metric_without_value_is_not_logged(tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")
    assert results(trainer, tmp_path / "ours") == results(lightning, tmp_path / "theirs") == [{"used": 2.0}]
