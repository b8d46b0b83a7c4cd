"""What scripts ask of the trainer and its optimizers has Lightning's value and type."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library
from tests.helpers.toy import loader

pytestmark = pytest.mark.filterwarnings("ignore")


def asked(library: Library, folder: Path, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Net(library.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def on_train_start(self) -> None:
            trainer, optimizer = self.trainer, self.optimizers()
            found["limits"] = trainer.max_epochs, trainer.max_steps
            found["precision"] = (
                trainer.precision == "32-true",
                trainer.precision == "bf16-mixed",
                f"{trainer.precision}",
            )
            found["is an optimizer"] = (
                isinstance(optimizer, torch.optim.Optimizer),
                isinstance(optimizer, torch.optim.SGD),
            )
            self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def on_train_batch_end(self, *args: Any) -> None:
            self.schedule.step()
            found["rate"] = self.optimizers().param_groups[0]["lr"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = library.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **off, **settings)
    trainer.fit(Net(), loader(3))
    return found


@pytest.mark.parametrize("settings", [{"max_epochs": 1}, {"max_steps": 2}], ids=str)
def test_they_are_those_of_lightning(settings: dict[str, int], tmp_path: Path) -> None:
    theirs = asked(LIGHTNING, tmp_path / "theirs", **settings)
    assert asked(OURS, tmp_path / "ours", **settings) == theirs
    assert theirs["rate"] < 0.05


class Remembers:
    """The members of a logger in Lightning's words."""

    name, version = "remembers", 0
    parameters: Any = None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters = dict(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...


@pytest.mark.filterwarnings("ignore")
def test_a_logger_gets_the_hyperparameters_of_module_and_data_in_one_dict(tmp_path: Path) -> None:
    got = []
    for package in ("pytorch_lightning", "trainer"):
        pl: Any = importlib.import_module(package)
        importlib.import_module(f"{package}.loggers")

        class Data(pl.LightningDataModule):  # type: ignore[misc]
            def __init__(self, batch_size: int = 8) -> None:
                super().__init__()
                self.save_hyperparameters()

            def train_dataloader(self) -> Any:
                return loader(2)

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self, width: int = 1) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.layer = torch.nn.Linear(4, width)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer.weight.sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        logger = type("Logger", (Remembers, pl.loggers.Logger), {})()
        trainer = pl.Trainer(max_epochs=1, logger=logger, default_root_dir=tmp_path, enable_progress_bar=False)
        trainer.fit(Module(), Data())
        got.append((logger.parameters, str(trainer.state.fn), f"{trainer.state.status}"))
    assert got[0] == got[1] == ({"batch_size": 8, "width": 1}, "TrainerFn.FITTING", "TrainerStatus.FINISHED")
