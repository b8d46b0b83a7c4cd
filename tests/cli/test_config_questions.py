"""`trainer config`: its questions, answered on standard input."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.config_files import HERE, accepted, trainer_section
from tests.helpers.project import Command, assert_recorded, done, refused

ANSWERS = (
    "gpuu",  # is none, and asked again
    "gpu",  # the Trainer's other name for cuda
    "0",
    "2",
    "4",
    "fsdp",  # the strategy's own name is understood, too
    "all",
    "",
    "8",
    "often",
    "500 steps",
    "val_acc",
)


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_answers_are_checked_and_asked_again(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, *ANSWERS)
    out, _ = done(command("config"))
    text = Path("run.yaml").read_text()
    assert_recorded(f"{out}\n{text}")
    strategy = {"class_path": "fsdp", "init_args": {"cpu_offload": True}}
    assert trainer_section("run.yaml")["strategy"] == strategy
    assert accepted(command, "run.yaml", HERE)["num_nodes"] == 2


def test_ctrl_c_leaves_nothing_behind(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *size: int) -> str:
            raise KeyboardInterrupt

    before = os.listdir()
    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert "nothing was written" in refused(command, "config")
    assert os.listdir() == before


def test_enter_at_every_question_is_an_answer(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(monkeypatch, *[""] * 20)
    done(command("config"))
    assert trainer_section("run.yaml")["strategy"] == "ddp"
    assert "callbacks" not in accepted(command, "run.yaml")  # a list would take the place of the module's own


def test_an_input_that_ends_writes_nothing(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.listdir()
    type_in(monkeypatch, "cpu")
    assert "--preset" in refused(command, "config")
    assert os.listdir() == before
