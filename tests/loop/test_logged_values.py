"""Logged values are those that were logged, in the places where Lightning has them, under Lightning's names."""

from __future__ import annotations

import csv
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from tests.helpers.compare import QUIET, as_floats
from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import CSVLogger, ModelCheckpoint
from trainer.errors import ConfigError

NAN = float("nan")


def rows_of(trainer: Trainer) -> list[dict[str, str]]:
    """Return the rows of the CSV log, without empty values."""
    with open(trainer.run_dir / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
def test_a_value_of_weight_zero_does_not_count_even_as_nan(on_device: bool) -> None:
    class Masked(Toy):
        def log_loss(self, batch_idx: int) -> None:
            for name, value in (("tensor", torch.tensor(NAN if batch_idx == 1 else 2.0)), ("number", NAN)):
                number = float(value) if name == "tensor" else (value if batch_idx == 1 else 2.0)
                weight = float(batch_idx != 1)
                self.log(
                    name,
                    torch.tensor(number) if name == "tensor" else number,
                    on_step=True,
                    on_epoch=True,
                    weight=torch.tensor(weight) if on_device else weight,
                )

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log_loss(batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            weight = float(batch_idx != 1)
            self.log("val", NAN if batch_idx == 1 else 3.0, weight=torch.tensor(weight) if on_device else weight)

    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Masked(), loader(4), loader(3))
    values = trainer.callback_metrics
    assert {name: float(values[name]) for name in ("tensor", "number", "val")} == {
        "tensor": 2.0,
        "number": 2.0,
        "val": 3.0,
    }


class MaskedOn(Toy):
    """Has nothing to count on one rank: every weight there is 0."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.masked = rank

    def log_values(self, names: str) -> None:
        weight = 0.0 if self.trainer.rank == self.masked else 2.0
        value = 3.0 if weight else NAN
        self.log(f"{names}_number", value, weight=weight, on_epoch=True)
        self.log(f"{names}_tensor", torch.tensor(value), weight=torch.tensor(weight), on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log_values("train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_values("val")


class ReadsSteps(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps.append(dict(trainer.read_metrics()))


def _masked_on_each() -> list[Any]:
    found = []
    for rank in range(2):
        reads = ReadsSteps()
        trainer = quiet(devices=2, strategy="ddp", max_epochs=1, callbacks=[reads])
        trainer.fit(MaskedOn(rank), loader(4), loader(4))
        found.append((reads.steps, as_floats(trainer.callback_metrics)))
    return found


def test_a_process_without_any_weight_leaves_the_values_of_the_others() -> None:
    for of_rank in run_distributed(_masked_on_each):
        for steps, last in of_rank:
            assert [(step["train_number"], step["train_tensor"]) for step in steps] == [(3.0, 3.0)] * len(steps)
            names = ("train_number_epoch", "train_tensor_epoch", "val_number", "val_tensor")
            assert {name: last[name] for name in names} == dict.fromkeys(names, 3.0)


def test_a_value_by_step_is_a_copy_that_keeps_no_larger_tensor_alive() -> None:
    bases: list[Callable[[], Any]] = []

    class Counts(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            logits = torch.full((100,), float(batch_idx))
            bases.append(weakref.ref(logits.untyped_storage()))
            self.log("view", logits[3])
            self.log("count", self.count)
            self.count += 1
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=1, log_every_n_steps=1, logger=CSVLogger())
    trainer.fit(Counts(), loader(3))
    assert [(float(row["view"]), float(row["count"])) for row in rows_of(trainer)] == [(0, 0), (1, 1), (2, 2)]
    assert [base() for base in bases] == [None] * 3


def test_a_weight_by_step_is_a_copy_and_so_is_the_value_of_a_torchmetrics_object_without_its_graph() -> None:
    class Weighs(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()
            self.register_buffer("weight", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean(loss)
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            self.log("weighted", float(batch_idx), weight=self.weight.fill_(1.0))
            self.weight.zero_()
            return loss

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert not trainer.callback_metrics["mean"].requires_grad
            assert trainer.callback_metrics["mean_step"] == outputs["loss"]

    trainer = quiet(max_epochs=1, log_every_n_steps=1, logger=CSVLogger(), callbacks=Looks())
    trainer.fit(Weighs(), loader(3))
    assert [float(row["weighted"]) for row in rows_of(trainer) if "weighted" in row] == [0, 1, 2]


def test_an_evaluation_after_a_fit_has_its_own_values_only() -> None:
    module, trainer = Toy(), quiet(max_epochs=1)
    trainer.fit(module, loader(2), loader(1))
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss"}
    trainer.test(module, loader(1))
    assert set(trainer.callback_metrics) == set(trainer.logged_metrics) == {"val_loss"}
    trainer.predict(module, loader(1))
    assert not trainer.callback_metrics


class StepEnd(Toy):
    """Log the number of the step when the step ends."""

    def on_train_step_end(self) -> None:
        self.log("number", float(self.global_step), on_step=True, on_epoch=True)
        self.log("default", float(self.global_step))


@pytest.mark.parametrize("interval", [1.0, 3])
def test_values_logged_at_the_end_of_a_step_are_values_of_that_step(interval: Any) -> None:
    trainer = quiet(
        max_epochs=1,
        val_check_interval=interval,
        log_every_n_steps=2,
        logger=CSVLogger(),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=2)],
    )
    trainer.fit(StepEnd(), loader(4), loader(1))
    rows = {int(row["step"]): row for row in rows_of(trainer)}
    assert {step: float(row["number_step"]) for step, row in rows.items() if "number_step" in row} == {2: 2.0, 4: 4.0}
    assert {step: float(row["default"]) for step, row in rows.items() if "default" in row} == {2: 2.0, 4: 4.0}
    assert float(trainer.callback_metrics["number"]) == 2.5


class EveryHook(Toy):
    """Log in hooks outside of a validation and inside of it."""

    def setup(self, stage: str) -> None:
        self.log("in_setup", 1.0)

    def on_fit_start(self) -> None:
        self.log("at_start", 2.0)

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", 3.0)

    def on_validation_epoch_end(self) -> None:
        self.log("in_validation", float(self.global_step))


def test_a_validation_in_the_middle_leaves_the_values_of_the_hooks_around_it() -> None:
    trainer = quiet(max_epochs=1, val_check_interval=2, num_sanity_val_steps=1, logger=CSVLogger())
    trainer.fit(EveryHook(), loader(4), loader(2))
    rows = [row for row in rows_of(trainer) if {"in_setup", "at_start", "epoch_start"} & row.keys()]
    assert [(row["step"], row["in_setup"], row["at_start"], row["epoch_start"]) for row in rows] == [
        ("4", "1.0", "2.0", "3.0")
    ]
    assert [row["in_validation"] for row in rows_of(trainer) if "in_validation" in row] == ["2.0", "4.0"]


class Averaged(TrainModule):
    """A module with torchmetrics objects for training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.mean = MeanMetric()
        self.val_mean = MeanMetric()
        self.seen: list[tuple[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mean.update(float(batch_idx))
        self.log("mean", self.mean)
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_mean.update(float(batch_idx) + 10)
        self.log("val_mean", self.val_mean)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(("validation", float(self.val_mean.compute())))

    def on_train_epoch_end(self) -> None:
        self.seen.append(("train", float(self.mean.compute())))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_torchmetrics_objects_are_computed_in_the_hooks_at_the_end_and_reset_after_them() -> None:
    module = Averaged()
    trainer = quiet(max_epochs=2, enable_checkpointing=True, callbacks=[ModelCheckpoint(every_n_epochs=1)])
    trainer.fit(module, loader(4), loader(3))
    assert module.seen == [("validation", 11.0), ("train", 1.5)] * 2
    assert (module.mean.update_count, module.val_mean.update_count) == (0, 0)
    resumed = Averaged()
    quiet(max_epochs=3).fit(resumed, loader(4), loader(3), ckpt_path=trainer.checkpoint_callback.last_model_path)  # type: ignore[union-attr]
    assert resumed.seen == [("validation", 11.0), ("train", 1.5)]


@pytest.mark.parametrize("place", ["on_train_batch_end", "on_validation_batch_end"])
def test_torchmetrics_objects_forget_an_epoch_that_an_error_has_ended(place: str) -> None:
    class Fails(Callback):
        """Raise an error in the second batch."""

    def fail(self: Any, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, *index: int) -> None:
        if batch_idx == 1 and not trainer.sanity_checking:
            raise ArithmeticError

    setattr(Fails, place, fail)
    module = Averaged()
    with pytest.raises(ArithmeticError):
        quiet(max_epochs=1, callbacks=[Fails()]).fit(module, loader(4), loader(3))
    module.seen.clear()
    quiet(max_epochs=1).fit(module, loader(4), loader(3))
    assert module.seen == [("validation", 11.0), ("train", 1.5)]


@pytest.mark.parametrize("metric", [MulticlassAccuracy(3, average=None)])
def test_a_metric_with_several_numbers_is_refused_by_name(metric: Metric) -> None:
    class Vector(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = metric

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.accuracy(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(Vector(), loader(2))


class Watch(Callback):
    """Record `trainer.callback_metrics` in the hooks."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, torch.Tensor]]] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(("batch", trainer.callback_metrics))

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.seen.append(("validation", trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.seen.append(("epoch", trainer.callback_metrics))


class Logging:
    """Methods of a module that log numbers that say where they come from."""

    log: Any
    layer: Any
    parameters: Any

    def configure_model(self) -> None:
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        value = batch[0].sum()
        self.log("both", value, on_step=True, on_epoch=True)
        self.log("by_step", value)
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", batch[0].sum(), on_step=True, on_epoch=True)
        self.log("plain", batch[0].sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logs(Logging, TrainModule):  # type: ignore[misc]
    """`Logging` as a module."""


def numbers(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(count))[:, None]), batch_size=1)


def _own_values() -> list[Any]:
    watch = Watch()
    trainer = quiet(devices=2, strategy="ddp", max_epochs=1, callbacks=[watch], log_every_n_steps=1)
    trainer.fit(Logs(), numbers(4), numbers(4))
    return [(where, as_floats(metrics)) for where, metrics in watch.seen]


def test_a_value_by_step_is_the_processs_own_and_one_of_an_epoch_that_of_all() -> None:
    first, second = run_distributed(_own_values)
    own = [[metrics["by_step"] for where, metrics in rank if where == "batch"] for rank in (first, second)]
    assert sorted(own[0] + own[1]) == [0.0, 1.0, 2.0, 3.0]
    assert set(own[0]).isdisjoint(own[1])
    for rank in (first, second):
        (validation,) = [metrics for where, metrics in rank if where == "validation"]
        (epoch,) = [metrics for where, metrics in rank if where == "epoch"]
        assert (validation["val"], validation["val_epoch"], validation["plain"]) == (1.5, 1.5, 1.5)
        assert (epoch["both"], epoch["both_epoch"]) == (1.5, 1.5)


def test_the_loaders_name_stays_last() -> None:
    module = Logs()
    trainer = quiet()
    values = trainer.validate(module, {"a": numbers(3), "b": numbers(2)})
    assert values == [{"val_epoch/a": 1.0, "plain/a": 1.0}, {"val_epoch/b": 0.5, "plain/b": 0.5}]
    of_all = {name: float(trainer.callback_metrics[name]) for name in ("val_epoch", "plain")}
    assert of_all == {"val_epoch": pytest.approx(0.8), "plain": pytest.approx(0.8)}


def test_a_value_by_step_in_an_evaluation_is_reported() -> None:
    class ByStep(Toy):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float(batch_idx), on_step=True, on_epoch=False)

    with pytest.warns(UserWarning, match=r"self.log\('val', on_step=True\): an evaluation and the hooks"):
        assert quiet().validate(ByStep(), loader(3)) == [{"val": 1.0}]


class Seldom(Toy):
    """Log one value in some steps only, counted from 1."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if (step := self.global_step + 1) in self.steps:
            self.log("seldom", torch.tensor(10.0 * step), batch_size=step)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("batches", [10, 7])  # of an epoch
@pytest.mark.parametrize("stop", [None, 1, 2, 3, 4, 5, 7], ids=str)
def test_a_value_logged_between_two_flushes_reaches_the_loggers_once(
    stop: int | None, batches: int, tmp_path: Any
) -> None:
    def run(**settings: Any) -> Trainer:
        saves = ModelCheckpoint(dirpath=tmp_path / "c", save_top_k=1)
        settings = {"max_epochs": 2, "log_every_n_steps": 4, "enable_checkpointing": True, **settings}
        trainer = quiet(**settings, logger=CSVLogger(), callbacks=[saves], default_root_dir=tmp_path)
        trainer.fit(Seldom(1, 2, 6, 9), loader(batches), ckpt_path=None if "max_steps" in settings else "last")
        return trainer

    if stop is not None:
        run(max_steps=stop)
    rows = rows_of(run())
    assert [(int(row["step"]), float(row["seldom"])) for row in rows if "seldom" in row] == [
        (4, 20.0),
        (8, 60.0),
        (12, 90.0),
    ]


def test_a_value_of_an_earlier_step_scores_no_checkpoint(tmp_path: Any) -> None:
    saves = ModelCheckpoint(tmp_path, monitor="seldom", mode="min", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(max_epochs=1, log_every_n_steps=2, enable_checkpointing=True, callbacks=[saves])
    trainer.fit(Seldom(1, 3), loader(5))
    assert list(saves.kept.values()) == [10.0, None, 30.0, None, None]
    assert trainer.callback_metrics["seldom"] == 30.0


def _seldom_on_one_rank() -> Any:
    seen: list[Any] = []

    class Reads(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            seen.append(as_floats(trainer.callback_metrics))

    class Own(Seldom):
        def on_fit_start(self) -> None:
            self.steps = ((1, 2), (3, 4))[self.trainer.rank]

    trainer = quiet(devices=2, strategy="ddp", max_epochs=1, log_every_n_steps=4, callbacks=[Reads()])
    trainer.fit(Own(), loader(8))
    return seen[0]["seldom"]


def test_a_value_that_another_process_logged_in_this_step_replaces_an_earlier_one() -> None:
    assert run_distributed(_seldom_on_one_rank) == [40.0, 40.0]


def test_what_is_logged_in_the_last_hook_reaches_the_loggers_and_teardown_refuses() -> None:
    class Ends(Toy):
        def on_fit_end(self) -> None:
            self.log("late", 7.0)

        def teardown(self, stage: str) -> None:
            with raises_recorded(ConfigError):
                self.log("train_loss", 1.0)

    trainer = quiet(max_epochs=1, logger=CSVLogger())
    trainer.fit(Ends(), loader(2))
    assert [row["late"] for row in rows_of(trainer) if "late" in row] == ["7.0"]
    assert trainer.callback_metrics["late"] == 7.0


def test_hooks_around_the_transfer_log_with_the_weight_of_their_batch() -> None:
    class Transfers(Toy):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.log("size", float(len(batch[0])), on_step=False, on_epoch=True)
            return batch

    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    data = DataLoader(TensorDataset(torch.randn(7, 4), torch.randn(7, 1)), batch_size=4)
    trainer.fit(Transfers(), data)
    expected = (4 * 4 + 3 * 3) / 7
    assert trainer.callback_metrics["size"] == pytest.approx(expected)
    assert trainer.validate(Transfers(), data)[0]["size"] == pytest.approx(expected)


class Doubles(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for name, dtype in (("third", torch.float64), ("single", torch.float32), ("count", torch.int64)):
            value = torch.full((), 10 / 3, dtype=torch.float64).to(dtype)
            self.log(name, value)
            value.zero_()
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_value_by_step_keeps_its_number_and_dtype() -> None:
    class Seen(Callback):
        def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
            self.values = trainer.callback_metrics

    seen = Seen()
    trainer = Trainer(accelerator="cpu", max_steps=1, callbacks=[seen], **QUIET)
    trainer.fit(Doubles(), DataLoader(TensorDataset(torch.ones(2, 1)), 1))
    third = torch.tensor(10 / 3, dtype=torch.float64)
    expected = {"third": third, "single": third.float(), "count": torch.tensor(3)}
    torch.testing.assert_close(seen.values, expected, rtol=0, atol=0)
