"""`trainer migrate` rewrites a project of Lightning's, keeps everything else as it is, and lists what is left."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from tests.helpers.project import Command, assert_recorded, done, refused
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
    "from lightning.pytorch.cli import LightningCLI",
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
