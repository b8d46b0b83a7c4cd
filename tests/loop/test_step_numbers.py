"""Small numbers on which a training hangs: the last batch, skipped and bad ones, intervals, values, weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.processes import DEVICE
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, Engine, Trainer, TrainModule
from trainer.callbacks import BadStepGuard
from trainer.data.adapters import make_batch_loader


class Notes(Toy):
    """Keeps what the trainer says in each step, and the values that its scheduler gets; skips batches."""

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        nn.init.constant_(self.layer.weight, 0.3)
        nn.init.zeros_(self.layer.bias)
        self.skipped = skipped
        self.last: list[bool] = []
        self.given: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last.append(self.trainer.is_last_batch)
        return None if batch_idx in self.skipped else self._loss(batch)


def test_the_last_batches_are_those_of_the_last_window() -> None:
    module = Notes()
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(module, loader(6))
    assert module.last == [False, False, False, False, True, True] * 2


def test_a_step_with_a_skipped_batch_is_the_mean_of_the_others() -> None:
    module, by_hand, data = Notes(skipped=(1, 4)), Notes(), loader(6)
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, data)
    optimizer, batches = by_hand.configure_optimizers(), list(data)
    for window in ([batches[0], batches[2]], [batches[3], batches[5]]):
        optimizer.zero_grad()
        sum(by_hand._loss(batch) / 2 for batch in window).backward()
        optimizer.step()
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict())


def test_batches_between_validations_are_counted_over_epochs() -> None:
    class Validations(Callback):
        def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
            steps.append(trainer.global_step)

    steps: list[int] = []
    settings = {"val_check_interval": 3, "check_val_every_n_epoch": None}
    quiet(max_epochs=3, callbacks=[Validations()], **settings).fit(Toy(), loader(4), loader(1))
    assert steps == [3, 6, 9, 12]


class Plateau(Notes):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.global_step))

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.given.append((self.global_step, float(metric)))
        scheduler.step(metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "val_loss", "interval": "step"}]


def test_a_scheduler_that_waits_for_validations_steps_after_each() -> None:
    module = Plateau()
    quiet(max_epochs=1, val_check_interval=2).fit(module, loader(6), loader(1))
    assert module.given == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a_value_of_a_validation_replaces_one_by_step_that_waits_for_its_flush() -> None:
    class Both(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx < 2:
                self.log("both", 1.0, on_step=True, on_epoch=False)
            return self._loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("both", 7.0)

    trainer = quiet(max_epochs=1, val_check_interval=2, log_every_n_steps=3, limit_val_batches=1)
    trainer.fit(Both(), loader(3), loader(1))
    assert float(trainer.callback_metrics["both"]) == 7.0


def test_a_loss_that_is_infinite_or_a_spike_changes_no_weight() -> None:
    class Spikes(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.before = self.layer.weight.detach().clone()
            return self._loss(batch) * {12: 1e6, 13: torch.inf}.get(batch_idx, 1.0)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            changed.append(not torch.equal(self.before, self.layer.weight))

    changed: list[bool] = []
    quiet(max_epochs=1, callbacks=[BadStepGuard("skip")]).fit(Spikes(), loader(15))
    assert changed == [batch not in (12, 13) for batch in range(15)]


@pytest.mark.parametrize("samples", [8, 7, 5])
def test_weighted_means_of_two_processes_are_the_mean_of_the_samples(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process iterates its own part of one epoch, as the second of two would beside the first."""
    data = DataLoader(torch.arange(1.0, samples + 1), batch_size=2)  # type: ignore[arg-type]  # any sequence
    parts = []
    for rank in range(2):
        with Engine(accelerator=DEVICE, devices=1, seed=7) as engine:
            monkeypatch.setattr(type(engine.strategy.processes), "readers", 2)
            ours = engine.setup_dataloaders(data)
            ours._loader = make_batch_loader(data, rank=rank, world_size=2, seed=1, training=True)
            parts.append([float(batch.mean()) * ours.weight / 2 for batch in ours])
    means = [sum(step) / len(step) for step in (range(1, 5), range(5, samples + 1))]
    assert [sum(step) for step in zip(*parts, strict=True)] == pytest.approx(means)


def test_weights_that_are_written_in_a_hook_are_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writes(Toy):
        def on_train_start(self) -> None:
            def from_rank_0(processes: Any, tensors: Iterable[torch.Tensor]) -> None:
                for tensor in tensors:
                    tensor.fill_(0.5)

            monkeypatch.setattr(type(self.trainer.strategy.processes), "broadcast", from_rank_0)
            with torch.no_grad(), self.trainer.full_parameters(self.layer, write=True):
                self.layer.weight.fill_(7.0)
            written.append(self.layer.weight.detach().clone())

    written: list[torch.Tensor] = []
    quiet(max_steps=1).fit(Writes(), loader(1))
    assert torch.equal(written[0], torch.full((1, 4), 0.5))
