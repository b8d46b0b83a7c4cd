"""An evaluation builds the module with the hyperparameters of its checkpoint; what is typed wins, and each is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.project import Command, done, refused
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
    done(command("fit", "--config", "run.yaml"))
    return command


@pytest.mark.parametrize("which", ["last", "best", "runs/version_0", "runs/version_0/checkpoints/last"])
@pytest.mark.parametrize("action", ["validate", "test"])
def test_what_a_file_says_yields_to_the_checkpoint(action: str, which: str, run: Command) -> None:
    out, err = done(run(action, "--config", "other.yaml", "--ckpt-path", which))
    values = dict(line.split() for line in out.splitlines() if line.startswith("  "))
    assert {name: float(values[name]) for name in ("scale", "width", "first")} == {"scale": 2, "width": 3, "first": 7}
    notes = [line for line in err.splitlines() if line.startswith("note: module.")]
    assert sorted(notes) == [
        "note: module.scale is 2.0, as in the checkpoint, and not 0.5, as at other.yaml:2: to have that, type "
        "--module.scale",
        "note: module.width is 3, as in the checkpoint, and not 4, as at other.yaml:2: to have that, type "
        "--module.width",
    ]


def test_an_object_of_a_file_yields_too(command: Command) -> None:
    Path("scaled.py").write_text(FILE.replace('ignore=["act"]', ""))
    Path("run.yaml").write_text(RUN)
    Path("other.yaml").write_text(OTHER)
    assert command("fit", "--config", "run.yaml")[0] == 0
    _, err = done(command("validate", "--config", "other.yaml", "--ckpt-path", "last"))
    assert "note: module.act is None, as in the checkpoint, and not ReLU(), as at other.yaml:2: to have that" in err
    words = ("--module.act", "torch.nn.ReLU")
    _, err = done(command("validate", "--config", "other.yaml", "--ckpt-path", "last", *words))
    assert "note: module.act" not in err


def test_a_relative_path_is_that_of_the_runs_own_configuration(
    command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    Path("scaled.py").write_text(FILE.replace("act: torch.nn.Module = None", "act: tuple[Path, ...] = ()"))
    Path("scaled.py").write_text("from pathlib import Path\n" + Path("scaled.py").read_text().replace('["act"]', "[]"))
    Path("run.yaml").write_text(RUN.replace("sizes: [7]", "act: [x]"))
    assert command("fit", "--config", "run.yaml")[0] == 0
    _, err = done(command("test", "--config", "runs/version_0/config.yaml", "--ckpt-path", "last"))
    assert "note: module" not in err
    _, _, err = command("test", "--config", "runs/version_0/config.yaml", "run.yaml", "--ckpt-path", "last")
    assert "note: module" not in err
    more = ("--ckpt-path", "last", "--trainer.max_epochs", "2")
    _, err = done(command("fit", "--config", "runs/version_0/config.yaml", *more))
    assert "changed since" not in caplog.text


def test_an_argument_by_position_alone_is_the_checkpoints(command: Command) -> None:
    position = "\n\nclass Placed(Net):\n    def __init__(self, width: int = {}, /, scale: float = 1.0):\n"
    position += "        super().__init__(width, scale)\n"
    Path("run.yaml").write_text(RUN.replace("Net, init_args: {width: 3, scale: 2.0, sizes: [7]}", "Placed"))
    for action, width, words in (("fit", 3, ()), ("validate", 2, ("--ckpt-path", "last", "--module.scale", "0.5"))):
        Path("scaled.py").write_text(FILE + position.format(width))
        out, _ = done(command(action, "--config", "run.yaml", *words))
    values = dict(line.split() for line in out.splitlines() if line.startswith("  "))
    assert (float(values["scale"]), float(values["width"])) == (0.5, 3)


NEEDS = """
from dataclasses import dataclass

from scaled import Data, Net


@dataclass
class Opts:
    lr: float
    depth: int


class Needs(Net):
    def __init__(self, width: int, sizes: list[int], opts: Opts, scale: float = 1.0, **more):
        super().__init__(width, scale, tuple(sizes))
        self.save_hyperparameters()
        print("opts", opts.lr, opts.depth, "sizes", *sizes, "more", *more.items())
"""


@pytest.fixture
def needs(command: Command) -> Command:
    Path("scaled.py").write_text(FILE)
    Path("needs.py").write_text(NEEDS)
    words = ("--module", "needs.py:Needs", "--data", "needs.py:Data", "--trainer.accelerator", "cpu")
    values = ("--module.width", "3", "--module.sizes", "[7]", "--module.opts", "{lr: 1, depth: 2}", "--module.a", "5")
    done(command("fit", *words, *values, "--trainer.max_epochs", "1"))
    return command


@pytest.mark.parametrize("which", ["last", "runs/version_0"])
@pytest.mark.parametrize("action", ["validate", "test", "predict"])
def test_arguments_that_are_needed_are_the_checkpoints(action: str, which: str, needs: Command) -> None:
    words = ("--module", "needs.py:Needs", "--data", "needs.py:Data", "--trainer.accelerator", "cpu")
    code, out, err = needs(action, *words, "--module.opts.lr", "4", "--module.opts.depth", "2", "--ckpt-path", which)
    assert code == 0, err
    assert ("module.opts {'lr': 1, 'depth': 2} there, {'lr': 4, 'depth': 2} here" in err) == (which == "last")
    assert "opts 4.0 2 sizes 7 more ('a', 5)" in out
    assert "note: module" not in err
    _, err = done(needs(action, *words, "--module.a", "5", "--ckpt-path", which))
    assert "although" not in err


def test_arguments_that_nobody_gives_are_asked_for(needs: Command) -> None:
    Path("headed.py").write_text(NEEDS.replace("width: int,", "width: int, heads: int,"))
    words = ("--module", "headed.py:Needs", "--data", "needs.py:Data", "--trainer.accelerator", "cpu")
    refused(needs, "validate", *words, "--ckpt-path", "runs/version_0")
    assert needs("validate", *words, "--ckpt-path", "runs/version_0", "--module.heads", "2")[0] == 0
    refused(needs, "validate", *words)


def test_elements_cannot_be_added_to_the_checkpoints_list(needs: Command) -> None:
    words = ("--module", "needs.py:Needs", "--data", "needs.py:Data", "--trainer.accelerator", "cpu")
    code, _, err = needs("validate", *words, "--module.sizes+=9", "--ckpt-path", "runs/version_0")
    assert code == 2
    assert "module.sizes+= adds nothing to the checkpoint's list. Give the whole list: --module.sizes" in err
    code, out, err = needs("validate", *words, "--module.sizes", "[1]", "--ckpt-path", "runs/version_0")
    assert code == 0, err
    assert "sizes 1 more" in out


@pytest.mark.parametrize("ckpt_path", [(), ("--ckpt-path", "runs/version_0")])
def test_an_element_of_no_files_list_is_refused_in_words(ckpt_path: tuple[str, ...], needs: Command) -> None:
    words = ("--data", "needs.py:Data", "--trainer.accelerator", "cpu", "--module.sizes.0", "9")
    refused(needs, "validate", "--module", "needs.py:Needs", *words, *ckpt_path)
    Path("sizes.yaml").write_text("module: {class_path: needs.py:Needs, sizes: [8]}\n")
    out, _ = done(needs("validate", "--config", "sizes.yaml", *words, "--ckpt-path", "runs/version_0"))
    assert "sizes 9 more" in out


def test_names_that_only_one_side_has_are_said(needs: Command, caplog: pytest.LogCaptureFixture) -> None:
    Path("more.yaml").write_text("module: {class_path: needs.py:Needs, a: 6, z: 8}\ndata: needs.py:Data\n")
    caplog.clear()
    out, err = done(
        needs("test", "--config", "more.yaml", "--ckpt-path", "runs/version_0", "--trainer.accelerator", "cpu")
    )
    assert "more ('a', 5) ('z', 8)" in out
    assert "note: module.a is 5, as in the checkpoint, and not 6, as at more.yaml:1" in err
    assert "module.z: missing in the checkpoint, and 8 in the module" in caplog.text


def test_another_module_is_refused_as_before(run: Command) -> None:
    Path("biased.py").write_text(FILE.replace("Linear(1, width)", "Linear(1, width, bias=False)"))
    refused(run, "validate", "--module", "biased.py:Net", "--data", "scaled.py:Data", "--ckpt-path", "last")


def test_a_value_that_cannot_be_made_again_is_said_and_the_others_are_taken(command: Command) -> None:
    inner = "class Outer:\n    class Mode(enum.Enum):\n        A = 1\n\n\n"
    changed = FILE.replace("class Net", f"{inner}class Net").replace("import torch\n", "import enum\nimport torch\n", 1)
    changed = changed.replace("act: torch.nn.Module = None", "mode: str = 'A'")
    Path("scaled.py").write_text(changed.replace("super().__init__()", "super().__init__(); mode = Outer.Mode[mode]"))
    words = ("--module", "scaled.py:Net", "--data", "scaled.py:Data", "--trainer.accelerator", "cpu")
    _, err = done(command("fit", *words, "--module.scale", "2", "--trainer.max_epochs", "1"))
    out, err = done(command("validate", *words, "--trainer.logger", "false", "--ckpt-path", "runs/version_0"))
    assert err.count("note: module.mode is not as in the checkpoint: hyperparameter mode cannot be made again") == 1
    assert "scale 2" in " ".join(out.split())


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
    assert "module.size: 3 in the checkpoint, and 4 in the module" in caplog.text
    caplog.clear()
    assert Trainer(**options).test(Sized(3), data, ckpt_path="last")[0]["size"] == 3
    assert "module.size" not in caplog.text


@pytest.mark.parametrize(
    ("saved", "now", "lines"),
    [
        ({"a": {"b": 1}}, None, ["a/b: 1 in the checkpoint, and missing in the module", "and None in"]),
        (
            None,
            {"a": 1},
            ["module.size: None in the checkpoint, and missing in the module", "module.size/a: missing in the"],
        ),
        ({"a": 1}, {"a": 1, "b": 2}, ["module.size/b: missing in the checkpoint, and 2 in the module"]),
        ({"a": 1, "b": {}}, {"a": 2}, ["module.size/a: 1 in the checkpoint, and 2 in the module"]),
    ],
)
def test_values_of_other_shapes_are_said_too(
    saved: Any, now: Any, lines: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Shaped(Sized):
        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            pass

    data = DataLoader(torch.ones(2, 1))
    options = {"default_root_dir": tmp_path, "accelerator": "cpu", "enable_progress_bar": False}
    Trainer(max_epochs=1, **options).fit(Shaped(saved), data)
    Trainer(**options).test(Shaped(now), data, ckpt_path="last")
    told = [line for line in caplog.messages if line.startswith("module.size")]
    assert len(told) == len(lines)
    for line in lines:
        assert any(line.removeprefix("...") in one for one in told), told


"""Paths of values in nested dicts, dataclasses, lists of those, and a class that stays a dict."""


@pytest.mark.parametrize("more", ['self.save_hyperparameters("n")', 'self.save_hyperparameters({"git": "abc"})', ""])
def test_a_configuration_as_a_whole_is_the_checkpoints(more: str, command: Command) -> None:
    """Also beside other values, and where an argument that is not saved has the name of one of its entries."""
    whole = "\n\nclass Whole(Net):\n    def __init__(self, cfg: dict = {'scale': 4.0}, n: int = 1, scale: int = 9):\n"
    lines = (
        "TrainModule.__init__(self)",
        "self.save_hyperparameters(cfg)",
        more,
        "self.scale, self.sizes = cfg['scale'], [n]",
    )
    whole += "".join(f"        {line}\n" for line in (*lines, "self.width, self.layers = 1, torch.nn.Linear(1, 1)"))
    Path("scaled.py").write_text(FILE + whole)
    Path("run.yaml").write_text(
        RUN.replace("Net", "Whole").replace("width: 3, scale: 2.0, sizes: [7]", "cfg: {scale: 2.0}, n: 5")
    )
    assert command("fit", "--config", "run.yaml")[0] == 0
    Path("run.yaml").write_text(
        Path("run.yaml").read_text().replace("scale: 2.0", "scale: 0.5").replace("n: 5", "n: 6")
    )
    out, _ = done(command("validate", "--config", "run.yaml", "--ckpt-path", "runs/version_0"))
    values = dict(line.split() for line in out.splitlines() if line.startswith("  "))
    assert (float(values["scale"]), float(values["first"])) == (2, 5 if '"n"' in more else 6)
