"""An evaluation builds the module with the hyperparameters of its checkpoint; what is typed wins, and each is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.project import Command
from trainer import Trainer, TrainModule

FILE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import DataModule, TrainModule


class Net(TrainModule):
    def __init__(self, width: int = 2, scale: float = 1.0, sizes: tuple[int, ...] = (1,), act: torch.nn.Module = None):
        super().__init__()
        self.save_hyperparameters(ignore=["act"])
        self.width, self.scale, self.sizes = width, scale, sizes
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log_dict({"scale": self.scale, "width": float(self.width), "first": float(self.sizes[0])})

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0]) * 0 + self.scale

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(2, 1)), 1)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader
"""
RUN = """
module: {class_path: scaled.py:Net, init_args: {width: 3, scale: 2.0, sizes: [7]}}
data: scaled.py:Data
trainer: {max_epochs: 1, accelerator: cpu, logger: false, enable_progress_bar: false, callbacks: [ModelCheckpoint]}
"""
OTHER = RUN.replace("scale: 2.0, sizes: [7]", "scale: 0.5, act: torch.nn.ReLU").replace("width: 3", "width: 4")


@pytest.fixture
def run(command: Command) -> Command:
    Path("scaled.py").write_text(FILE)
    Path("run.yaml").write_text(RUN)
    Path("other.yaml").write_text(OTHER)
    code, _, err = command("fit", "--config", "run.yaml")
    assert code == 0, err
    return command


@pytest.mark.parametrize("which", ["last", "runs/version_0", "runs/version_0/checkpoints/last"])
@pytest.mark.parametrize("action", ["validate", "test"])
def test_what_a_file_says_yields_to_the_checkpoint(action: str, which: str, run: Command) -> None:
    code, out, err = run(action, "--config", "other.yaml", "--ckpt-path", which)
    assert code == 0, err
    values = dict(line.split() for line in out.splitlines() if line.startswith("  "))
    assert {name: float(values[name]) for name in ("scale", "width", "first")} == {"scale": 2, "width": 3, "first": 7}
    notes = [line for line in err.splitlines() if line.startswith("note: module.")]
    assert sorted(notes) == [
        "note: module.scale is 2.0, as in the checkpoint, and not 0.5, as at other.yaml:2: to have that, type "
        "--module.scale",
        "note: module.width is 3, as in the checkpoint, and not 4, as at other.yaml:2: to have that, type "
        "--module.width",
    ]


def test_what_is_typed_wins_and_is_said(run: Command, caplog: pytest.LogCaptureFixture) -> None:
    code, out, err = run("validate", "--config", "other.yaml", "--ckpt-path", "last", "--module.scale", "0.25")
    assert code == 0, err
    values = dict(line.split() for line in out.splitlines() if line.startswith("  "))
    assert (float(values["scale"]), float(values["width"])) == (0.25, 3)
    assert "module.scale: 2.0 in the checkpoint; the module keeps its own, 0.25" in caplog.text
    assert "module.scale is" not in err


def test_without_a_file_the_class_is_enough(run: Command) -> None:
    words = ("--module", "scaled.py:Net", "--data", "scaled.py:Data", "--trainer.accelerator", "cpu")
    code, out, err = run("test", *words, "--trainer.logger", "false", "--ckpt-path", "runs/version_0")
    assert code == 0, err
    assert "note: module." not in err
    assert "scale  2" in " ".join(out.split()).replace("scale 2", "scale  2")


def test_another_module_is_refused_as_before(run: Command) -> None:
    Path("biased.py").write_text(FILE.replace("Linear(1, width)", "Linear(1, width, bias=False)"))
    code, _, err = run("validate", "--module", "biased.py:Net", "--data", "scaled.py:Data", "--ckpt-path", "last")
    assert code == 1
    assert "layers.0.bias" in err


class Sized(TrainModule):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("size", float(self.hparams.size))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_in_python_stays_as_it_is_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = DataLoader(torch.ones(2, 1))
    options = {"default_root_dir": tmp_path, "accelerator": "cpu", "enable_progress_bar": False}
    Trainer(max_epochs=1, **options).fit(Sized(3), data)
    assert Sized.load_from_checkpoint(tmp_path / "version_0").hparams.size == 3
    caplog.clear()
    assert Trainer(**options).test(Sized(4), data, ckpt_path="last")[0]["size"] == 4
    assert "module.size: 3 in the checkpoint; the module keeps its own, 4" in caplog.text
    caplog.clear()
    assert Trainer(**options).test(Sized(3), data, ckpt_path="last")[0]["size"] == 3
    assert "module.size" not in caplog.text
