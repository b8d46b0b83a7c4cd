"""What callbacks keep for their user to read has the names and values that Lightning's have."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import pytorch_lightning.loggers as LIGHTNING_LOGGERS  # noqa: N812
import torch
import yaml
from torch.optim.lr_scheduler import StepLR

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library, Record, base_of, loader
from trainer import ConfigError
from trainer.callbacks import CSVLogger, ProgressBar, TensorBoardLogger, TQDMProgressBar
from trainer.names.states import AS_LIGHTNING

pytestmark = pytest.mark.filterwarnings("ignore")

Configure = Callable[[Any], Any]


def fitted(library: Library, folder: Path, configure: Configure, callbacks: list[Any], **settings: Any) -> Any:
    """Return the Trainer after a fit of a module whose optimizers `configure` makes."""
    net = type("Net", (base_of(library, Record()),), {"configure_optimizers": configure})
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    settings = {"max_epochs": 2, "log_every_n_steps": 1, **settings}
    trainer = library.Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder / library.name, callbacks=callbacks, **off, **settings
    )
    trainer.fit(net(), loader(), loader(seed=8))
    return trainer


def plain(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), lr=0.1)


def by_epoch(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


def by_step(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step", "name": "rate"}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def groups(module: Any) -> Any:
    parts = [{"params": module.body.parameters(), "lr": 0.2, "name": "body"}, {"params": module.head.parameters()}]
    optimizer = torch.optim.AdamW(parts, lr=0.1)
    return [optimizer], [StepLR(optimizer, 1, gamma=0.5)]


def asgd(module: Any) -> Any:
    return torch.optim.ASGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("configure", [plain, by_epoch, by_step, groups, asgd])
@pytest.mark.parametrize("every", [1, 3])
def test_rates_that_the_monitor_keeps(configure: Configure, interval: str, every: int, tmp_path: Path) -> None:
    kept = []
    for library in (OURS, LIGHTNING):
        monitor = library.LearningRateMonitor(logging_interval=interval, log_momentum=True, log_weight_decay=True)
        fitted(library, tmp_path, configure, [monitor], log_every_n_steps=every)
        kept.append((monitor.lrs, monitor.last_momentum_values, monitor.last_weight_decay_values))
    assert kept[0] == kept[1]
    assert [*kept[0][0]] == [*kept[1][0]]


@pytest.mark.parametrize("configure", [by_epoch, by_step, groups])
def test_rates_of_an_interval_that_follows_from_the_schedule(configure: Configure, tmp_path: Path) -> None:
    kept = []
    for library in (OURS, LIGHTNING):
        monitor = library.LearningRateMonitor()
        fitted(library, tmp_path, configure, [monitor], accumulate_grad_batches=2)
        kept.append(monitor.lrs)
        assert not any({**monitor.last_momentum_values, **monitor.last_weight_decay_values}.values())
    assert kept[0] == kept[1]


def test_rates_of_a_group_that_is_added_later(tmp_path: Path) -> None:
    def body_alone(module: Any) -> Any:
        return torch.optim.SGD(module.body.parameters(), lr=0.1)

    kept = []
    for library in (OURS, LIGHTNING):

        class Later(library.Callback):  # type: ignore[misc, name-defined]
            def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
                if trainer.current_epoch == 1:
                    group = {"params": list(pl_module.head.parameters()), "lr": 0.5}
                    trainer.optimizers[0].add_param_group(group)

        monitor = library.LearningRateMonitor(logging_interval="step")
        fitted(library, tmp_path, body_alone, [Later(), monitor])
        kept.append(monitor.lrs)
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("of_data", "logs", "is_refused"), [(2, True, True), (1, True, False), (2, False, False), (1.0, True, True)]
)
def test_hyperparameters_of_module_and_data_must_agree(
    of_data: float, logs: bool, is_refused: bool, tmp_path: Path
) -> None:
    for library in (OURS, LIGHTNING):

        class Data(library.DataModule):  # type: ignore[misc, name-defined]
            def __init__(self, size: float) -> None:
                super().__init__()
                self.save_hyperparameters()

            def train_dataloader(self) -> Any:
                return loader()

        class Net(base_of(library, Record())):  # type: ignore[misc]
            def __init__(self, size: float = 1) -> None:
                super().__init__()
                self.save_hyperparameters(logger=logs)

        off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        folder = tmp_path / library.name
        trainer = library.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder, **off)
        with pytest.raises((RuntimeError, ConfigError), match="size") if is_refused else nullcontext():
            trainer.fit(Net(), datamodule=Data(of_data))
        assert (trainer.global_step == 0) == is_refused


LOGGERS: dict[str, Callable[[Path], Any]] = {
    "CSVLogger": lambda folder: CSVLogger(folder, name="exp"),
    "TensorBoardLogger": lambda folder: TensorBoardLogger(folder, name="exp"),
}


@pytest.mark.parametrize("name", LOGGERS)
def test_hyperparameters_as_a_file_in_a_process_that_runs_as_lightning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def net_of(library: Library) -> Any:
        class Net(base_of(library, Record())):  # type: ignore[misc]
            def __init__(self, rate: float = 1e-05, sizes: Any = (1, 2), label: str = "x: y") -> None:
                super().__init__()
                self.save_hyperparameters()

        return Net

    their_logger = getattr(LIGHTNING_LOGGERS, name)
    written = []
    monkeypatch.setenv(AS_LIGHTNING, "1")
    for library, logger in (
        (OURS, LOGGERS[name](tmp_path / "ours")),
        (LIGHTNING, their_logger(tmp_path / "theirs", name="exp")),
    ):
        off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = library.Trainer(
            accelerator="cpu", max_epochs=1, logger=logger, default_root_dir=tmp_path / library.name, **off
        )
        trainer.fit(net_of(library)(), loader())
        read = yaml.load((Path(logger.log_dir) / "hparams.yaml").read_text(), yaml.UnsafeLoader)
        written.append(json.loads(json.dumps(read)))
    assert written[0] == written[1] == {"rate": 1e-05, "sizes": [1, 2], "label": "x: y"}
    folder = tmp_path / "again"
    monkeypatch.delenv(AS_LIGHTNING)
    again = OURS.Trainer(accelerator="cpu", max_epochs=1, logger=LOGGERS[name](folder), default_root_dir=folder, **off)
    again.fit(net_of(OURS)(), loader())
    assert not [*folder.rglob("hparams.yaml")]


def test_the_writer_of_a_csv_logger(tmp_path: Path) -> None:
    logger, theirs = CSVLogger(tmp_path / "ours"), LIGHTNING_LOGGERS.CSVLogger(tmp_path / "theirs")
    for one in (logger, theirs):
        one.experiment.log_metrics({"a": 1.5}, 3)
        one.experiment.log_hparams({"width": 4})
        one.experiment.save()
        assert Path(one.experiment.metrics_file_path).read_text().splitlines()[0].split(",") in (
            ["step", "a"],
            ["a", "step"],
        )
    writer: Any = import_module("trainer.loggers.csv_logs").ExperimentWriter
    their_writer = import_module("pytorch_lightning.loggers.csv_logs").ExperimentWriter
    assert writer.NAME_METRICS_FILE == their_writer.NAME_METRICS_FILE
    folder = Path(logger.experiment.metrics_file_path).parent
    assert yaml.safe_load((folder / writer.NAME_HPARAMS_FILE).read_text()) == {"width": 4}


@pytest.mark.parametrize("every", [1, 2])
def test_a_bar_of_your_own(every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written as Lightning's pages show it."""
    seen: dict[str, Any] = {}
    bases = {"ours": ProgressBar, "lightning": import_module("pytorch_lightning.callbacks").ProgressBar}
    for library in (OURS, LIGHTNING):

        class Bar(bases[library.name]):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.enable, self.noted = True, []

            def disable(self) -> None:
                self.enable = False

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
                assert self.trainer is trainer
                part = (batch_idx + 1) / self.total_train_batches
                self.noted.append((part, self.total_val_batches, self.enable))
                self.print(f"{part:.0%}")

        settings = {"accelerator": "cpu", "max_epochs": 2, "check_val_every_n_epoch": every, "logger": False}
        off = dict.fromkeys(("enable_model_summary", "enable_checkpointing"), False)
        bar = Bar()
        trainer = library.Trainer(callbacks=[bar], default_root_dir=tmp_path, **off, **settings)
        trainer.fit(base_of(library, Record())(), loader(), loader(6, seed=8))
        seen[library.name] = bar.noted
    assert seen["ours"] == seen["lightning"]
    assert capsys.readouterr().out.count("25%") == 4


@pytest.mark.parametrize("rate", [0, 3])
def test_whether_a_bar_shows_anything(rate: int) -> None:
    bars = [TQDMProgressBar(refresh_rate=rate), import_module("pytorch_lightning.callbacks").TQDMProgressBar(rate)]
    assert bars[0].is_enabled == bars[1].is_enabled == (not bars[0].is_disabled)  # type: ignore[attr-defined]
