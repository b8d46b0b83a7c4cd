"""`trainer tune` prints a learning rate or a batch size, and says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from tests.helpers.examples import restored_imports
from tests.helpers.processes import ROOT
from trainer.cli.main import main
from trainer.cli.options import size

CONFIG = str(ROOT / "examples" / "digits" / "config.yaml")


def tune(*words: str) -> int:
    with restored_imports():
        return main(["tune", *words])


def test_a_learning_rate_and_its_picture(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    assert tune("lr", "--config", CONFIG, "--steps", "30", "--min-lr", "1e-5", "--plot", "new/lr.png") == 0
    printed = capsys.readouterr().out
    assert "curve: new/lr.png" in printed
    assert "learning rate: " in printed
    assert Path("new/lr.png").read_bytes().startswith(b"\x89PNG")
    assert not Path("runs").exists()


def test_a_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert tune("batch-size", "--config", CONFIG, "--max", "16", "--first", "4") == 0
    printed = capsys.readouterr().out
    assert "samples/s" in printed
    assert "largest: 16" in printed
    assert "the samples per second grow by less than 5 %" in printed
    assert not Path("runs").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["batch-size", "--max", "16", "--first", "8"], "the samples per second grow by less than 5 %"),
        (["lr", "--steps", "20", "--min-lr", "1e-5"], "learning rate: "),
    ],
)
def test_two_processes_print_once(words: list[str], last: str) -> None:
    where = ["--config", CONFIG, "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    command = [sys.executable, "-m", "trainer", "tune", *words, *where]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout
    assert printed.count(last) == 1


def test_sizes() -> None:
    sizes = {"8GB": 8 * 10**9, "1.5 MiB": 3 * 2**19, "3k": 3000, "100": 100, "2gib": 2**31, ".5KB": 500}
    assert {text: size(text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "0GB", "0.0001KB", "nan", "inf", "5PB", "9" * 400 + "GB"):
        with pytest.raises(ArgumentTypeError, match="give a number with its unit, such as 5GB"):
            size(text)
