"""What a configuration describes, in Python; and values for several places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.checkpoint.directory import locate
from trainer.checkpoint.format import read_checkpoint
from trainer.cli.main import main
from trainer.config import load
from trainer.config.loading import load as checked
from trainer.config.read import read
from trainer.config.tree import Diagnostics

RUN = """
module: {class_path: tests.helpers.toy.Toy}
trainer: {max_epochs: "${vars.epochs}", accelerator: cpu, logger: false, accumulate_grad_batches: "${vars.epochs}"}
vars: {epochs: 3, words: [a]}
"""


def test_the_objects_of_a_file_train_as_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    objects = load(file, overrides={"trainer.default_root_dir": str(tmp_path), "vars.epochs": 2})
    assert type(objects.module).__name__ == "Toy"
    assert (objects.data, objects.ckpt_path) == (None, None)
    assert (objects.trainer.max_epochs, objects.trainer.accumulate_grad_batches) == (2, 2)
    assert not (tmp_path / "version_0").exists()


def test_later_files_and_overrides_win_and_problems_are_listed(tmp_path: Path) -> None:
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text(RUN)
    other.write_text("trainer: {max_epochs: 5}\nvars: {epochs: 4}\n")
    assert load(one, other).trainer.max_epochs == 5
    assert load(one, other, overrides={"trainer.max_epochs": 6}).trainer.max_epochs == 6
    with raises_recorded(ConfigError):
        load(one, overrides={"trainer.max_epoch": 3, "vars.epochs": "many"})


def test_vars_are_not_kept_but_their_values_are(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    found = Diagnostics()
    resolved = checked(read([str(file)], [], found), found).resolved
    assert "vars:" not in resolved
    assert "max_epochs: 3" in resolved
    file.write_text(RUN.replace("vars.epochs", "vars.epoch"))
    with raises_recorded(ConfigError):
        load(file)


def test_a_typed_value_to_which_nothing_refers_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.replace("words: [a]", "words: [a], rates: {net: 1}, unused: &a {lr: 1}"))
    for name in ("vars.epoch", "vars.epoch_s", "vars.unused.lr", "vars.unused"):
        with raises_recorded(ConfigError):
            load(file, overrides={name: 2})
    with raises_recorded(ConfigError):
        load(file, overrides={"vars.epoch": 2})
    # Also inside of what is referred to, or around it, and by way of another.
    used = {"vars.rates.net": 2, "trainer.max_steps": "${vars.words.0}", "vars.words": [7]}
    others = {"trainer.accumulate_grad_batches": "${vars.${vars.which}.net}", "vars.which": "rates"}
    trainer = load(file, overrides={**used, **others}).trainer
    assert (trainer.max_steps, trainer.accumulate_grad_batches) == (7, 2)


def test_a_pipe_is_a_configuration(tmp_path: Path) -> None:
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(RUN,))
    writer.start()
    try:
        assert load(pipe).trainer.max_epochs == 3
    finally:
        writer.join()


MINE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import DataModule, TrainModule

class Data(DataModule):
    def __init__(self, n: int = 3, size: int = 4):
        super().__init__()
        self.num_classes, self.made_from = n, torch.initial_seed()

    @property
    def shape(self):
        return [self.num_classes, 2]

    @property
    def broken(self):
        raise ValueError("no file")

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 5), torch.randint(3, (8,))), batch_size=4)

class Module(TrainModule):
    def __init__(self, num_classes: int, lr: float = 0.5, shape: tuple[int, ...] = (), size: int = 0):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(5, num_classes)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
"""
LINKED = """
module: {class_path: mine.py:Module, num_classes: "${data.num_classes}", shape: ["${data.num_classes}", 7]}
data: {class_path: mine.py:Data}
trainer: {max_epochs: 1, accelerator: cpu, logger: false, enable_progress_bar: false}
optimizer: {class_path: SGD, lr: "${module.lr}"}
lr_scheduler: {class_path: StepLR, step_size: "${data.num_classes}", frequency: "${data.num_classes}"}
"""


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the configuration of a module that gets what the data know, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(LINKED)
    return tmp_path / "run.yaml"


def test_the_module_gets_what_the_object_of_the_data_has(linked: Path) -> None:
    one = load(linked)
    one.trainer.fit(one.module, one.data)
    assert dict(one.module.hparams) == {"num_classes": 3, "lr": 0.5, "shape": (3, 7), "size": 0}
    config = yaml.safe_load((one.trainer.run_dir / "config.yaml").read_text())
    assert config["module"]["init_args"]["num_classes"] == "${data.num_classes}"
    assert config["optimizer"]["init_args"]["lr"] == 0.5
    assert config["lr_scheduler"]["init_args"]["step_size"] == "${data.num_classes}"
    optimizers = one.module.configure_optimizers()
    assert optimizers["optimizer"].param_groups[0]["lr"] == 0.5
    assert (optimizers["lr_scheduler"]["scheduler"].step_size, optimizers["lr_scheduler"]["frequency"]) == (3, 3)
    again = load(one.trainer.run_dir / "config.yaml", overrides={"data.n": 4})
    assert again.module.hparams["num_classes"] == 4
    checkpoint = one.trainer.run_dir / "checkpoints" / "last"
    assert type(one.module).load_from_checkpoint(checkpoint).hparams == one.module.hparams


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"module.size": "${data.size}"}, {"size": 4}),  # a default, which the object has not kept
        ({"vars.n": "${data.num_classes}", "module.size": "${vars.n}"}, {"size": 3}),
        ({"module.shape": "${data.shape}"}, {"shape": (3, 2)}),
        ({"data.n": "${trainer.accumulate_grad_batches}"}, {"num_classes": 1}),
    ],
)
def test_references_to_defaults_and_to_the_data(
    linked: Path, overrides: dict[str, str], expected: dict[str, Any]
) -> None:
    assert load(linked, overrides=overrides).module.hparams.items() >= expected.items()


@pytest.mark.parametrize(
    "overrides",
    [
        {"module.lr": "${module.nothing}"},
        {"module.size": "${data.nothing}"},
        {"module.size": "${data.broken}"},
        {"module.size": "${data.shape}"},
        {"data.n": "${data.num_classes}"},
        {"data.n": "${module.num_classes}"},
        {"trainer.max_steps": "${data.num_classes}"},
        {"module.lr": "${module.size}", "module.size": "${module.lr}"},
        {"trainer.default_root_dir": "runs-${data.num_classes}"},
        {"trainer.max_steps": "${optimizer.momentum}"},
    ],
    ids=str,
)
def test_references_that_cannot_be(linked: Path, overrides: dict[str, str]) -> None:
    with raises_recorded(ConfigError):
        load(linked, overrides=overrides)


def test_texts_in_overrides_stay_texts(linked: Path) -> None:
    objects = load(linked, overrides={"trainer.default_root_dir": "0042 #1"})
    assert objects.trainer.default_root_dir == "0042 #1"


def test_references_within_a_text_are_written_as_in_a_file(linked: Path) -> None:
    root = "${trainer.seed}-${vars.off}-${vars.count}-${vars.none}"
    given = {"trainer.default_root_dir": root, "vars.off": False, "vars.count": "0042", "vars.none": None}
    assert load(linked, overrides=given).trainer.default_root_dir == "null-false-0042-null"


def test_references_are_typed_and_evaluations_have_the_value_of_the_checkpoint(
    linked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path("mine.py")
    mine.write_text(f"{MINE}\n    validation_step = training_step\n\nData.val_dataloader = Data.train_dataloader\n")
    options = ["--config", "run.yaml", "--module.size", "${data.num_classes}"]
    assert main(["fit", *options]) == 0
    kept = read_checkpoint(locate("runs/version_0"), keys=["hyperparameters"])["hyperparameters"]["module"]
    assert kept == {"num_classes": 3, "lr": 0.5, "shape": (3, 7), "size": 3}
    capsys.readouterr()
    assert main(["validate", *options[:2], "--ckpt-path", "last", "--data.n", "9"]) == 0
    assert "module.num_classes is 3, as in the checkpoint, and not ${data.num_classes}" in capsys.readouterr().err
