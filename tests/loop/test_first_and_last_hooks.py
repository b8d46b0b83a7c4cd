"""What hooks draw and change as an epoch begins and as a run ends: a resume has the bits of a run in one go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, DataModule
from trainer.callbacks import StochasticWeightAveraging


class Terminate(Callback):
    """A signal at a hook of a step."""

    def __init__(self, step: int, hook: str = "on_train_step_end") -> None:
        self.step, self.hook = step, hook

    def _at(self, hook: str, trainer: Any) -> None:
        if hook == self.hook and trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self._at("on_train_step_end", trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any, **more: Any) -> None:
        self._at("on_validation_batch_end", trainer)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._at("on_train_epoch_end", trainer)


def stopped_and_resumed(run: Callable[..., Any], step: int, hook: str = "on_train_step_end") -> tuple[Any, Any]:
    """Return what `run` returns of a run in one go, and of one that was stopped by a signal and started again."""
    found = []
    for folder, callbacks in (("whole", ()), ("broken", (Terminate(step, hook),)), ("broken", ())):
        torch.manual_seed(0)
        with pytest.raises(SystemExit) if callbacks else nullcontext():
            found.append(run(folder, *callbacks))
    return found[0], found[1]


def fit(module: Any, data: Any, folder: str, callbacks: tuple[Callback, ...], **settings: Any) -> Any:
    settings = {"enable_checkpointing": True, "max_epochs": 3, "default_root_dir": folder, **settings}
    trainer = quiet(callbacks=[*callbacks], **settings)
    given = {"datamodule": data} if isinstance(data, DataModule) else {"train_dataloaders": data}
    trainer.fit(module, **given, ckpt_path="last")
    return trainer


# -- on_train_end ------------------------------------------------------------------------------------------------------


class Ends(Toy):
    """A module with dropout whose last hook does something."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.factor = what, 1.0
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([nn.functional.dropout(batch[0], 0.3), batch[1]], batch_idx) * self.factor

    @torch.no_grad()
    def on_train_end(self) -> None:
        self.drawn.append(float(torch.rand(())))
        if self.what == "weights":
            self.layer.weight.mul_(0.5)
        elif self.what == "plain":
            self.factor /= 2
        elif self.what == "eval":
            self.eval()
        elif self.what == "freeze":
            self.layer.requires_grad_(False)


@pytest.mark.parametrize("step", [6, 8, 18])
@pytest.mark.parametrize("what", ["draw", "weights", "plain", "eval", "freeze"])
def test_the_last_hook_of_a_run_that_goes_on_changes_no_checkpoint(what: str, step: int) -> None:
    def run(folder: str, *callbacks: Callback) -> Any:
        module = Ends(what)
        fit(module, loader(6), folder, callbacks)
        return module

    whole, resumed = stopped_and_resumed(run, step)
    assert_same_bits(resumed.state_dict(), whole.state_dict())
    assert (resumed.factor, resumed.drawn) == (whole.factor, whole.drawn)


@pytest.mark.parametrize("hook", ["on_train_step_end", "on_validation_batch_end", "on_train_epoch_end"])
def test_an_average_of_a_run_that_was_stopped_after_its_last_step(hook: str) -> None:
    class Normed(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 1))  # type: ignore[assignment]

    def run(folder: str, *callbacks: Callback) -> Any:
        average = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        settings = {"enable_checkpointing": True, "max_epochs": 3, "default_root_dir": folder}
        trainer = quiet(callbacks=[average, *callbacks], **settings)
        module = Normed()
        trainer.fit(module, loader(6, shuffle=True), loader(2), ckpt_path="last")
        return module

    whole, resumed = stopped_and_resumed(run, 18, hook)
    assert_same_bits(resumed.state_dict(), whole.state_dict())


# -- on_train_epoch_start, and loaders that are made anew --------------------------------------------------------------


class Subset(Dataset[Any]):
    def __init__(self) -> None:
        self.indices = [*range(12)]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        index = self.indices[position]
        return torch.full((4,), index / 100), torch.ones(1), index


class Seen(Toy):
    """A module that notes the samples of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen[self.global_step] = batch[2].tolist()
        return super().training_step([nn.functional.dropout(batch[0]), batch[1]], batch_idx)


class Resamples(Callback):
    def __init__(self, data: Subset) -> None:
        self.data = data

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.data.indices = np.random.permutation(100)[:12].tolist()


class Redraws(DataModule):
    def train_dataloader(self) -> Any:
        data = Subset()
        data.indices = torch.randperm(100)[:12].tolist()
        return DataLoader(data, 4, shuffle=True)


@pytest.mark.parametrize("step", [1, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("kind", ["hook", "every epoch", "every second epoch", "made once"])
def test_what_is_drawn_for_an_epoch_is_drawn_again(kind: str, step: int) -> None:
    every = {"every epoch": 1, "every second epoch": 2}.get(kind, 0)

    def run(folder: str, *callbacks: Callback) -> Any:
        data: Any = Subset()
        callbacks = (Resamples(data), *callbacks) if kind == "hook" else callbacks
        loaded = DataLoader(data, 4) if kind == "hook" else Redraws()
        module = Seen()
        fit(module, loaded, folder, callbacks, reload_dataloaders_every_n_epochs=every)
        return module

    whole, resumed = stopped_and_resumed(run, step)
    assert len(whole.seen) == 9
    assert {**whole.seen, **resumed.seen} == whole.seen
    assert_same_bits(resumed.state_dict(), whole.state_dict())


# -- overfit_batches -------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Any:
        while self.place < 24:
            self.place += 1
            yield torch.full((4,), self.place / 24), torch.ones(1), self.place
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata
@pytest.mark.parametrize("step", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "batches"), [("shuffled", 2), ("shuffled", 0.5), ("stream", 2), ("plain stream", 2)])
def test_each_epoch_of_overfitting_is_the_first_one_after_a_resume_too(kind: str, batches: float, step: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def run(folder: str, *callbacks: Callback) -> Any:
        data = Subset()
        data.indices = [*range(24)]
        loaders = {
            "shuffled": lambda: stateful(data, 4, shuffle=True),
            "stream": lambda: stateful(Stream(), 4),
            "plain stream": lambda: DataLoader(Stream(), 4),
        }
        module = Seen()
        fit(module, loaders[kind](), folder, callbacks, overfit_batches=batches)
        return module

    whole, resumed = stopped_and_resumed(run, step)
    first = [whole.seen[number] for number in range(2)]
    assert [whole.seen[number] for number in sorted(whole.seen)][:2] == first
    assert {**whole.seen, **resumed.seen} == whole.seen
    assert_same_bits(resumed.state_dict(), whole.state_dict())


@dataclass
class Unhashable(Callback):
    epochs: int = 0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.epochs += 1


def test_a_callback_without_a_hash_has_its_first_hook() -> None:
    callback = Unhashable()
    quiet(max_epochs=2, callbacks=[callback]).fit(Toy(), loader(2))
    assert callback.epochs == 2


# -- what else a checkpoint has, and the first hook of an epoch changes ------------------------------------------------


class Grows(DataModule):
    """One sample more for each epoch, and a factor that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.factor = [0, 1, 2, 3], 1.0

    def train_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(loader(8).dataset, self.taken), 1)

    def state_dict(self) -> dict[str, Any]:
        return {"taken": [*self.taken], "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken[:], self.factor = state["taken"], state["factor"]


class Begins(Toy):
    """Changes something in the first hook of an epoch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.seen, self.weights_of = what, [], torch.ones(1)  # type: ignore[var-annotated]
        self.total = torchmetrics.SumMetric()
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        data: Any = getattr(self.trainer, "datamodule", None)
        if self.what == "scheduler":
            self.lr_schedulers().step()  # type: ignore[union-attr]
        elif self.what == "base rate":
            self.lr_schedulers().base_lrs[0] /= 2  # type: ignore[union-attr]
        elif self.what == "data":
            data.taken.append(len(data.taken))
            data.factor *= 0.5
        elif self.what == "module":
            self.seen.append(self.current_epoch)
            self.weights_of = self.weights_of * 0.5
        elif self.what == "metric":
            self.total.update(self.current_epoch + 1.0)
        elif self.what == "tracker":
            self.tracker.increment()
            self.loss_of = nn.SmoothL1Loss(beta=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.what == "tracker":
            self.tracker.update(batch[1].mean())
            return self.loss_of(self.layer(batch[0]), batch[1])
        factor = self.trainer.datamodule.factor if self.what == "data" else 1.0  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx) * self.weights_of * factor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        interval = {"scheduler": schedule, "interval": "step", "frequency": 100 if self.what == "scheduler" else 1}
        return {"optimizer": optimizer, "lr_scheduler": interval}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"], checkpoint["weights_of"] = [*self.seen], self.weights_of

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen, self.weights_of = [*checkpoint["seen"]], checkpoint["weights_of"].clone()


class Saves(Callback):
    """Counts the epochs by the hooks of a checkpoint."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(trainer.current_epoch)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen_by_the_callback"] = [*self.seen]

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.seen = [*checkpoint["seen_by_the_callback"]]


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The default value for `maximize`")
@pytest.mark.parametrize("what", ["scheduler", "base rate", "data", "module", "metric", "tracker"])
def test_a_resumed_epoch_changes_nothing_twice(what: str) -> None:
    def run(folder: str, *callbacks: Callback) -> Any:
        module, data, saves = Begins(what), Grows(), Saves()
        given = data if what == "data" else loader(4)
        trainer = fit(module, given, folder, (saves, *callbacks), limit_val_batches=0)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        steps = what != "tracker" and module.tracker.n_steps
        return (
            module.state_dict(),
            rates,
            module.seen,
            module.weights_of,
            float(module.total.sum_value),
            (data.taken, data.factor, saves.seen, steps, trainer.global_step),
        )

    whole, resumed = stopped_and_resumed(run, 6)
    assert whole[1:3] == resumed[1:3]
    assert whole[4:] == resumed[4:]
    assert torch.equal(whole[3], resumed[3])
    assert_same_bits({name: value for name, value in whole[0].items() if "tracker" not in name}, resumed[0])


class Extremes(Toy):
    """torchmetrics' wrappers that count beside their states, over the whole run."""

    def __init__(self) -> None:
        super().__init__()
        self.running = torchmetrics.RunningMean(3)
        self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.running.update(loss.detach())
        self.extremes.update(loss.detach())
        both = self.extremes.compute()
        self.seen.append([float(self.running.compute()), float(both["max"]), float(both["min"])])
        return loss


def test_wrappers_of_torchmetrics_go_on_where_they_were() -> None:
    def run(folder: str, *callbacks: Callback) -> Any:
        module = Extremes()
        fit(module, loader(4), folder, callbacks, limit_val_batches=0)
        return module.seen

    whole, resumed = stopped_and_resumed(run, 6)
    assert resumed == whole[6:]
