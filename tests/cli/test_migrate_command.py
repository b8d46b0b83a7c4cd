"""`trainer migrate` rewrites a project of Lightning's, keeps everything else as it is, and lists what is left."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.project import Command, assert_recorded, done, refused
from trainer import Trainer
from trainer.callbacks import CALLBACKS
from trainer.compat.names import HOMES, NAMES

pytest.importorskip("libcst")

BEFORE = '''"""Trains with pytorch_lightning."""
import os, pytorch_lightning as pl  # the trainer
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint as MC,  # keep this
)
from lightning import pytorch as L
from pytorch_lightning.core.lightning import LightningModule
from pytorch_lightning.utilities.seed import seed_everything
from .lightning import own


class Net(LightningModule):
    def other(self, net: 'LightningModule', also: "pl.LightningModule") -> LightningModule:
        return  net   # two spaces


class Data(L.LightningDataModule): pass


def main(n):
    trainer = pl.Trainer(gpus = 2, max_nb_epochs=3, checkpoint_callback=True, callbacks=[MC(period=2)],
        weights_summary=None)
    return L.Trainer(gpus=n), 'LightningModule'
'''


def written(command: Command, folder: Path, **files: str) -> tuple[dict[str, str], str]:
    """Write files, migrate them twice, and return their new texts, and what has been listed both times."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_bytes(text.encode())
    code, out, err = command("migrate", str(folder), "--write")
    assert (code, err) == (0, "")
    found = {name: (folder / name.replace("__", ".")).read_bytes().decode() for name in files}
    again = command("migrate", str(folder))
    assert again[0] == 0
    assert "---" not in again[1]
    return found, again[1] if "To decide" in again[1] else out


def test_a_file_is_rewritten_and_its_formatting_kept(command: Command, tmp_path: Path) -> None:
    found, _ = written(command, tmp_path / "p", net__py=BEFORE)
    assert_recorded(found["net__py"])


def test_without_write_a_diff_is_shown_and_nothing_changed(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(BEFORE)
    out, _ = done(command("migrate", str(file)))
    assert file.read_text() == BEFORE
    assert "\n-from pytorch_lightning.core.lightning import LightningModule\n" in out
    assert "\n+from trainer import TrainModule\n" in out
    assert f"{file}:26: Trainer(gpus=): use accelerator='cuda', devices=" in out


@pytest.mark.parametrize(
    "before",
    [
        "import lightning\nlightning.Trainer()\n",
        "import lightning.pytorch.callbacks\nlightning.pytorch.callbacks.Timer, lightning.LightningModule\n",
        "import pytorch_lightning\ntrainer = pytorch_lightning.Trainer()\n",
        "from lightning import LightningDataModule\nclass DataModule(LightningDataModule): ...\n",
        "from lightning import LightningModule\n__all__ = ['LightningModule']\n",
        "from pytorch_lightning.loggers.wandb import WandbLogger as W\n",
        "import lightning\r\nx = 1",
        "import lightning as L\nL.Trainer(accelerator='ddp')",
        "import lightning.data as d\n",
    ],
)
def test_imports_and_names(command: Command, tmp_path: Path, before: str) -> None:
    found, _ = written(command, tmp_path / "p", a__py=before)
    assert_recorded(found["a__py"])


QUOTED = """import pytorch_lightning, other.lightning as o
from lightning import LightningModule, LightningDataModule as D
from typing import Optional

def f(a: "pytorch_lightning.Trainer", b: Optional["LightningModule"]) -> "dict[str, o.LightningModule]": ...

class A:
    net: 'Optional[D]' = None
    own: "my_LightningModule" = "pytorch_lightning.Trainer"
"""


def test_quoted_annotations(command: Command, tmp_path: Path) -> None:
    found, listed = written(command, tmp_path / "p", a__py=QUOTED)
    assert_recorded(found["a__py"])
    assert listed.count("the name of a package in a string") == 1
    assert ":9: " in listed


def test_a_name_that_another_file_imports_is_kept(command: Command, tmp_path: Path) -> None:
    base = "from lightning import LightningModule\n"
    found, _ = written(
        command, tmp_path / "p", base__py=base, use__py="from base import LightningModule\nimport lightning"
    )
    assert found["base__py"] == "from trainer import LightningModule\n"
    # Also where the other file has nothing else of Lightning's.
    found, _ = written(command, tmp_path / "q", base__py=base, use__py="from base import LightningModule\n")
    assert found["base__py"] == "from trainer import LightningModule\n"


DECISIONS = (
    "    def training_step(self, batch, batch_idx, optimizer_idx=0): ...",
    "    def training_epoch_end(self, outputs): ...",
    "    def configure_gradient_clipping(self, optimizer, optimizer_idx, v): ...",
    "    def on_post_move_to_device(self): ...",
    "    def validation_step(self, batch, i): return {'log': {'a': 1}}",
    "    def test_step(self, batch, i): return {'progress_bar': {'a': 1}}",
    "    def b(self): return self.use_amp",
    "    truncated_bptt_steps = 2",
    "pl.Trainer(resume_from_checkpoint='x')",
    "pl.Trainer(gpus=n)",
    "pl.callbacks.ModelCheckpoint(filepath='x')",
    "pl.callbacks.GPUStatsMonitor()",
    "pl.Trainer.add_argparse_args",
    "torch.load('x')['state_dict']",
    "pl.__version__",
    "from pytorch_lightning.__about__ import __version__",
    "getLogger('pytorch_lightning.core')",
    "parser.link_arguments('data.n', 'model.n', compute_fn=len)",
    "from lightning.pytorch.core import *",
    "from pytorch_lightning.metrics import Accuracy",
)


def test_decisions_are_listed_with_file_and_line_before_and_after(command: Command, tmp_path: Path) -> None:
    lines = ["import pytorch_lightning as pl", "class Net(pl.LightningModule):", *DECISIONS]
    file = tmp_path / "net.py"
    file.write_text("\n".join(lines) + "\n")
    for option in ([], ["--write"], []):
        out = command("migrate", str(file), *option)[1]
        listed = out.partition("To decide by hand:")[2]
        assert all(f"{file}:{line}: " in listed for line in range(3, 3 + len(DECISIONS))), listed
        assert_recorded(listed)


AS_A_FILE = """\
import glob, os, shutil, torch
from pathlib import Path
import pytorch_lightning as pl

def after(trainer, folder, args, callback, name):
    state = torch.load(callback.best_model_path)  # here
    net.load_state_dict(state["state_dict"])  # here
    other = torch.load(name)
    net.load_state_dict(other['state_dict'])  # here
    path = "a.pt"
    trainer.save_checkpoint(path)
    os.remove(path)  # here
    shutil.copy(callback.last_model_path, folder)  # here
    shutil.move("x/last.ckpt", folder)  # here
    Path(folder, "epoch=1.ckpt").unlink()  # here
    (folder / "last.ckpt").rename("b")  # here
    if os.path.isfile(args.ckpt_path): ...  # here
    found = glob.glob(f"{folder}/*.ckpt")  # here
    os.unlink(found[0])  # here
    newest = [name for name in os.listdir(folder) if name.endswith(".ckpt")]  # here
    with open(args.resume_checkpoint, "rb") as file: ...  # here
    bucket.upload_file(callback.best_model_path, "b")  # here
    run.log_artifact(path)  # here
    mine = my_load(callback.best_model_path, "cpu")  # here
    net.load_state_dict(mine["state_dict"])  # here

def others(trainer, folder, path, callback):
    torch.load("data.pt")
    torch.load(path)
    os.remove(path)
    os.path.exists("last.ckpt")
    open(folder / "checkpoints.txt")
    open(folder / "config.yaml")
    trainer.fit(net, ckpt_path="last.ckpt")
    trainer.test(ckpt_path=callback.best_model_path)
    Net.load_from_checkpoint(callback.best_model_path)

class Net(pl.LightningModule):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"].pop("x")
"""


def test_places_that_use_a_checkpoint_as_a_file_are_listed(command: Command, tmp_path: Path) -> None:
    lines_listed(command, tmp_path / "a.py", AS_A_FILE, "single_file=True")


def lines_listed(command: Command, file: Path, text: str, advice: str) -> None:
    """Check that the lines with the comment `here` are listed, each with the advice, and no others."""
    file.write_text(text)
    _, out, _ = command("migrate", str(file), "--write")
    listed = [line for line in out.partition("To decide by hand:")[2].splitlines() if line.startswith(f"  {file}:")]
    wanted = {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# here")}
    assert {int(line.removeprefix(f"  {file}:").partition(":")[0]) for line in listed} == wanted, out
    assert all(advice in line for line in listed), out


OF_TRAINERS = """\
import hydra, pytorch_lightning as pl

def settings(cfg, args):
    cfg.trainer.devices = 1
    config.trainer.accelerator = "cpu"
    if args.trainer.resume_from_checkpoint or self.cfg.trainer.lr_schedulers: ...
    experiment.trainer.devices, params.trainer.gpus, self.settings.trainer.tpu_cores, cfg["trainer"].devices

def run(trainer, model, pl_module):
    trainer.devices  # here
    model.trainer.devices  # here
    pl_module.trainer.devices  # here
    mine = pl.Trainer()
    mine.devices  # here
    cli.trainer.devices  # here
    cfg.devices, trainer.num_devices

class Net(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        self.trainer.devices  # here
        self.cfg.trainer.devices
"""


def test_attributes_are_a_trainers_only_where_their_owner_is_known_to_be_one(command: Command, tmp_path: Path) -> None:
    lines_listed(command, tmp_path / "a.py", OF_TRAINERS, "use trainer.num_devices")


def test_folders_of_logs_are_listed(command: Command, tmp_path: Path) -> None:
    text = (
        '"""Writes to lightning_logs."""\nimport os, pytorch_lightning as pl\n'
        'os.path.join("lightning_logs", "version_0")  # here\n'
        'f"lightning_logs/version_{n}"  # here\n'
        '"out/lightning_logs/version_3/checkpoints"  # here\n'
        'print("see lightning_logs for more")\n'
        'pl.loggers.CSVLogger("lightning_logs"), pl.loggers.TensorBoardLogger(save_dir="lightning_logs/")\n'
    )
    lines_listed(command, tmp_path / "a.py", text, "use trainer.log_dir")


def test_monitors_that_need_a_mode_are_listed(command: Command, tmp_path: Path) -> None:
    text = (
        "from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint\n"
        'ModelCheckpoint(monitor="val_acc")  # here\n'
        'ModelCheckpoint("folder", monitor="val_loss", mode="auto")  # here\n'
        'EarlyStopping("val_f1", patience=3)  # here\n'
        'EarlyStopping("val_loss"), EarlyStopping("val_acc", mode="max"), EarlyStopping(name, mode=mode)\n'
        'ModelCheckpoint(monitor="val_acc", mode="max"), ModelCheckpoint("acc"), ModelCheckpoint(monitor=name)\n'
    )
    lines_listed(command, tmp_path / "a.py", text, "use mode='max'")
    yaml = "class_path: lightning.pytorch.callbacks.EarlyStopping\ninit_args: {{monitor: {}}}\n"
    _, listed = written(command, tmp_path / "p", a__yaml=yaml.format("val_acc"), b__yaml=yaml.format("val_loss"))
    assert "a.yaml:2: EarlyStopping(monitor=): use mode='max'" in listed
    assert "by hand: 1" in listed


def test_loaders_that_are_the_data_modules_are_listed(command: Command, tmp_path: Path) -> None:
    text = (
        "import lightning as L\n"
        "class Net(L.LightningModule):\n"
        "    def val_dataloader(self): ...\n"
        "    def configure_optimizers(self):\n"
        "        n = len(self.train_dataloader())  # here\n"
        "        m = len(self.val_dataloader())\n"
    )
    lines_listed(command, tmp_path / "a.py", text, "use self.trainer.datamodule.train_dataloader")


def test_arguments_of_a_trainers_methods_are_renamed(command: Command, tmp_path: Path) -> None:
    text = (
        "import lightning as L\n"
        "trainer.fit(net, train_dataloader=a, val_dataloaders=b)\n"
        "self.trainer.test(test_dataloaders=c), trainer.validate(net, val_dataloaders=d)\n"
        "other.test(test_dataloaders=c)\n"
    )
    found, _ = written(command, tmp_path / "p", a__py=text)
    assert found["a__py"] == (
        "import trainer as L\n"
        "trainer.fit(net, train_dataloaders=a, val_dataloaders=b)\n"
        "self.trainer.test(dataloaders=c), trainer.validate(net, dataloaders=d)\n"
        "other.test(test_dataloaders=c)\n"
    )


def test_attributes_of_a_trainer_that_cannot_be_set_are_listed(command: Command, tmp_path: Path) -> None:
    text = (
        "import lightning as L\n"
        "trainer = L.Trainer()\n"
        "trainer.model = net  # here\n"
        "self.trainer.limit_val_batches = 3  # here\n"
        "trainer.callbacks = []\n"
        "trainer.should_stop = True\n"
        "trainer.accumulate_grad_batches = 2\n"
        "trainer.mine, cfg.trainer.callbacks, net.trainer = 1, [], trainer\n"
    )
    lines_listed(command, tmp_path / "a.py", text, "give it as an argument")
    for name in ("model", "limit_val_batches", "optimizers", "datamodule", "loggers", "ckpt_path"):
        with pytest.raises(AttributeError, match="cannot be set"):
            setattr(Trainer(accelerator="cpu", logger=False), name, None)


def test_updates_of_hyperparameters_are_listed(command: Command, tmp_path: Path) -> None:
    text = (
        "import lightning as L\n"
        "class Net(L.LightningModule):\n"
        "    def __init__(self, cls):\n"
        "        self.hparams.update({'cls': cls})  # here\n"
        "        self.hparams['width'] = 3\n"
        "        self.settings.update(a=1)\n"
    )
    lines_listed(command, tmp_path / "a.py", text, "values that are not data")


PARSED = """\
import argparse, inspect
import pytorch_lightning as pl
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=3)
parser.add_argument("--max_epochs", type=int, default=5)
parser.add_argument("--accelerator", default=None)
args = parser.parse_args([])
trainer = pl.Trainer.from_argparse_args(args)
"""


def test_the_advice_for_parsed_arguments_works_beside_the_scripts_own(command: Command, tmp_path: Path) -> None:
    found, listed = written(command, tmp_path / "p", a__py=PARSED)
    advice = listed.partition("from_argparse_args: use ")[2].partition("\n")[0]
    code = found["a__py"].replace("pl.Trainer.from_argparse_args(args)", advice.replace("Trainer", "pl.Trainer"))
    result: dict[str, Any] = {}
    exec(code, result)
    assert result["trainer"].max_epochs == 5


@pytest.mark.parametrize(
    "argument", ["name for name in names", "'of ' \n  'two lines'", "f'{a}'\n  f'{b}'", "x := 3", "*a"]
)
def test_any_argument_is_read(argument: str, command: Command, tmp_path: Path) -> None:
    found, listed = written(command, tmp_path / "p", a__py=f"import lightning\nprint({argument})\n")
    assert found["a__py"].startswith("import trainer")
    assert "by hand: 0" in listed


def test_the_list_names_the_way_without_a_change(command: Command, tmp_path: Path) -> None:
    _, listed = written(command, tmp_path / "p", a__py=PARSED)
    assert listed.count("trainer run-as-lightning") == 1
    _, none = written(command, tmp_path / "q", a__py="import lightning\n")
    assert "run-as-lightning" not in none


def test_helpers_of_the_users_own_are_not_listed(command: Command, tmp_path: Path) -> None:
    text = (
        "import lightning as L\n"
        "class Net(L.LightningModule):\n"
        "    def __init__(self): self.use_amp = True\n"
        "    def f(self): return self.use_amp\n"
        "    def g(self): self.hparams['width'] = 2\n"
        "    def training_step(self, batch, i): self.log_dict(self.both(batch)['log']); return self.loss(batch)\n"
        "    def both(self, batch): return {'log': {'a': 1}, 'loss': 2}\n"
        "class Other:\n"
        "    def training_epoch_end(self, outputs): ...\n"
    )
    _, out = written(command, tmp_path / "p", net__py=text)
    assert "by hand: 0" in out


YAML = """\
# A run
seed_everything: 1  # mine
trainer:
  replace_sampler_ddp: false  # two
  gpus: 2
  weights_summary: null
  resume_from_checkpoint:
  track_grad_norm: -1
  num_processes: 4
  callbacks:
    - class_path: 'pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint'  # x
      init_args: {period: 3, filepath: a}
  logger: {class_path: lightning.pytorch.loggers.wandb.WandbLogger}
model:
  class_path: my.Model
---
_target_: &name "pytorch_lightning.Trainer"
max_nb_epochs: 3
trainer: {gpus: 1, profiler: true, distributed_backend: "ddp"}
"""


def test_yaml_files(command: Command, tmp_path: Path) -> None:
    found, out = written(command, tmp_path / "p", run__yaml=YAML)
    assert_recorded(f"{found['run__yaml']}\n{out}")


@pytest.mark.parametrize("value", ["null", "0"])
def test_no_gpus_are_the_cpu(value: str, command: Command, tmp_path: Path) -> None:
    text = f"trainer:\n  gpus: {value}\nmodel: {{class_path: my.Model}}\n"
    found, out = written(command, tmp_path / "p", run__yaml=text)
    assert found["run__yaml"] == text.replace(f"gpus: {value}", "accelerator: cpu").replace("model", "module")
    assert "by hand: 0" in out
    found, _ = written(command, tmp_path / "q", run__yaml=text.replace("gpus", "accelerator: gpu\n  gpus"))
    assert f"gpus: {value}" in found["run__yaml"]
    code = "import pytorch_lightning as pl\npl.Trainer(gpus={})\n".format({"null": "None"}.get(value, value))
    found, _ = written(command, tmp_path / "c", run__py=code)
    assert "pl.Trainer(accelerator='cpu')" in found["run__py"]


def test_a_seed_that_cannot_be_moved_is_listed(command: Command, tmp_path: Path) -> None:
    for text in (
        "seed_everything: true\ntrainer:\n  max_epochs: 1\n",
        "seed_everything: 3\ntrainer: {max_epochs: 1}\n",
    ):
        text += "model: {class_path: my.Model}  # lightning\n"
        found, out = written(command, tmp_path / str(len(text)), run__yaml=text)
        assert "seed_everything: use 'seed:'" in out
        assert found["run__yaml"].startswith("seed_everything")


def test_what_cannot_be_read_is_reported_and_the_others_go_on(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    (folder / "bad.py").write_text("import lightning\ndef f(:\n")
    (folder / "latin.py").write_bytes(b"import lightning\n# \xff\n")
    (folder / "bad.yaml").write_text("class_path: pytorch_lightning.Trainer\n a: [")
    (folder / "latin.yaml").write_bytes(b"a: pytorch_lightning # \xff\n")
    (folder / "good.py").write_text("import lightning as L\n")
    (folder / "requirements.txt").write_text("pytorch-lightning>=1.5\ntorch\n")
    code, out, err = command("migrate", str(folder), "--write")
    assert code == 1
    assert (folder / "good.py").read_text() == "import trainer as L\n"
    assert (folder / "latin.py").read_bytes() == b"import lightning\n# \xff\n"
    for name, words in {"bad.py": "@ 2:1", "latin.py": "utf-8", "bad.yaml": "line 2", "latin.yaml": "utf-8"}.items():
        assert any(name in line and words in line and "not changed" in line for line in err.splitlines()), err
    assert "requirements.txt:1: pytorch-lightning: where this is a requirement" in out
    refused(command, "migrate", str(tmp_path / "nowhere"), str(folder / "good.py"))


def test_every_rewritten_import_of_a_public_name_works() -> None:
    from trainer.cli.migrate.python_files import migrate_python

    lightning = {"Trainer": "lightning.pytorch.trainer.trainer", "Callback": "lightning.pytorch.callbacks.callback"}
    served = {name for name, target in NAMES.items() if " " not in target and ":" in target}
    for name in {*HOMES, *CALLBACKS, *served}:
        module = lightning.get(name, "lightning.pytorch.utilities")
        new, findings = migrate_python(f"from {module} import {name} as it\n".encode())
        if findings:  # a name that is not here
            continue
        (line,) = ast.parse(new).body
        assert isinstance(line, ast.ImportFrom)
        assert getattr(importlib.import_module(str(line.module)), line.names[0].name) is not None, new


def test_the_decorators_of_lightning_utilities_are_rewritten_and_its_other_modules_are_not() -> None:
    from trainer.cli.migrate.python_files import migrate_python

    text = (
        "from lightning_utilities.core.apply_func import apply_to_collection\n"
        "from lightning_utilities.core.rank_zero import rank_prefixed_message, rank_zero_only\n"
    )
    new, findings = migrate_python(text.encode())
    changed = text.replace("lightning_utilities.core.rank_zero", "trainer.utilities.rank_zero")
    assert (new.decode(), list(findings)) == (changed, [])
