"""The files of a project are imported as modules."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.examples import restored_imports
from tests.helpers.project import loaded
from trainer import ConfigError, DataModule, Trainer, TrainModule
from trainer.config.classes import one_line_error

LAYERS = "OWNER = {owner!r}\n"
DATA = """\
from dataclasses import dataclass

import torch

from trainer import DataModule
{layers}

@dataclass
class Sample:
    x: torch.Tensor
    owner: str = OWNER


class Data(DataModule):
    owner = OWNER

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 1), 2, num_workers=1, collate_fn=collate)


def collate(rows):
    return Sample(torch.stack(rows))
"""
MODULE = """\
import torch

from trainer import TrainModule
{layers}
{data}

class Net(TrainModule):
    owner = OWNER

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        assert type(batch) is Sample
        assert batch.owner == self.owner
        return self.layer(batch.x).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
TRAINER = "trainer: {max_steps: 4, accelerator: cpu, logger: false, enable_progress_bar: false}\n"
FORMS = {
    "files": ("", "module.py:Net", "data.py:Data"),
    "files of a package": ("net", "net/module.py:Net", "net/data.py:Data"),
    "a package": ("net", "net.module.Net", "net.data.Data"),
    "a folder": ("net", "net.module.Net", "net.data.Data"),
}


@pytest.fixture(autouse=True)
def _same_modules_afterwards() -> Iterator[None]:
    with restored_imports():
        yield


def write(owner: str, form: str) -> str:
    """Write a project, and return the path of its configuration."""
    package, module, data = FORMS[form]
    root = Path(owner).absolute()
    folder = root / package
    folder.mkdir(parents=True)
    dot = "." if package else ""
    if package and form != "a folder":
        (folder / "__init__.py").write_text("")
    layers = f"from {dot}layers import OWNER\n"
    (folder / "layers.py").write_text(LAYERS.format(owner=owner))
    (folder / "data.py").write_text(DATA.format(layers=layers))
    (folder / "module.py").write_text(MODULE.format(layers=layers, data=f"from {dot}data import Sample\n"))
    (root / "run.yaml").write_text(f"module: {module}\ndata: {data}\n{TRAINER}")
    return str(root / "run.yaml")


def build(file: str) -> tuple[Trainer, TrainModule, DataModule]:
    trainer, module, data = loaded(file).build()
    assert isinstance(module, TrainModule)
    assert isinstance(data, DataModule)
    return trainer, module, data


@pytest.mark.parametrize("form", FORMS)
def test_files_and_packages_of_a_project_are_imported_once(form: str) -> None:
    """Their batches come from a worker process, and a checkpoint gives the class."""
    trainer, module, data = build(write("first", form))
    trainer.fit(module, datamodule=data)
    loaded = type(module).load_from_checkpoint(trainer.run_dir / "checkpoints" / "last")
    assert type(loaded) is type(module)
    assert pickle.loads(pickle.dumps(type(data))) is type(data)


def test_a_package_of_another_project_is_not_taken_for_it() -> None:
    first, second = (Path(write(owner, "a package")) for owner in ("first", "second"))
    text = second.read_text()
    second.write_text(text.replace("net.module", f"{second.parent}:net.module"))
    build(str(first))
    with pytest.raises(ConfigError, match=r"is imported from .*first already\. Load each project in a new process"):
        build(str(second))


def test_an_installed_module_is_not_hidden_by_a_file_of_its_name() -> None:
    first = write("first", "files")
    (Path(first).parent / "importlib.py").write_text("raise ValueError('imported')\n")
    (Path(first).parent / "layers.py").write_text("import importlib\nOWNER = 'first'\n")
    build(first)
    assert sys.modules["layers"].importlib is importlib


def test_the_location_of_an_error_is_in_the_users_code() -> None:
    Path("mine.py").write_text("from trainer import TrainModule\nclass Net(TrainModule):\n    pass\nNet().trainer\n")
    with pytest.raises(ConfigError) as error:
        exec(compile(Path("mine.py").read_text(), "mine.py", "exec"), {"__name__": "mine"})
    assert one_line_error(error.value).startswith("mine.py:4: ")
