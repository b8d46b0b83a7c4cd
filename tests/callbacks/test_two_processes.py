"""Callbacks on two processes decide together, and only rank 0 writes shared files."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    JSONLLogger,
    PredictionWriter,
    StochasticWeightAveraging,
    TensorBoardLogger,
    ThroughputMonitor,
    Timer,
    read_predictions,
    throughput,
)
from trainer.strategies import FSDPStrategy

TWO = {"devices": 2, "strategy": "ddp"}


class Uneven(Toy):
    """A module whose values and times differ between the processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.005 * (1 + self.trainer.rank))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch) if self.trainer.rank == 0 else 0.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0]


class Still(Toy):
    """A module with a BatchNorm whose weights do not change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def _loss(self, batch: Any) -> torch.Tensor:
        return self.layer(self.norm(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-30)


def sorted_batches() -> DataLoader[Any]:
    """Return batches whose means differ, so that the processes see other ones."""
    features = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)) + torch.arange(16.0).unsqueeze(1)
    return DataLoader(TensorDataset(features), 4)


class Split(Toy):
    """A module whose layer both processes compute together."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()])

    def _loss(self, batch: Any) -> torch.Tensor:
        return self.layer(self.blocks[0](batch[0])).square().mean()


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.down(torch.relu(self.up(features)))


def _one_of_two(folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    trainer = quiet(max_epochs=9, **TWO, callbacks=[EarlyStopping("val_loss", patience=2)])
    trainer.fit(Uneven(), loader(2), loader(2))
    results["early stopping"] = (trainer.global_step, trainer.stop_reason)

    trainer = quiet(max_epochs=9, **TWO, callbacks=[Timer(0.1)])
    trainer.fit(Uneven(), loader(2000))
    results["timer"] = (trainer.global_step, trainer.stop_reason)

    monitor = ThroughputMonitor(items_per_batch=10 * trainer.rank + 5)
    trainer = quiet(
        max_epochs=1,
        **TWO,
        default_root_dir=folder,
        log_every_n_steps=2,
        logger=[CSVLogger(), TensorBoardLogger(), JSONLLogger()],
        callbacks=[monitor],
    )
    # A clock that counts steps, since the processes read theirs at different times.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: trainer.global_step / 100))
        trainer.fit(Uneven(), loader(8))
    results["run_dir"] = str(trainer.run_dir)

    logger = CSVLogger(Path(folder) / "given")
    results["log folders"] = []
    for _ in range(2):
        trainer = quiet(max_epochs=1, **TWO, logger=logger)
        trainer.fit(Toy(), loader(2))
        results["log folders"].append(logger.log_dir)

    average = StochasticWeightAveraging(1e-30, swa_epoch_start=1)
    quiet(max_epochs=2, **TWO, callbacks=[average]).fit(module := Still(), sorted_batches())
    results["variance"] = module.norm.running_var.tolist()

    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    strategy = FSDPStrategy(tensor_parallel=2)
    trainer = quiet(max_epochs=1, devices=2, strategy=strategy, log_every_n_steps=2, callbacks=[monitor])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: trainer.global_step / 100))
        trainer.fit(Split(), loader(4))
    results["rates of one reader"] = {name: float(value) for name, value in trainer.callback_metrics.items()}

    for format in ("safetensors", "jsonl"):
        writer = PredictionWriter(Path(folder) / format, format=format, max_shard_size=100)
        quiet(**TWO, callbacks=[writer]).predict(Uneven(), loader(13))
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_distributed(_one_of_two, 2, str(folder))


def test_early_stopping_ends_both_after_the_same_step(results: list[dict[str, Any]]) -> None:
    reason = "early stopping: val_loss has not improved in 2 validations; best 0"
    assert [one["early stopping"] for one in results] == [(3, reason)] * 2


def test_the_timer_ends_both_after_the_same_step(results: list[dict[str, Any]]) -> None:
    (step, reason), other = (one["timer"] for one in results)
    assert other == (step, reason)
    assert 1 <= step < 1000
    assert "the time is used up" in reason


def test_one_log_with_the_rates_of_both(results: list[dict[str, Any]]) -> None:
    run_dir = Path(results[0]["run_dir"])
    assert results[1]["run_dir"] == str(run_dir)
    with open(run_dir / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4"]
    rates = {name.split("/")[1]: float(value) for name, value in rows[-1].items() if name.startswith("throughput/")}
    assert rates["samples_per_s"] == pytest.approx(4 * rates["batches_per_s"])
    # 5 tokens a batch on rank 0 and 15 on rank 1.
    assert rates["tokens_per_s"] == pytest.approx(10 * rates["batches_per_s"])
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1


def test_the_variances_of_swa_are_means_over_the_batches(results: list[dict[str, Any]]) -> None:
    by_hand = torch.stack([batch.var(0) for (batch,) in sorted_batches()]).mean(0)
    for one in results:
        torch.testing.assert_close(torch.tensor(one["variance"]), by_hand)


def test_processes_that_share_a_batch_count_it_once(results: list[dict[str, Any]]) -> None:
    for one in results:
        rates = one["rates of one reader"]
        assert rates["throughput/batches_per_s"] == pytest.approx(rates["throughput/steps_per_s"])
        assert rates["throughput/samples_per_s"] == pytest.approx(4 * rates["throughput/steps_per_s"])


def test_both_know_the_folder_that_the_second_run_got(results: list[dict[str, Any]], folder: Path) -> None:
    assert [one["log folders"] for one in results] == [[str(folder / "given"), str(folder / "given" / "version_1")]] * 2


@pytest.mark.parametrize("format", ["safetensors", "jsonl"])
def test_predictions_in_the_order_of_the_data(results: list[dict[str, Any]], folder: Path, format: str) -> None:
    # 13 batches, which the two processes take in turn; the last one is split.
    assert len({path.name[:21] for path in (folder / format).iterdir()}) == 2
    rows = [torch.as_tensor(row) for row in read_predictions(folder / format)]
    assert torch.equal(torch.stack(rows), torch.cat([batch[0] for batch in loader(13)]))
