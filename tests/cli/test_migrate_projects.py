"""Whole projects of Lightning's, of the shapes that are found: migrated they run, and a second time changes nothing."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.project import Command, done

pytest.importorskip("libcst")

MODEL = """
    def __init__(self, width: int = 4, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("train_loss", loss,   on_step=True, on_epoch=True)  # as before
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch).square().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
"""
DATA = """
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        self.rows = torch.ones(16, 4)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader
"""

OLD = {
    "model.py": '"""A model of 2020."""\nimport torch\nfrom pytorch_lightning.core.lightning import LightningModule\n\n'
    f"\nclass Net(LightningModule):{MODEL}",
    "data.py": f"import torch, pytorch_lightning as pl\n\nclass Rows(pl.LightningDataModule):{DATA}",
    "train.py": """
from argparse import ArgumentParser
import pytorch_lightning as pl
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint, EarlyStopping
from pytorch_lightning.loggers.csv_logs import CSVLogger
from model import Net
from data import Rows

def main(args):
    seed_everything(args.seed)
    checkpoint = ModelCheckpoint(monitor='val_loss', mode='min', period=1)
    trainer = Trainer(max_epochs=args.max_epochs, checkpoint_callback=True, weights_summary=None,
                      progress_bar_refresh_rate=0, callbacks=[checkpoint, EarlyStopping('val_loss')],
                      logger=CSVLogger('logs', name='old'), default_save_path='runs')
    trainer.fit(Net(lr=.05), datamodule=Rows())
    return trainer, checkpoint.best_model_path

if __name__ == '__main__':
    parser = ArgumentParser()
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--max_epochs', type=int, default=2)
    trainer, best = main(parser.parse_args([]))
    result = trainer.global_step, Net.load_from_checkpoint(best).hparams.lr
""",
}
NEW = {
    "src/__init__.py": "",
    "src/net.py": f"import lightning as L\nimport torch\n\n\nclass Net(L.LightningModule):{MODEL}",
    "src/rows.py": f"import torch\nfrom lightning import LightningDataModule\n\n"
    f"\nclass Rows(LightningDataModule):{DATA}",
    "main.py": """
import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.fabric.utilities.seed import seed_everything

from src.net import Net
from src.rows import Rows

seed_everything(3, workers=True)
checkpoint = ModelCheckpoint(monitor="val_loss", mode="min", save_top_k=1, filename="{epoch:02d}-{val_loss:.2f}")
trainer = L.Trainer(max_epochs=2, accelerator="auto", devices=1, log_every_n_steps=1, enable_progress_bar=False,
                    callbacks=[checkpoint, LearningRateMonitor(logging_interval="step")], logger=CSVLogger("logs"))
trainer.fit(model=Net(), datamodule=Rows())
rank_zero_info("validating")
steps = trainer.global_step
trainer.validate(Net(), datamodule=Rows(), ckpt_path="best", verbose=False)
result = steps, Net.load_from_checkpoint(checkpoint_path=checkpoint.best_model_path).hparams.lr
""",
}
ALIAS = {
    "pkg/__init__.py": "from .net import Net\n",
    "pkg/net.py": "import torch\nfrom lightning import pytorch as pl\n"
    "from lightning.pytorch.utilities.types import STEP_OUTPUT\n\n"
    f"\nclass Net(pl.LightningModule):{MODEL}\n    def configure_callbacks(self) -> 'list[pl.Callback]':\n"
    "        return [Note()]\n\n\nclass Note(pl.callbacks.Callback):\n"
    "    def on_train_batch_end(self, trainer: 'pl.Trainer', pl_module: 'pl.LightningModule', outputs: STEP_OUTPUT,\n"
    "                           batch, batch_idx: int) -> None:\n        pl_module.noted = batch_idx\n",
    "run.py": """
from lightning import pytorch as pl
import torch
from pkg import Net

pl.seed_everything(5)
net = Net(lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=4)
trainer = pl.Trainer(max_steps=8, enable_progress_bar=False, logger=pl.loggers.CSVLogger("logs"), profiler="simple",
                     callbacks=[pl.callbacks.ModelSummary(max_depth=-1), pl.callbacks.Timer()], num_sanity_val_steps=0)
trainer.fit(net, loader, loader)

@pl.utilities.rank_zero_only
def report():
    return trainer.callback_metrics["val_loss"].item()

assert report() >= 0 and net.noted == 3
result = trainer.global_step, net.hparams.lr
""",
}
HYDRA = {
    "configs/trainer/default.yaml": "_target_: lightning.pytorch.trainer.Trainer\n\ndefault_root_dir: runs\n\n"
    "min_epochs: 1  # prevents early stopping\nmax_epochs: 2\naccelerator: cpu\ndevices: 1\n"
    "check_val_every_n_epoch: 1\n"
    "deterministic: False\nenable_progress_bar: false\n",
    "configs/callbacks/default.yaml": "early_stopping:\n  _target_: lightning.pytorch.callbacks.EarlyStopping\n"
    "  monitor: val_loss\n  patience: 9\nmodel_summary:\n"
    "    _target_:   'lightning.pytorch.callbacks.RichModelSummary'\n"
    "    max_depth: -1\n",
    "net.py": f"from lightning import LightningModule\nimport torch\n\n\nclass Net(LightningModule):{MODEL}",
    "rows.py": f"import torch\nfrom lightning import LightningDataModule\n\n\nclass Rows(LightningDataModule):{DATA}",
    "train.py": """
from importlib import import_module
from pathlib import Path

import lightning as L
import yaml
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger

from net import Net
from rows import Rows


def instantiate(config, **more):  # as hydra.utils.instantiate
    module, _, name = config["_target_"].rpartition(".")
    return getattr(import_module(module), name)(**{k: v for k, v in config.items() if k != "_target_"}, **more)


L.seed_everything(12345, workers=True)
read = lambda name: yaml.safe_load(Path(f"configs/{name}/default.yaml").read_text())
model: LightningModule = Net()
datamodule: LightningDataModule = Rows()
callbacks: list[Callback] = [instantiate(one) for one in read("callbacks").values()]
logger: list[Logger] = []
trainer: Trainer = instantiate(read("trainer"), callbacks=callbacks, logger=logger)
trainer.fit(model=model, datamodule=datamodule, ckpt_path=None)
result = trainer.global_step, model.hparams.lr
""",
}
PROJECTS = {"1.x": (OLD, "train.py"), "2.x": (NEW, "main.py"), "alias": (ALIAS, "run.py"), "hydra": (HYDRA, "train.py")}


@pytest.fixture
def own_modules() -> Iterator[None]:
    """Forget the modules that a project has imported."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("model", "data", "src", "pkg", "net", "rows"):
            del sys.modules[name]


def lay_out(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def migrated(command: Command, folder: Path, files: dict[str, str]) -> str:
    """Migrate a project twice; return what is left to decide."""
    lay_out(folder, files)
    code, out, err = command("migrate", str(folder), "--write")
    assert (code, err) == (0, "")
    texts = [(folder / name).read_text() for name in files]
    again = command("migrate", str(folder), "--write")
    assert texts == [(folder / name).read_text() for name in files]
    for before, after in zip(files.values(), texts, strict=True):
        assert "lightning" not in after.replace("LightningModule", "").replace("LightningDataModule", "").lower()
        assert len(before.splitlines()) == len(after.splitlines())
    assert "---" not in again[1]
    return out


@pytest.mark.parametrize("name", PROJECTS)
@pytest.mark.usefixtures("own_modules")
@pytest.mark.filterwarnings("ignore")
def test_a_migrated_project_runs(name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, script = PROJECTS[name]
    said = migrated(command, tmp_path / "project", files)
    assert "To decide" not in said, said
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "project")
    found = runpy.run_path(script, run_name="__main__")
    assert found["result"] == (8, 0.05 if name == "1.x" else 0.1)


CLI = {
    "net.py": f"import lightning.pytorch as pl\nimport torch\n\n\nclass Net(pl.LightningModule):{MODEL}",
    "rows.py": f"import lightning.pytorch as pl\nimport torch\n\n\nclass Rows(pl.LightningDataModule):{DATA}",
    "main.py": "from lightning.pytorch.cli import LightningCLI\n\nfrom net import Net\nfrom rows import Rows\n\n"
    'if __name__ == "__main__":\n    LightningCLI(Net, Rows)\n',
    "config.yaml": """\
seed_everything: 42
trainer:
  max_epochs: 2   # enough
  accelerator: cpu
  devices: 1
  enable_progress_bar: false
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args:
      save_dir: logs
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val_loss, mode: min}
    - class_path: pytorch_lightning.callbacks.LearningRateMonitor
model:
  class_path: net.Net
  init_args:
    lr: 0.02
data:
  class_path: rows.Rows
  init_args:
    batch_size: 4
""",
}


@pytest.mark.usefixtures("own_modules")
def test_a_file_of_lightnings_command_is_that_of_trainer_fit(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    lay_out(folder, CLI)
    said, _ = done(command("migrate", str(folder), "--write"))
    assert "To decide by hand" not in said
    text = (folder / "config.yaml").read_text()
    assert "  max_epochs: 2   # enough\n" in text
    assert "lightning" not in text
    assert text.startswith("trainer:\n  seed: 42\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    done(command("fit", "--config", "config.yaml"))
    assert [*folder.rglob("manifest.json")], "no checkpoint"
