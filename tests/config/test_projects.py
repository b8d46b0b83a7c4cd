"""Two projects whose modules have the same names are loaded in one process, and each gets its own."""

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
def test_each_project_gets_its_own_modules(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """Their batches come from a worker process, and a checkpoint gives the class of its own project."""
    files = {owner: write(owner, form) for owner in ("first", "second")}
    for owner in ("first", "second", "first", "second"):
        trainer, module, data = build(files[owner])
        assert (vars(type(module))["owner"], vars(type(data))["owner"]) == (owner, owner)
        trainer.fit(module, datamodule=data)
        loaded = type(module).load_from_checkpoint(trainer.run_dir / "checkpoints" / "last")
        assert type(loaded) is type(module)
        assert pickle.loads(pickle.dumps(type(data))) is type(data)
    assert caplog.text.count("another project's modules are called") == 1
    assert "'data'" in caplog.text or "'net.data'" in caplog.text


def test_module_and_data_of_two_projects_make_one_run() -> None:
    first, second = write("first", "files"), write("second", "files")
    Path("both.yaml").write_text(
        f"module: {Path(first).parent}/module.py:Net\ndata: {Path(second).parent}/data.py:Data\n"
    )
    _, module, data = build("both.yaml")
    assert (vars(type(module))["owner"], vars(type(data))["owner"]) == ("first", "second")


def test_modules_that_others_have_imported_stay_theirs() -> None:
    first, second = write("first", "files"), write("second", "files")
    build(first)
    before = {name: sys.modules[name] for name in ("module", "data", "layers")}
    path = [*sys.path]
    (Path(second).parent / "layers.py").write_text("raise ValueError('broken')\n")
    with pytest.raises(Exception, match="broken"):
        loaded(second)
    assert all(sys.modules[name] is module for name, module in before.items())
    assert [folder for folder in sys.path if folder not in path] == [str(Path(second).parent)]


def test_a_folder_of_data_does_not_hide_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("library").mkdir()
    Path("library/shared.py").write_text("OWNER = 'library'\n")
    monkeypatch.syspath_prepend(str(Path("library").absolute()))
    shared = importlib.import_module("shared")
    first = write("first", "files")
    (Path(first).parent / "shared").mkdir()
    (Path(first).parent / "layers.py").write_text("import shared\nfrom shared import OWNER\n")
    _, module, _ = build(first)
    assert vars(type(module))["owner"] == "library"
    assert sys.modules["layers"].shared is shared


def test_a_relative_import_inside_a_function_finds_its_own_project() -> None:
    files = [write(owner, "a package") for owner in ("first", "second")]
    for owner, file in zip(("first", "second"), files, strict=True):
        path = Path(file).parent / "net/module.py"
        path.write_text(
            path.read_text() + "\n    def late(self):\n        from . import layers\n        return layers.OWNER\n"
        )
        _, module, _ = build(file)
        assert getattr(module, "late")() == owner  # noqa: B009


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
