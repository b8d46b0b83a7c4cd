"""A checkpoint that a hook of a validation asks for has all of that validation: the resumed run does not repeat it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.toy import quiet
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import EarlyStopping

HOOKS = tuple(
    f"on_validation_{name}" for name in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
)


class Net(TrainModule):
    """Draws random numbers, counts and updates a metric in validation, and keeps the best value in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(4, 1), torchmetrics.MeanMetric()
        self.register_buffer("evaluated", torch.zeros(()))
        self.validations, self.best = 0, float("inf")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.dropout(self.layer(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = nn.functional.dropout(self.layer(batch[0])).square().mean()
        self.mean.update(value)
        self.evaluated += 1
        self.log("mean", self.mean)
        self.log("val_loss", value)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validations += 1
            self.best = min(self.best, float(self.trainer.callback_metrics["val_loss"]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = {"validations": self.validations, "best": self.best}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        vars(self).update(checkpoint["seen"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]


class Counts(Callback):
    """Counts the calls of every hook of validations."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(HOOKS, 0)
        for hook in HOOKS:
            setattr(self, hook, lambda *_, hook=hook: self.calls.update({hook: self.calls[hook] + 1}))

    def state_dict(self) -> dict[str, Any]:
        return self.calls

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.update(state)


class Saves(Callback):
    """Saves in one call of one hook."""

    def __init__(self, hook: str, number: int, path: Path) -> None:
        self.left, self.path, self.told = number, path, list[str]()
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path, info={"mine": 1})
            self.told.append("asked for")

    def on_checkpoint_saved(self, trainer: Trainer, pl_module: TrainModule, path: str) -> None:
        self.told.append(Path(path).name)


def trained(*callbacks: Callback, resume: Path | None = None) -> dict[str, Any]:
    """Train three epochs with two validations in each, and return what there is in the end."""
    torch.manual_seed(0)
    net, counts = Net(), Counts()
    data = TensorDataset(torch.linspace(-1, 1, 48).view(12, 4))
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 0.5, "num_sanity_val_steps": 2, "seed": 3}
    trainer = quiet(**options, callbacks=[counts, *callbacks])
    trainer.fit(net, DataLoader(data, 3, shuffle=True), DataLoader(data, 4), ckpt_path=resume)
    return {
        "weights": net.state_dict(),
        "optimizer": net.optimizers().state_dict(),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "calls": counts.calls,
        "seen": (net.validations, net.best, trainer.global_step),
        "values": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return trained()


# The first calls are those of the sanity check: two batches, then validations of three.
@pytest.mark.parametrize(("hook", "number"), [*((hook, n) for hook in HOOKS for n in (1, 3, 7)), (HOOKS[2], 4)])
def test_a_resumed_run_goes_on_behind_the_validation(
    hook: str, number: int, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    saves = Saves(hook, number, tmp_path / "saved")
    assert_same_bits(trained(saves), uninterrupted)
    at_once = hook == HOOKS[-1] and number > 1
    assert saves.told == (["saved", "asked for"] if at_once else ["asked for", "saved"])
    assert_same_bits(trained(resume=tmp_path / "saved"), uninterrupted)


class ByEpoch(Net):
    """Logs a mean of the epoch, by which the rate falls."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("of_epoch", (loss * 0 + 1.0) if self.current_epoch else loss * 0 + 2.0, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "of_epoch"}}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_what_the_end_of_an_epoch_does_is_in_a_checkpoint_of_its_hook(epoch: int, first: bool, tmp_path: Path) -> None:
    def run(*savers: Callback, resume: Path | None = None) -> tuple[int, list[float], torch.Tensor]:
        torch.manual_seed(0)
        stops = [EarlyStopping("of_epoch", patience=3)]
        module = ByEpoch()
        trainer = quiet(max_epochs=9, seed=3, callbacks=[*savers, *stops] if first else [*stops, *savers])
        data = TensorDataset(torch.linspace(-1, 1, 48).view(12, 4))
        trainer.fit(module, DataLoader(data, 3, shuffle=True), ckpt_path=resume)
        return trainer.global_step, [group["lr"] for group in trainer.optimizers[0].param_groups], module.layer.weight

    whole = run(Saves("on_train_epoch_end", epoch, tmp_path / "saved"))
    assert whole[:2] == run()[:2]
    resumed = run(resume=tmp_path / "saved")
    assert resumed[:2] == whole[:2]
    assert torch.equal(resumed[2], whole[2])


def test_of_a_validation_that_a_signal_ends_nothing_is_written(uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    class Stops(Callback):
        def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    early, late = Saves("on_validation_start", 3, tmp_path / "early"), Saves("on_train_end", 1, tmp_path / "late")
    with pytest.raises(SystemExit):
        trained(early, Stops(), late)
    assert (early.told, late.told) == (["asked for", "late"], ["late", "asked for"])
    assert_same_bits(trained(resume=tmp_path / "late"), uninterrupted)
