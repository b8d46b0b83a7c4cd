"""A signal in a validation ends it after the batch in progress; the resumed run validates again, with equal bits."""

from __future__ import annotations

import os
import signal
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.helpers.processes import run_distributed
from tests.helpers.toy import quiet
from trainer import Callback, DataModule, Trainer, TrainModule
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    EMAWeightAveraging,
    JSONLLogger,
    ModelCheckpoint,
    TensorBoardLogger,
)

BATCHES = 8
"""Validation batches of a process (of rank 1 of uneven data: 3 more)."""


class Net(TrainModule):
    """Validates with dropout and a metric, both of which have to be put back, and sends itself a signal."""

    def __init__(self, steps: str, at: tuple[int, int] | None) -> None:
        super().__init__()
        self.layer, self.steps, self.at = nn.Linear(4, 1), steps, at
        self.of_training, self.of_validation = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.register_buffer("evaluated", torch.zeros(()))
        self.number, self.values = 0, [0.0]
        seen: list[tuple[int, int]] = []
        self.validated = lambda: seen  # what is in attributes is put back
        """The step and number of each validation batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.dropout(self.layer(batch[0])).square().mean()
        self.of_training.update(loss)
        self.log("of_training", self.of_training, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        value = nn.functional.dropout(self.layer(batch[0])).square().mean()
        self.of_validation.update(value)
        self.evaluated += 1
        self.number += 1
        self.values[0] += float(value)
        self.log("of_validation", self.of_validation)
        self.log("val_loss", value)
        number = batch_idx + BATCHES * dataloader_idx
        self.validated().append((self.global_step, number))
        for logger in [] if self.trainer.sanity_checking else self.loggers:
            logger.log_text("seen", f"{number} at {self.global_step}")  # type: ignore[union-attr]
        if self.at == (self.global_step, number) and self.trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss", "interval": self.steps}]


class Counts(Callback):
    """Keeps a number and values of validation batches in its state."""

    def __init__(self) -> None:
        self.batches, self.steps = 0, dict[str, int]()

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.batches += 1
        self.steps[str(trainer.global_step)] = self.steps.get(str(trainer.global_step), 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Swaps(Callback):
    """A user's own average: its last hook has to put the weights back."""

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.trained = [p.detach().clone() for p in module.parameters()]
        for parameter in module.parameters():
            parameter.data.mul_(0.5)

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        for parameter, value in zip(module.parameters(), self.trained, strict=True):
            parameter.data.copy_(value)


class Merges(Net):
    """Merges an adapter into a frozen weight for the validation, as PEFT's `merge_adapter`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer.requires_grad_(False)
        self.adapter = nn.Parameter(torch.ones(1, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + (batch[0] @ self.adapter.T).square().mean()

    def on_validation_start(self) -> None:
        self.layer.weight.data += self.adapter.detach()

    def on_validation_end(self) -> None:
        self.layer.weight.data -= self.adapter.detach()


class SwapsLater(Net):
    """Has an average of its own from the second batch to the end of the validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 1:
            self.trained = self.layer.weight.detach().clone()
            self.layer.weight.data *= 0.5

    def on_validation_epoch_end(self) -> None:
        self.layer.weight.data.copy_(self.trained)


@dataclass(slots=True)
class Meter:
    """The user's own sum."""

    total: float = 0.0
    number: int = 0

    def update(self, value: float) -> None:
        self.total, self.number = self.total + value, self.number + 1


class Log(list[Any]):
    """A list with a name."""

    name = ""


class Table(OrderedDict[str, Any]):
    def clear(self) -> None:
        raise NotImplementedError


class Holder:
    def __init__(self) -> None:
        self.meters, self.names = {"own": Meter()}, SimpleNamespace(seen=0)
        self.log, self.table = Log(), Table(values=Log([torch.zeros(2)]))
        self.total, self.several = torchmetrics.SumMetric(), nn.ModuleList([torchmetrics.MeanMetric()])

    def update(self, value: float) -> None:
        self.meters["own"].update(value)
        self.names.seen += 1
        self.log.append(value)
        self.log.name = f"{value}"
        self.table["values"][0] += 1
        self.table[f"{value}"] = value
        self.total.update(value)
        self.several[0].update(value)

    def state(self) -> dict[str, Any]:
        of_metrics = [float(self.total.sum_value), float(self.several[0].weight)]
        state = {"own": list(astuple(self.meters["own"])), "seen": self.names.seen, "metrics": of_metrics}
        return {
            **state,
            "log": [*self.log, self.log.name],
            "values": self.table["values"][0].tolist(),
            "in": [*self.table],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.meters["own"], self.names.seen = Meter(*state["own"]), state["seen"]
        self.log[:], self.log.name = state["log"][:-1], state["log"][-1]
        self.table = Table(dict.fromkeys(state["in"]), values=Log([torch.tensor(state["values"])]))
        self.total.sum_value, self.several[0].weight = map(torch.tensor, state["metrics"])


class Holds(Net):
    """Has its state in objects, which are made anew at the end; and in a buffer that is assigned. Halves the rate."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held, self.ended = Holder(), [0]
        self.register_buffer("assigned", torch.zeros(()))
        self.part = nn.Module()
        self.part.batches = []

    def on_validation_start(self) -> None:
        self.ended.append(self.held.meters["own"].number)
        self.held.meters = {"own": Meter()}
        for group in self.optimizers().param_groups:
            group["lr"] /= 2

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.held.update(float(batch[0].sum()))
        self.assigned = self.assigned + 1
        self.part.batches.append(batch_idx)

    def on_validation_end(self) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] *= 2

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["held"] = {"state": self.held.state(), "ended": self.ended, "batches": self.part.batches}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.held.load(checkpoint["held"]["state"])
        self.ended, self.part.batches = checkpoint["held"]["ended"], checkpoint["held"]["batches"]


class Holding(Callback):
    def __init__(self) -> None:
        self.held = Holder()

    def on_validation_batch_end(self, *_: Any) -> None:
        self.held.update(1.0)

    def state_dict(self) -> dict[str, Any]:
        return self.held.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held.load(state)


class Counted(DataModule):
    """Counts the batches of the validation."""

    def __init__(self, *loaders: Any) -> None:
        super().__init__()
        self.loaders, self.batches = loaders, {"all": 0}

    def train_dataloader(self) -> Any:
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        return self.loaders[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.batches["all"] += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.batches

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state


MODULES: dict[str, type[Net]] = {"merges": Merges, "swaps later": SwapsLater, "objects": Holds}


class Uneven(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ((torch.full((2, 4), float(n)),) for n in range(BATCHES + 3 * int(os.environ.get("RANK", 0))))


def train(folder: Path, kind: str, interval: float, at: tuple[int, int] | None, devices: int, strategy: str) -> Any:
    """Train three epochs of four steps; return the module and the logged rows, or None for a run that was stopped."""
    torch.manual_seed(0)
    module = MODULES.get(kind, Net)("epoch" if interval == 1.0 else "step", at)
    features = torch.randn(16 + 2 * BATCHES * devices, 4, generator=torch.Generator().manual_seed(0))
    training = DataLoader(TensorDataset(features[:16]), 4 // devices, shuffle=True)
    validation: Any = DataLoader(
        TensorDataset(features[17:]), 2
    )  # one sample, and perhaps one batch, less on a process
    if kind == "uneven":
        validation = DataLoader(Uneven(), batch_size=None)
    callbacks: list[Callback] = [ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss", patience=9)]
    callbacks.append(Counts())
    own: dict[str, list[Callback]] = {"average": [EMAWeightAveraging(decay=0.5)], "swaps": [Swaps()]}
    callbacks += {**own, "objects": [Holding()]}.get(kind, [])
    trainer = quiet(
        max_epochs=3,
        val_check_interval=interval,
        num_sanity_val_steps=3 if at is not None and at[0] == 0 else 0,
        devices=devices,
        strategy=strategy,
        default_root_dir=folder,
        enable_checkpointing=True,
        callbacks=callbacks,
        logger=[CSVLogger(), JSONLLogger(), TensorBoardLogger()],
    )
    data: Any = training, [validation, validation] if kind == "two" else validation
    data = [Counted(*data)] if kind == "objects" else data
    if at is not None:
        with pytest.raises(SystemExit, match="143"):
            trainer.fit(module, *data, ckpt_path="last")
        return module, None
    trainer.fit(module, *data, ckpt_path="last")
    weights = [value.clone() for value in trainer.full_state_dict(everywhere=True).values()]
    rows: list[Any] = [(folder / "version_0" / f"metrics.{kind}").read_text() for kind in ("csv", "jsonl")]
    events = EventAccumulator(str(folder / "version_0"), size_guidance={"tensors": 0}).Reload()
    rows.append([(one.step, [*one.tensor_proto.string_val]) for one in events.Tensors("seen/text_summary")])
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    # Of several processes the state of rank 0 is kept.
    counted = (
        [{**one.state_dict()} for one in callbacks if isinstance(one, (Counts, Holding))] if devices == 1 else None
    )
    if isinstance(module, Holds):
        counted += [module.held.state(), module.ended, module.part.batches, data[0].batches]
    return module, (weights, rows, values, module.number, counted)


def stop_and_resume(
    folder: str, kind: str, interval: float, at: tuple[int, int], devices: int = 1, strategy: str = "auto"
) -> tuple[int, Any, Any]:
    """Return the number of batches of the validation that was stopped, and the results with and without the stop."""
    _, expected = train(Path(folder, "one"), kind, interval, None, devices, strategy)
    stopped, _ = train(Path(folder, "two"), kind, interval, at, devices, strategy)
    _, found = train(Path(folder, "two"), kind, interval, None, devices, strategy)
    return sum(step == at[0] for step, _ in stopped.validated()), found, expected


def check(found: Any, expected: Any) -> None:
    assert found[1:] == expected[1:]
    assert all(torch.equal(*pair) for pair in zip(found[0], expected[0], strict=True))


@pytest.mark.parametrize(
    ("kind", "interval", "at"),
    [
        ("plain", 1.0, (4, 2)),
        ("plain", 1.0, (8, BATCHES - 1)),  # the last batch
        ("plain", 2, (6, 0)),
        ("average", 1.0, (8, 1)),
        ("two", 2, (4, 1)),
        ("two", 1.0, (8, BATCHES + 1)),  # the values of the first loader come again
        ("objects", 1.0, (8, 1)),
    ],
)
def test_the_validation_ends_after_the_batch_and_is_repeated(
    kind: str, interval: float, at: tuple[int, int], tmp_path: Path
) -> None:
    batches, found, expected = stop_and_resume(str(tmp_path), kind, interval, at)
    assert batches == at[1] + 1
    check(found, expected)


@pytest.mark.parametrize("kind", ["swaps", "merges", "swaps later"])
def test_a_validation_for_which_hooks_have_changed_the_weights_goes_on_to_its_end(kind: str, tmp_path: Path) -> None:
    batches, found, expected = stop_and_resume(str(tmp_path), kind, 1.0, (8, 1))
    assert batches == BATCHES
    check(found, expected)


@pytest.mark.parametrize(("kind", "limit"), [("plain", "leaving._MOST"), ("objects", "no_trace._LARGE")])
def test_a_validation_that_changes_tensors_without_a_copy_goes_on_to_its_end(
    kind: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers, and tensors in attributes, above a size."""
    monkeypatch.setattr(f"trainer.state.{limit}", 0)
    batches, found, expected = stop_and_resume(str(tmp_path), kind, 1.0, (8, 1))
    assert batches == BATCHES
    check(found, expected)


def test_in_the_sanity_check_nothing_is_written(tmp_path: Path) -> None:
    module, _ = train(tmp_path, "plain", 1.0, (0, 1), 1, "auto")
    assert module.validated() == [(0, 0), (0, 1)]
    assert not list(tmp_path.rglob("checkpoint*"))


@pytest.mark.parametrize(
    ("kind", "strategy"), [("plain", "ddp"), ("uneven", "ddp"), ("plain", "fsdp"), ("swaps", "fsdp")]
)
def test_all_processes_leave_the_same_validation(kind: str, strategy: str) -> None:
    """Processes with a number of batches of their own may be further, by the time in which the request reaches them."""
    for _, found, expected in run_distributed(stop_and_resume, 2, ".", kind, 1.0, (8, 1), 2, strategy):
        check(found, expected)
