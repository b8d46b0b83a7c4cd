"""Lightning's demonstration modules train as Lightning's, and its examples' imports are there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")
from tests.helpers.lightning_runs import LIGHTNING, OURS, Library
from trainer.compat.demos import BoringDataModule, BoringModel, DemoModel, RandomDataset, cli_lightning_logo

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(library: Library, demos: Any, name: str, folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    module, data = getattr(demos, name)(), demos.BoringDataModule()
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = library.Trainer(accelerator="cpu", devices=1, max_epochs=2, default_root_dir=folder, **off)
    trainer.fit(module, datamodule=data)
    trainer.predict(module, datamodule=data)
    return dict(module.state_dict())


@pytest.mark.parametrize("name", ["BoringModel", "DemoModel"])
def test_the_weights_are_lightnings(name: str, tmp_path: Path) -> None:
    theirs = pytest.importorskip("pytorch_lightning.demos.boring_classes")
    ours = importlib.import_module("trainer.pytorch.demos.boring_classes")
    expected = trained(LIGHTNING, theirs, name, tmp_path / "theirs")
    torch.testing.assert_close(trained(OURS, ours, name, tmp_path / "ours"), expected, rtol=0, atol=0)


def test_imports_of_lightnings_examples(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}
    exec(
        "from trainer.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, cli_lightning_logo\n"
        "from trainer.pytorch.cli import LightningCLI\n"
        "from trainer.pytorch.demos.boring_classes import BoringDataModule, BoringModel, DemoModel, RandomDataset\n",
        found,
    )
    mine = (BoringDataModule, BoringModel, DemoModel, RandomDataset)
    assert [found[one.__name__] for one in mine] == [*mine]
    assert found["cli_lightning_logo"] is cli_lightning_logo
    cli_lightning_logo()
    assert "Trainer" in capsys.readouterr().out


def test_data_and_models_of_torchvision_are_looked_for_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    exec(
        "from trainer.pytorch.demos.mnist_datamodule import MNIST\n"
        "from trainer.pytorch.utilities.model_helpers import get_torchvision_model\n",
        found,
    )
    for module, name in (("datasets", "MNIST"), ("models", "get_model")):
        theirs = ModuleType(f"torchvision.{module}")
        setattr(theirs, name, lambda *args, **options: (args, options))
        monkeypatch.setitem(sys.modules, f"torchvision.{module}", theirs)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    assert found["MNIST"]("data", train=True) == (("data",), {"train": True})
    assert found["get_torchvision_model"]("resnet18", weights=None) == (("resnet18",), {"weights": None})
