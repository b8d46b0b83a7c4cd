"""Evaluation counts every sample once: the metrics are right, and the same on one and two processes."""

from __future__ import annotations

import csv
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.compare import QUIET, as_floats
from tests.helpers.processes import once_per_module, run_distributed
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import CSVLogger

CLASSES = 3
SIZES = [(1, 3), (2, 1), (3, 32), (9, 3), (16, 3), (25, 1), (25, 32)]
"""Samples and micro-batch size; many do not divide, and with the first there are fewer samples than processes."""
LOADERS = {"small": 3, "large": 14, "one": 1}


class Measured(TrainModule):
    """A module that logs in every way. A batch holds values, predicted classes, classes, and tokens per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.mean_metric = MeanMetric()

    def measure(self, batch: Any) -> None:
        value, predicted, label, tokens = batch
        self.log("mean", value.mean())
        self.log("mean_of_floats", value.mean().item())
        self.log("sum", value.sum(), reduce_fx="sum")
        self.log("min", value.min(), reduce_fx="min")
        self.log("max", value.max().item(), reduce_fx="max")
        per_token = (value * tokens).sum() / tokens.sum()
        self.log("token_mean", per_token, weight=tokens.sum())
        self.log("token_mean_of_ints", per_token, batch_size=int(tokens.sum()))
        self.accuracy.update(predicted, label)
        self.log("accuracy", self.accuracy)
        self.mean_metric.update(value)
        self.log("mean_metric", self.mean_metric)
        if (label == 2).any():
            self.log("only_sometimes", value[label == 2].mean(), weight=int((label == 2).sum()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.measure(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return batch[0] * 2


def make_data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(length)
    return TensorDataset(
        torch.randn(length, generator=generator),
        torch.randint(CLASSES, (length,), generator=generator),
        torch.randint(CLASSES, (length,), generator=generator),
        torch.randint(1, 9, (length,), generator=generator),
    )


def analytic(*lengths: int) -> dict[str, float]:
    """Compute the metrics over all samples of datasets of these lengths at once."""
    columns = zip(*(make_data(length).tensors for length in lengths), strict=True)
    value, predicted, label, tokens = (torch.cat(column) for column in columns)
    value = value.double()
    mean, token_mean = value.mean().item(), ((value * tokens).sum() / tokens.sum()).item()
    expected = {
        "mean": mean,
        "mean_of_floats": mean,
        "mean_metric": mean,
        "sum": value.sum().item(),
        "min": value.min().item(),
        "max": value.max().item(),
        "token_mean": token_mean,
        "token_mean_of_ints": token_mean,
        "accuracy": (predicted == label).double().mean().item(),
    }
    if (label == 2).any():
        expected["only_sometimes"] = value[label == 2].mean().item()
    return expected


def make_trainer(devices: int, **options: Any) -> Trainer:
    return Trainer(devices=devices, **{**QUIET, **options})


def several_loaders() -> dict[str, Any]:
    return {name: DataLoader(make_data(length), 4) for name, length in LOADERS.items()}


def evaluate_everything(devices: int) -> dict[str, Any]:
    """Run everything that the tests below check, on this process."""
    results: dict[str, Any] = {}
    for length, size in SIZES:
        trainer, module = make_trainer(devices), Measured()
        results["validate", length, size] = trainer.validate(module, DataLoader(make_data(length), size))[0]
        loader = DataLoader(make_data(length), size, shuffle=True)
        results["test", length, size] = trainer.test(module, loader)[0]
    trainer, module = make_trainer(devices), Measured()
    of_loaders = trainer.validate(module, several_loaders())
    assert [{name.split("/")[1] for name in one} for one in of_loaders] == [{name} for name in LOADERS]
    results["several"] = as_floats(trainer.callback_metrics)
    seen = Positions()
    trainer = make_trainer(devices, callbacks=seen)
    outputs = trainer.predict(Measured(), DataLoader(make_data(13), 2), return_predictions=True)
    assert outputs is not None
    results["predictions"], results["seen"] = [output.tolist() for output in outputs], seen.seen
    return results


class Positions(Callback):
    """A callback that records the predictions in their order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append((dataloader_idx, batch_idx, outputs.tolist()))


on_two = once_per_module(lambda: run_distributed(evaluate_everything, 2, 2))


on_one = once_per_module(lambda: evaluate_everything(1))


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize(("length", "size"), SIZES)
def test_metrics_are_those_of_the_samples_on_one_and_two_processes(
    length: int, size: int, stage: str, on_one: dict[Any, Any], on_two: list[dict[Any, Any]]
) -> None:
    expected = analytic(length)
    # float32 inside the steps and in torchmetrics; the sums themselves are exact.
    assert on_one[stage, length, size] == pytest.approx(expected, rel=1e-5, abs=2e-6)
    assert on_two[0][stage, length, size] == pytest.approx(expected, rel=1e-5, abs=2e-6)
    assert on_two[0][stage, length, size] == on_two[1][stage, length, size]


def test_several_loaders_have_their_own_values_and_one_over_all(
    on_one: dict[str, Any], on_two: list[dict[str, Any]]
) -> None:
    expected = {
        f"{metric}/{loader}": value for loader, length in LOADERS.items() for metric, value in analytic(length).items()
    }
    for metric, value in analytic(*LOADERS.values()).items():
        if metric not in ("accuracy", "mean_metric"):
            expected[metric] = value
    for results in (on_one, *on_two):
        assert results["several"] == pytest.approx(expected, rel=1e-5, abs=2e-6)


def test_predictions_come_in_order_and_each_sample_once(on_one: dict[str, Any], on_two: list[dict[str, Any]]) -> None:
    expected = (make_data(13).tensors[0] * 2).tolist()
    assert [value for batch in on_one["predictions"] for value in batch] == expected
    assert [(0, k, batch) for k, batch in enumerate(on_one["predictions"])] == on_one["seen"]
    # Batch k of rank r holds positions [(2k + r) * 2, (2k + r + 1) * 2); the last sample is alone.
    rounds = [results["predictions"] for results in on_two]
    together = [value for k in range(4) for rank in rounds for value in rank[k : k + 1]]
    assert [value for batch in together for value in batch] == expected
    assert {len(rank) for rank in rounds} == {3, 4}
    for results in on_two:
        assert [(0, k, batch) for k, batch in enumerate(results["predictions"])] == results["seen"]


class CountAlive(Callback):
    """A callback that counts the outputs that still exist while predicting."""

    def __init__(self) -> None:
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.outputs.append(weakref.ref(outputs))
        self.most = max(self.most, sum(reference() is not None for reference in self.outputs))


def test_predictions_are_kept_in_memory_only_when_asked_for() -> None:
    streaming, keeping = CountAlive(), CountAlive()
    loader = DataLoader(make_data(40), 2)
    assert make_trainer(1, callbacks=streaming).predict(Measured(), loader, return_predictions=False) is None
    kept = make_trainer(1, callbacks=keeping).predict(Measured(), loader)
    assert kept is not None
    assert len(streaming.outputs) == len(keeping.outputs) == len(kept) == 20
    assert streaming.most <= 2
    assert keeping.most == 20


def test_predictions_of_several_loaders_come_loader_by_loader() -> None:
    seen = Positions()
    outputs = make_trainer(1, callbacks=seen).predict(Measured(), several_loaders(), return_predictions=True)
    expected = [(0, 0), *((1, k) for k in range(4)), (2, 0)]
    assert [(loader, k) for loader, k, _ in seen.seen] == expected
    assert outputs is not None
    assert [len(of_loader) for of_loader in outputs] == [1, 4, 1]
    assert [output.tolist() for of_loader in outputs for output in of_loader] == [batch for _, _, batch in seen.seen]


def test_limits_count_batches_of_each_loader() -> None:
    _, large, one = make_trainer(1, limit_val_batches=1).validate(Measured(), several_loaders())
    first = make_data(14).tensors[0][:4].double()
    assert large["sum/large"] == pytest.approx(first.sum().item(), rel=1e-5, abs=1e-6)
    assert one["sum/one"] == pytest.approx(make_data(1).tensors[0].item(), rel=1e-5, abs=1e-6)
    (half,) = make_trainer(1, limit_test_batches=0.5).test(Measured(), DataLoader(make_data(16), 4))
    assert half["mean"] == pytest.approx(make_data(16).tensors[0][:8].mean().item(), rel=1e-5, abs=1e-6)


def test_the_metrics_given_back_are_plain_numbers_and_start_afresh() -> None:
    trainer, module = make_trainer(1), Measured()
    loader = DataLoader(make_data(9), 4)
    (once,), (again,) = trainer.validate(module, loader), trainer.validate(module, loader)
    assert once == again
    assert all(type(value) is float and math.isfinite(value) for value in once.values())
    assert as_floats(trainer.callback_metrics) == once


def test_evaluation_has_no_gradients_and_gives_the_modes_back() -> None:
    module = Measured()
    module.frozen = torch.nn.Dropout().eval()
    modes = []

    class Look(Callback):
        def on_test_batch_start(self, *_: Any) -> None:
            modes.append((module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    make_trainer(1, callbacks=Look()).test(module, DataLoader(make_data(4), 4))
    make_trainer(1, callbacks=Look(), inference_mode=False).test(module, DataLoader(make_data(4), 4))
    # The same torchmetrics objects as in inference mode: their state has to be usable outside of it again.
    assert modes == [(False, False, True), (False, False, False)]
    assert module.training
    assert not module.frozen.training


@pytest.mark.parametrize("resumed_after", [0, 1, 2, 4])
def test_batches_between_validations_are_counted_over_epochs_and_windows(resumed_after: int, tmp_path: Path) -> None:
    class Notes(Callback):
        def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
            trainer.accumulate_grad_batches = 3 if trainer.global_step < 3 else 2

        on_train_start = on_train_step_end

        def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
            validated.append((trainer.current_epoch, trainer.progress.batch))

    def run(**limit: int) -> None:
        settings = {"check_val_every_n_epoch": None, "val_check_interval": 4, "enable_checkpointing": True, **limit}
        trainer = quiet(callbacks=[Notes()], accumulate_grad_batches=3, default_root_dir=tmp_path, **settings)
        trainer.fit(Toy(), loader(11, 1), loader(1), ckpt_path="last")

    validated: list[tuple[int, int]] = []
    if resumed_after:
        run(max_steps=resumed_after, max_epochs=-1)
    run(max_epochs=2)
    # Windows end at batches 3, 6, 9, 11, and 2, 4, ... of the next epoch: 4, 8, 12, ... lie in these.
    assert validated == [(0, 6), (0, 9), (1, 2), (1, 6), (1, 10)]


def test_the_sanity_check_leaves_nothing_behind(tmp_path: Path) -> None:
    class Look(Callback):
        def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
            seen.append(("after the check", as_floats(trainer.callback_metrics), as_floats(trainer.logged_metrics)))

        def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
            seen.append((trainer.sanity_checking, as_floats(trainer.callback_metrics)))

    seen: list[Any] = []
    options = {"logger": CSVLogger(), "callbacks": Look(), "default_root_dir": tmp_path, "max_epochs": 1}
    trainer = make_trainer(1, **options)
    module = Fitted()
    trainer.fit(module, DataLoader(make_data(4), 4), DataLoader(make_data(25), 4))
    assert (seen[0][0], seen[0][1].keys()) == (True, analytic(25).keys())
    assert seen[1] == ("after the check", {}, {})
    # All 25 samples, and not those of the two batches of the check once more: torchmetrics started afresh too.
    assert seen[2] == (False, pytest.approx(analytic(25), rel=1e-5, abs=2e-6))
    assert seen[3:] == []
    steps = [row["step"] for row in csv.DictReader((trainer.run_dir / "metrics.csv").read_text().splitlines())]
    assert steps == ["1"]


class Fitted(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
