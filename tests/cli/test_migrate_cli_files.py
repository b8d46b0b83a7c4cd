"""`trainer migrate` on files of LightningCLI as projects have them, and on notebooks: rewritten, or listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.project import Command, assert_recorded, refused
from tests.messages import raises_recorded
from trainer.config.files import read_tree
from trainer.config.read import merged
from trainer.config.tree import Diagnostics
from trainer.errors import ConfigError

MODEL = "model:\n  class_path: my.nets.Classifier\n  init_args:\n    lr: 0.1\n"
DATA = "data:\n  class_path: my.data.EuroSAT\n  init_args:\n    batch_size: 64\n"
LOGGER = "trainer.loggers.CSVLogger"
OTHER = "test: {model: resnet, net: {class_path: a.B}}\n"
FILES = {
    "no trainer": MODEL + DATA,
    "data alone": DATA,
    "short names": "model:\n  class_path: ClassificationTask\ndata:\n  class_path: EuroSATDataModule\n",
    "dict_kwargs after init_args": MODEL + DATA + "  dict_kwargs:\n    root: data/eurosat\n",
    "dict_kwargs alone": MODEL + "data:\n  class_path: my.data.EuroSAT\n  dict_kwargs:\n    root: x\n",
    "dict_kwargs in braces": "data: {class_path: my.Data, init_args: {n: 1}, dict_kwargs: {root: x}}\n",
    "dict_kwargs of a callback": "trainer:\n  callbacks:\n  - class_path: my.Stop\n    dict_kwargs:\n      n: 1\n",
    "a seed without trainer": "seed_everything: 3  # mine\n" + MODEL,
    "a seed that is true": "seed_everything: true\n" + MODEL,
    "a trainer": "trainer:\n  gpus: 1\n" + MODEL,
    "an empty trainer": "trainer:\n" + MODEL,
    "arguments of a fixed class": "seed_everything: 1\nmodel:\n  lr: 0.1\n",
    "keys of a parser of its own": MODEL + "tags: [a]\n",
    "an optimizer": MODEL + "optimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: 0.1\n",
    "known short names": MODEL
    + "trainer:\n  callbacks:\n  - class_path: EarlyStopping\n    init_args:\n      monitor: v\n",
    "classes of lightning": MODEL + "trainer:\n  logger:\n    class_path: lightning.pytorch.loggers.CSVLogger\n",
    "nested short names": MODEL + "    net:\n      class_path: ResNet\n",
    "windows' lines": (MODEL + DATA).replace("\n", "\r\n"),
    "comments": "# of my project\n" + MODEL.replace("lr: 0.1", "lr: 0.1  # large") + "# the end\n",
    "what an override changes": "model: {init_args: {lr: 0.5}}\n",
    "an override with a trainer": "model:\n  lr: 0.5\ntrainer:\n  max_epochs: 3\n",
    "keys with dots": "trainer.max_epochs: 3\nmodel.init_args.lr: 0.1\n",
    "a dotted key alone": "optimizer.lr: 3\n",
    "words of YAML 1.1, in lines that move": "seed_everything: 010\n"
    + DATA
    + "    shuffle: off  # on\n"
    + "trainer:\n  profiler: on\n",
    "two documents": MODEL + "---\n" + DATA,
}

TEXTS_OF_1_1 = ("0o17", "08")
WORDS = (
    *("no", "Off", "on", "YES", "y", "n", "true", "~", "null", "010", "-017", "0b11", "0x_1F", "0x1F", "1_000", "1__0"),
    *("12:30", "190:20:30", "1:30.5", "1.5", "+.inf", ".5_0", "1.e+5", "a", *TEXTS_OF_1_1),
)


def migrated(command: Command, file: Path, content: str) -> tuple[str, str]:
    """Return the new content of a file, and what has been listed."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content.encode())
    code, out, err = command("migrate", str(file.parent), "--write")
    assert (code, err) == (0, "")
    new = file.read_bytes().decode()
    assert command("migrate", str(file.parent))[1].count("\n---") == 0  # there is nothing more to do
    return new, out


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_lightning_cli_is_rewritten_or_listed(name: str, command: Command, tmp_path: Path) -> None:
    new, out = migrated(command, tmp_path / "p" / "1.yaml", FILES[name])
    assert_recorded(f"{new}\n{out}")
    found = Diagnostics()
    if "by hand: 0" in out and name not in ("data alone", "two documents"):  # then it is one of this package's
        merged([str(tmp_path / "p" / "1.yaml")], [], found)
        assert found.problems == []


@pytest.mark.parametrize("word", WORDS)
def test_a_value_is_what_lightning_cli_reads(word: str, command: Command, tmp_path: Path) -> None:
    """Its YAML is 1.1, as PyYAML's; ours is 1.2."""
    inside = f"    a: {word}\n    d: {{k: [{word} , '{word}']}}  # {word}\n    e:\n      {word}: \"{word}\"\n"
    content = "model:\n  class_path: my.Net\n  init_args:\n" + inside
    new, out = migrated(command, tmp_path / "p" / "1.yaml", content)
    read = read_tree(str(tmp_path / "p" / "1.yaml"), Diagnostics())
    assert read is not None
    if word in TEXTS_OF_1_1:
        assert new == content.replace("model:", "module:")
        assert f"1.yaml:4: {word}: a text in YAML 1.1, which LightningCLI reads, and " in out
    else:
        assert repr(read.plain()["module"]) == repr(yaml.safe_load(content)["model"])
        assert "to decide by hand: 0" in out
    ours = tmp_path / "ours" / "1.yaml"
    assert migrated(command, ours, "module: {class_path: my.Net}\ntrainer:\n" + inside)[0].endswith(inside)


def test_json_of_lightning_cli_is_rewritten_or_listed(command: Command, tmp_path: Path) -> None:
    settings = {"gpus": 1, "profiler": True, "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger"}}
    given = {"model": {"class_path": "my.Net", "dict_kwargs": {"a": 1}}, "trainer": settings}
    here = {"accelerator": "gpu", "devices": 1, "profiler": "simple", "logger": {"class_path": LOGGER}}
    expected = {"module": {"class_path": "my.Net", "init_args": {"a": 1}}, "trainer": here}
    file = tmp_path / "g.json"
    for indent in (None, 2, "\t"):
        file.write_text(json.dumps(given, indent=indent))
        code, out, err = command("migrate", str(file), "--write")
        assert (code, err) == (0, "")
        assert json.loads(file.read_text()) == expected
        assert "to decide by hand: 0" in out
        findings = Diagnostics()
        merged([str(file)], [], findings)
        assert findings.problems == []
    file.write_text(json.dumps({"seed_everything": 1, **given}))
    assert "g.json:1: seed_everything: use 'seed:'" in command("migrate", str(file))[1]


def test_other_yaml_files_are_left_alone(command: Command, tmp_path: Path) -> None:
    for number, text in enumerate(
        ("model: resnet\ndata: x\n", "services:\n  a: {image: b}\n", "data:\n  url: x\n", OTHER)
    ):
        new, out = migrated(command, tmp_path / f"p{number}" / "1.yaml", text)
        assert new == text
        assert "to decide by hand: 0" in out


@pytest.mark.parametrize(
    "content", [MODEL, "seed_everything: 1\n" + MODEL, "model: {class_path: my.Net}\ntrainer: {}\n"]
)
def test_fit_says_what_to_do_with_a_file_of_lightning_cli(content: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with raises_recorded(ConfigError):
        merged([str(file)], [], Diagnostics())


def cell(*lines: str, kind: str = "code") -> dict[str, object]:
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": [*lines], **more}


def test_cells_of_a_notebook_are_rewritten_as_one_file(command: Command, tmp_path: Path) -> None:
    cells = [
        cell("# Training with lightning\n", kind="markdown"),
        cell("%load_ext tensorboard\n", "!pip install lightning\n", "import lightning.pytorch as pl"),
        cell("class Net(pl.LightningModule):\n", "    pass\n", "if True:\n", "    %time x = 1"),
        cell(
            "net = Net()\n",
            "pl.Trainer(gpus=1).fit(net)\n",
            "parser.link_arguments('data.n', 'model.n', compute_fn=len)\n",
        ),
    ]
    notebook = {"cells": cells, "metadata": {"kernelspec": {"name": "python3"}}, "nbformat": 4, "nbformat_minor": 5}
    new, out = migrated(command, tmp_path / "p" / "1.ipynb", json.dumps(notebook, indent=1) + "\n")
    texts = ["".join(one["source"]) for one in json.loads(new)["cells"]]
    assert texts[0] == "# Training with lightning\n"
    assert texts[1].startswith("%load_ext tensorboard\n!pip install lightning\nimport trainer as pl")
    assert "class Net(" in texts[2]
    assert "LightningModule" not in texts[2]
    assert texts[2].endswith("    pass\nif True:\n    %time x = 1")
    assert "devices=1" in texts[3]
    assert "cell 3: link_arguments(compute_fn=): use a property of the data module" in out
    assert {**json.loads(new), "cells": []} == {**notebook, "cells": []}


def test_a_notebook_that_is_no_python_is_reported_and_left(command: Command, tmp_path: Path) -> None:
    for number, text in enumerate((json.dumps({"cells": [cell("import lightning\n", "df?")]}), '{"lightning": 1}')):
        file = tmp_path / f"{number}.ipynb"
        file.write_text(text)
        refused(command, "migrate", str(file), "--write")
        assert file.read_text() == text
