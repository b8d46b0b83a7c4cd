"""Every public name of the installed Accelerate is here, or answered with what to use instead."""

from __future__ import annotations

import inspect
import re
import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import trainer
from trainer import ConfigError, Engine, Trainer
from trainer.cli import launch
from trainer.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

pytest.importorskip("accelerate", reason='needs accelerate: pip install "exact-trainer[dev]"')

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = runpy.run_path(str(DOCS / "names_pages.py"))
PLUGINS = {"FullyShardedDataParallelPlugin": FSDPStrategy, "InitProcessGroupKwargs": DDPStrategy}


def arguments_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def answer(kind: Any, name: str) -> str:
    """Return the message for an argument that Accelerate has; empty where it is an argument here, too."""
    if name in inspect.signature(kind).parameters:
        return ""
    with pytest.raises(ConfigError) as error:
        kind(**{name: None})
    return str(error.value)


@pytest.mark.parametrize("kind", [Trainer, Engine])
def test_every_argument_of_the_accelerator_is_answered(kind: Any) -> None:
    accelerate = import_module("accelerate")
    names = arguments_of(accelerate.Accelerator.__init__) + arguments_of(accelerate.DataLoaderConfiguration.__init__)
    assert [name for name in names if "Use " not in answer(kind, name)] == []


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_option_of_a_plugin_is_answered(plugin: str) -> None:
    kind: Any = PLUGINS[plugin]
    names = arguments_of(getattr(import_module("accelerate.utils"), plugin).__init__)
    answers = {name: answer(kind, name) for name in names}
    assert [name for name, text in answers.items() if text and "Use " not in text] == []


def test_members_options_and_names_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(accelerator="cpu", devices=1)
    with pytest.raises(AttributeError, match=r"gather_for_metrics'. Use engine.setup_dataloaders"):
        engine.gather_for_metrics  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ConfigError, match=r"^notebook_launcher is not here\. Use trainer\.launch"):
        exec("from trainer import notebook_launcher\nnotebook_launcher(print)")
    assert "Use nvme_path=" in answer(DeepSpeedStrategy, "offload_param_nvme_path")
    for option, words in {"--num-processes": "--nproc-per-node", "--fsdp-offload-params": "FSDPStrategy"}.items():
        assert launch.run([option, "train.py"]) == 2
        assert words in capsys.readouterr().err


def test_what_the_answers_name_exists() -> None:
    for text in {text for table in PAGES["ACCELERATE_TABLES"].values() for text in table.values()}:
        for kind, option in re.findall(r"(Trainer|FSDPStrategy|DDPStrategy|DeepSpeedStrategy)\(([a-z_]+)=", text):
            owner: Any = {**vars(import_module("trainer.strategies")), "Trainer": Trainer}[kind]
            assert option in inspect.signature(owner).parameters, text
        for page in re.findall(r"the page '([a-z-]+)'", text):
            assert (DOCS / f"{page}.md").is_file(), text
        for name in re.findall(r"\bengine\.([a-z_]+)", text):
            assert hasattr(Engine, name) or name == "strategy", text
        for name in re.findall(r"(?<!-)\btrainer\.([a-z_]+)", text):
            assert hasattr(Trainer, name) or hasattr(trainer, name), text


def test_the_page_shows_the_tables() -> None:
    path = DOCS / "accelerate-names.md"
    assert PAGES["accelerate_page"]() == path.read_text(), "write the output of: python docs/names_pages.py accelerate"
