"""`trainer config`: presets, and wrong usage."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.helpers.config_files import HERE, MODULE, accepted, trainer_section
from tests.helpers.processes import run_python
from tests.helpers.project import Command, done, refused
from trainer.cli.config.wizard import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_accepted_by_fit(command: Command, name: str) -> None:
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    code, out, err = command("config", "--preset", name)
    assert (code, err) == (0, "")
    assert "use it with: trainer fit --config module.yaml run.yaml\n" in out
    assert ("check it with: " in out) == (name != "tpu")
    for line in re.findall(r"check it with: trainer (fit .*)\n", out):
        Path("module.yaml").write_text(MODULE)
        assert command(*line.split(), "--no-data")[0] == 0
    given, resolved = trainer_section("run.yaml"), accepted(command, "run.yaml", HERE)
    del resolved["default_root_dir"]
    assert {**resolved, "accelerator": given.get("accelerator", "auto")} == {"accelerator": "auto", **given}
    assert sorted(os.listdir()) == ["module.yaml", "mymodel.py", "run.yaml"]


def test_the_presets_say_what_they_are_called(command: Command) -> None:
    assert trainer_section(_preset(command, "fsdp"))["strategy"] == "fsdp"
    offload = trainer_section(_preset(command, "fsdp-offload"))["strategy"]
    assert offload == {"class_path": "fsdp", "init_args": {"cpu_offload": True}}
    assert trainer_section(_preset(command, "bf16")) == {"precision": "bf16-mixed"}
    zero = trainer_section(_preset(command, "zero3-offload"))["strategy"]
    assert zero == {
        "class_path": "deepspeed_stage_3",
        "init_args": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    }


def _preset(command: Command, name: str) -> str:
    assert command("config", "--preset", name, "--output", f"{name}.yaml")[0] == 0
    return f"{name}.yaml"


def test_one_preset_trains(project: Path) -> None:
    run_python("-m", "trainer", "config", "--preset", "cpu", cwd=project).check()
    (project / "module.yaml").write_text(MODULE)
    more = ("--trainer.max_steps", "2", "--trainer.logger", "false")
    result = run_python("-m", "trainer", "fit", "--config", "module.yaml", "run.yaml", *more, cwd=project).check()
    assert "after 2 steps" in result.stdout


def test_the_names_are_listed_and_a_wrong_one_is_reported(command: Command) -> None:
    out, _ = done(command("config", "--list"))
    assert [line.split()[0] for line in out.splitlines()] == list(PRESETS)
    refused(command, "config", "--preset", "zero4")
    assert not Path("run.yaml").exists()


def test_nothing_is_replaced_without_force(command: Command) -> None:
    Path("run.yaml").write_text("trainer: {max_epochs: 7}\n")
    Path("x.json").write_text('{"zero_optimization": {"stage": 2}}')
    for way in (["--preset", "cpu"], ["--from", "x.json"], []):
        refused(command, "config", *way)
    assert Path("run.yaml").read_text() == "trainer: {max_epochs: 7}\n"
    assert "nope.json: there is no such file" in command("config", "--from", "nope.json")[2]
    assert command("config", "--preset", "cpu", "--force")[0] == 0
    assert trainer_section("run.yaml")["precision"] == "32-true"
