"""StochasticWeightAveraging averages the weights of the last epochs and redoes the statistics of BatchNorms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.stops import StopsAt
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer, TrainModule, seed_everything
from trainer.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging

EPOCHS = 5


class Net(TrainModule):
    def __init__(self, norm: bool = True) -> None:
        seed_everything(2)
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def data(micro_batch: int = 8) -> DataLoader[Any]:
    features = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=micro_batch)


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _by_hand() -> tuple[dict[str, torch.Tensor], list[float]]:
    module, rates = Net(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    average = AveragedModel(module.net)
    for epoch in range(EPOCHS):
        before = 0.05 * 0.9**2
        part = (1 - math.cos(math.pi * min(1.0, (epoch - 2) / 2))) / 2
        rate = 0.05 * 0.9**epoch if epoch < 2 else 0.01 * part + before * (1 - part)
        optimizer.param_groups[0]["lr"] = rate
        rates.append(rate)
        if epoch >= 2:
            average.update_parameters(module.net)
        for features, targets in data():
            optimizer.zero_grad()
            nn.functional.mse_loss(module.net(features), targets).backward()
            optimizer.step()
    update_bn(data(), average)
    return {f"net.{name}": value for name, value in average.module.state_dict().items()}, rates


def test_as_by_hand(tmp_path: Path) -> None:
    module, rates = Net(), Rates()
    swa = StochasticWeightAveraging(0.01, swa_epoch_start=3, annealing_epochs=2)
    checkpoints = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)
    trainer = quiet(max_epochs=EPOCHS, enable_checkpointing=True, callbacks=[swa, rates, checkpoints])
    trainer.fit(module, data())
    expected, their_rates = _by_hand()
    assert rates.rates == pytest.approx(their_rates)
    for name, value in module.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    tested = Net()
    quiet(callbacks=[StochasticWeightAveraging(0.01)]).test(tested, data(), ckpt_path=tmp_path / "epoch=4-step=20")
    for name, value in tested.state_dict().items():
        if "num_batches" not in name:
            assert_same_bits(value, module.state_dict()[name], name)


def counted(module: TrainModule) -> dict[str, torch.Tensor]:
    """Return the numbers of batches that BatchNorms have seen, which are those of the training."""
    return {name: value for name, value in module.state_dict().items() if "num_batches" in name}


@pytest.mark.parametrize(
    "ends",
    [
        {"max_steps": 16},
        {"max_steps": 18},
        {"max_steps": 16, "max_epochs": -1},
        {"stops": 16},
        {"stops": 18},
        {"monitor": "loss"},
        {"monitor": "val_loss"},
    ],
    ids=str,
)
def test_a_training_that_ends_early_has_the_statistics_of_its_average(ends: dict[str, Any], tmp_path: Path) -> None:
    module, callbacks = Net(), [StochasticWeightAveraging(0.01, 3), ModelCheckpoint(dirpath=tmp_path)]
    settings = {"max_epochs": 9, **ends}
    callbacks.append(StopsAt(settings.pop("stops", 99)))
    if "monitor" in ends:
        callbacks.append(EarlyStopping(settings.pop("monitor"), min_delta=9.0, patience=4))
    quiet(**settings, enable_checkpointing=True, callbacks=callbacks).fit(module, data(), data())
    expected = AveragedModel(module.net)
    update_bn(data(), expected)
    norm: Any = module.net[1]
    torch.testing.assert_close(norm.running_mean, expected.module[1].running_mean)
    torch.testing.assert_close(norm.running_var, expected.module[1].running_var)
    tested, (kept,) = Net(), tmp_path.glob("epoch=*")
    quiet(callbacks=[StochasticWeightAveraging(0.01)]).test(tested, data(), ckpt_path=kept)
    assert_same_bits({**tested.state_dict(), **counted(module)}, module.state_dict())
    again, settings = Net(), {**settings, "max_steps": 16}
    if ends == {"max_steps": 16}:  # nothing is left to train
        swa = StochasticWeightAveraging(0.01, 3)
        trainer = quiet(**settings, enable_checkpointing=True, callbacks=[swa, ModelCheckpoint(dirpath=tmp_path)])
        trainer.fit(again, data(), ckpt_path="last")
        assert_same_bits(again.state_dict(), module.state_dict())


def test_a_checkpoint_of_the_middle_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    swa, checkpoints = StochasticWeightAveraging(0.01, 2), ModelCheckpoint(dirpath=tmp_path, save_top_k=-1)
    quiet(max_epochs=4, enable_checkpointing=True, callbacks=[swa, checkpoints]).fit(Net(), data())
    for name, reported in (("epoch=1-step=8", True), ("epoch=3-step=16", False)):
        caplog.clear()
        quiet(callbacks=[StochasticWeightAveraging(0.01)]).test(Net(), data(), ckpt_path=tmp_path / name)
        assert ("BatchNorm statistics that belong to the training" in caplog.text) == reported


@pytest.mark.parametrize("start", [3, 0.5])
def test_a_resumed_run_has_the_same_bits(start: float, tmp_path: Path) -> None:
    weights = []
    for name, pieces in (("unbroken", (-1,)), ("broken", (4, 9, 14, 16, -1))):
        for steps in pieces:
            module = Net()
            callbacks = [
                StochasticWeightAveraging(0.01, start, annealing_epochs=2, annealing_strategy="linear"),
                ModelCheckpoint(dirpath=tmp_path / name, save_top_k=-1),
            ]
            trainer = quiet(max_epochs=EPOCHS, max_steps=steps, enable_checkpointing=True, callbacks=callbacks)
            trainer.fit(module, data(), ckpt_path="last")
        weights.append(module.state_dict())
    assert_same_bits(weights[1], weights[0])


@pytest.mark.parametrize(
    "options",
    [
        {"swa_lrs": -0.1},
        {"swa_lrs": 0.1, "swa_epoch_start": 1.5},
        {"swa_lrs": 0.1, "annealing_strategy": "exp"},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with raises_recorded(ConfigError):
        StochasticWeightAveraging(**options)


def test_wrong_uses_are_refused() -> None:
    with raises_recorded(ConfigError):
        quiet(callbacks=[StochasticWeightAveraging(0.1), EMAWeightAveraging()]).fit(Net(), data())
    with raises_recorded(ConfigError):
        quiet(max_epochs=2, callbacks=[StochasticWeightAveraging([0.1, 0.2])]).fit(Net(), data())
    with raises_recorded(ConfigError):
        quiet(max_steps=5, callbacks=[StochasticWeightAveraging(0.1)]).fit(Net(), data())
