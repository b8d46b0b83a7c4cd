"""`trainer config`: its questions, on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.config_files import HERE, accepted, trainer_section
from tests.helpers.processes import ROOT, run_python
from tests.helpers.project import Command


class Terminal:
    """`trainer config` on a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "config", *arguments],
            **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def until(self, words: str) -> str:
        """Return the output up to these words."""
        while words not in self.seen:
            try:
                read = os.read(self.master, 4096)
            except OSError:  # the other end is closed
                read = b""
            assert read, f"{words!r} was not printed:\n{self.seen}"
            self.seen += read.decode().replace("\r\n", "\n")
        before, _, self.seen = self.seen.partition(words)
        return before + words

    def interrupt(self) -> None:
        """Send Ctrl-C until it has an effect: Python's `input` loses one that comes between prompt and reading."""
        os.killpg(self.process.pid, signal.SIGINT)
        while not select.select([self.master], [], [], 2)[0]:
            os.killpg(self.process.pid, signal.SIGINT)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> int:
        return self.process.wait(600)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def test_answers_are_checked_and_asked_again(terminal: Terminal, command: Command) -> None:
    terminal.until("Which? [auto] ")
    terminal.type("gpuu\n")
    assert "'gpuu' is not an option" in terminal.until("Which? [auto] ")
    terminal.type("gpu\n")  # the Trainer's other name for cuda
    terminal.until("How many machines? [1] ")
    terminal.type("0\n")
    assert "integer from 1" in terminal.until("How many machines? [1] ")
    terminal.type("2\n")
    assert "on each machine" in terminal.until("[all] ")
    terminal.type("4\n")
    assert "fsdp" not in terminal.until("Which? [copies] ")
    terminal.type("fsdp\n")  # the strategy's own name is understood, too
    terminal.until("Which? [no] ")
    terminal.type("all\n")
    terminal.until("Which? [bf16-mixed] ")
    terminal.type("\n")
    terminal.until("(gradient accumulation)? [1] ")
    terminal.type("8\n")
    terminal.until("[1 epoch] ")
    terminal.type("often\n")
    assert "'often': type '1 epoch'" in terminal.until("[1 epoch] ")
    terminal.type("500 steps\n")
    terminal.until("[none] ")
    terminal.type("val_acc\n")
    terminal.until(
        "trainer launch --nnodes 2 --nproc-per-node 4 --rdzv HOST:29500 trainer fit --config module.yaml run.yaml"
    )
    assert terminal.end() == 0
    assert trainer_section("run.yaml") == {
        "accelerator": "cuda",
        "devices": 4,
        "num_nodes": 2,
        "strategy": {"class_path": "fsdp", "init_args": {"cpu_offload": True}},
        "precision": "bf16-mixed",
        "accumulate_grad_batches": 8,
        "callbacks": [
            {
                "class_path": "ModelCheckpoint",
                "init_args": {"every_n_train_steps": 500, "monitor": "val_acc", "mode": "max"},
            }
        ],
    }
    assert accepted(command, "run.yaml", HERE)["num_nodes"] == 2
    settings = re.findall(r"^  (\S.*)", Path("run.yaml").read_text(), flags=re.MULTILINE)
    for before, line in pairwise(settings):
        if not line.startswith(("#", "-")):
            assert before.startswith(("#", "-")), f"{line!r} has no comment above it"


def test_ctrl_c_leaves_nothing_behind(terminal: Terminal, tmp_path: Path) -> None:
    terminal.until("Which? [auto] ")
    terminal.type("1\n")
    terminal.until("[1] ")
    terminal.interrupt()
    terminal.until("nothing was written")
    assert terminal.end() == 130
    assert os.listdir(tmp_path) == []


def test_enter_at_every_question_is_an_answer_and_so_is_a_pipe(command: Command) -> None:
    run_python(_FEED.format(text="\\n" * 20), cwd=Path.cwd()).check()
    assert trainer_section("run.yaml")["strategy"] == "ddp"
    assert "callbacks" not in accepted(command, "run.yaml")  # a list would take the place of the module's own


_FEED = """
import io, sys
sys.stdin = io.StringIO("{text}")
from trainer.cli.main import main
sys.exit(main(["config"]))
"""


def test_an_input_that_ends_writes_nothing(tmp_path: Path) -> None:
    (folder := tmp_path / "empty").mkdir()
    script = tmp_path / "feed.py"
    script.write_text(_FEED.format(text="cpu\\n"))
    result = run_python(script, cwd=folder).check(2)
    assert "--preset" in result.stderr
    assert not list(folder.glob("*.yaml"))
    assert not list(folder.glob(".*"))
