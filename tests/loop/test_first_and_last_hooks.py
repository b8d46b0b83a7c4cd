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
