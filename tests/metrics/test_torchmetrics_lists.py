"""torchmetrics objects with list states are right on processes that have no samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision
from torchmetrics.retrieval import RetrievalMAP

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from trainer import ConfigError, Trainer, TrainModule

SIZES = (1, 2, 3)


class Rows(Metric):
    """A metric that gathers rows of integers, and matrices of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")
        self.add_state("matrices", default=[], dist_reduce_fx="cat")

    def update(self, x: torch.Tensor) -> None:
        self.rows.append((x[:, None] * 10).long().expand(-1, 3))
        self.matrices.append(x[:, None, None].double().expand(-1, 2, 2))

    def compute(self) -> torch.Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        matrices = torch.cat(self.matrices) if isinstance(self.matrices, list) else self.matrices
        return rows.sum() + matrices.sum()


class Each(Metric):
    """A metric that gathers its values entry by entry, of which processes must have equally many."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx=None)

    def update(self, x: torch.Tensor) -> None:
        self.values.append(x)

    def compute(self) -> torch.Tensor:
        return torch.cat(self.values).sum()


class Measured(TrainModule):
    def __init__(self, with_each: bool = False) -> None:
        super().__init__()
        self.auroc, self.rows, self.retrieval = AUROC(task="binary"), Rows(), RetrievalMAP()
        self.by_hand = MetricCollection([BinaryAveragePrecision(), BinaryAUROC()])
        self.each = Each() if with_each else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, label = batch
        self.auroc.update(x, label)
        self.log("auroc", self.auroc)
        self.rows.update(x)
        self.log("rows", self.rows)
        self.retrieval.update(x, label, indexes=torch.zeros_like(label))
        self.log("retrieval", self.retrieval)
        self.by_hand.update(x, label)
        if self.each is not None:
            self.each.update(x)
            self.log("each", self.each)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.by_hand.compute())
        self.by_hand.reset()


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    return TensorDataset(torch.rand(samples, generator=generator), torch.arange(samples) % 2)


class ByHand(TrainModule):
    """Its metric is computed in a hook, after batches of one sample each."""

    def __init__(self) -> None:
        super().__init__()
        self.each = Each()
        self.of_batches: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.of_batches.append(float(self.each(batch[0])))

    def on_validation_epoch_end(self) -> None:
        self.log("each", self.each.compute())
        self.each.reset()


def measure() -> tuple[list[dict[str, float]], float, list[str]]:
    def validate(module: TrainModule, size: int, batch_size: int = 4) -> dict[str, float]:
        return Trainer(accelerator="cpu", **QUIET).validate(module, DataLoader(data(size), batch_size))[0]

    found = [validate(Measured(), size) for size in SIZES]
    refused = []
    for module, size in ((Measured(with_each=True), 1), (ByHand(), 3), (ByHand(), 1)):
        with pytest.raises(ConfigError) as error:
            validate(module, size, batch_size=1)
        refused.append(str(error.value))
    return found, validate(ByHand(), 4, batch_size=1)["each"], refused


@pytest.mark.filterwarnings("ignore:No positive samples")
def test_a_process_without_samples(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for found, by_hand, refused in run_distributed(measure, 2):
        for size, metrics in zip(SIZES, found, strict=True):
            x, label = data(size).tensors
            one = Measured()
            one.auroc.update(x, label)
            one.rows.update(x)
            one.retrieval.update(x, label, indexes=torch.zeros_like(label))
            one.by_hand.update(x, label)
            known = {"auroc": one.auroc, "rows": one.rows, "retrieval": one.retrieval, **one.by_hand}
            assert metrics == pytest.approx(
                {name: float(m.compute()) for name, m in known.items()}, rel=1e-6, nan_ok=True
            )
        assert by_hand == pytest.approx(float(data(4).tensors[0].sum()))
        for words in refused:
            assert words.startswith("compute(): Each gathers its state 'values' entry by entry")
