"""Where `trainer launch` puts the output of its processes, in torchrun's words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT
from trainer.cli.main import main

SAYS = """
import os, sys

print("hello from", os.environ["RANK"], flush=True)
print("error of", os.environ["RANK"], file=sys.stderr, flush=True)
"""


def launched(folder: Path, *options: str, script: str = SAYS) -> subprocess.CompletedProcess[str]:
    (folder / "says.py").write_text(script)
    command = [sys.executable, "-m", "trainer", "launch", "--nproc-per-node", "2", *options, "says.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_one_machine_meets_at_a_port_that_is_free_and_shows_the_ranks_that_are_asked_for(tmp_path: Path) -> None:
    done = launched(tmp_path, "--rdzv-endpoint", "localhost:0", "--local-ranks-filter", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["hello from 1", ""]
    assert "error of 1" in done.stderr
    assert "error of 0" not in done.stderr


def test_output_goes_into_files_by_rank(tmp_path: Path) -> None:
    done = launched(tmp_path, "--log-dir", "logs", "--redirects", "0:1,1:3", "--tee", "0:2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "the output of the processes: logs" in done.stderr
    assert "[trainer0]:error of 0" in done.stderr
    found = {str(Path(*file.parts[-2:])): file.read_text() for file in (tmp_path / "logs").rglob("*.log")}
    assert found == {
        "0/stdout.log": "hello from 0\n",
        "0/stderr.log": "error of 0\n",
        "1/stdout.log": "hello from 1\n",
        "1/stderr.log": "error of 1\n",
    }


FAILS = """
import os, sys

if os.environ["RANK"] == "1":
    raise SystemExit(print("why it failed", file=sys.stderr) or 3)
"""


def test_a_rank_that_fails_where_nobody_sees_its_errors_is_named(tmp_path: Path) -> None:
    done = launched(tmp_path, "--log-dir", "logs", "--local-ranks-filter", "0", script=FAILS)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "rank 1 failed with exit code 3; its errors: /dev/null"
    done = launched(tmp_path, "--redirects", "2", "--max-restarts", "1", script=FAILS)
    assert done.returncode == 3
    found = [line.partition("; its errors: ") for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert [one[0] for one in found] == 2 * ["rank 1 failed with exit code 3"]
    assert [Path(one[2]).read_text() for one in found] == 2 * ["why it failed\n"]
    assert "rank" not in launched(tmp_path, script=FAILS).stderr  # it has said it itself


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tee", "9"), "--tee: '9': give 3 for the output and errors of all processes"),
        (("--redirects", "0:4"), "--redirects: '0:4': give 3"),
        (("--log-dir", "s3://bucket/logs"), "--log-dir='s3://bucket/logs' is a URL: give a path of this machine"),
        (("--local-ranks-filter", "a"), "'a': give a number from 0"),
        (("--nnodes", "2", "--rdzv-endpoint", "localhost:0"), "give --rdzv HOST:PORT, the same on all"),
        (("--log-dirs", "x"), "Did you mean '--log-dir'"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("says.py").write_text(SAYS)
    assert main(["launch", "--nproc-per-node", "2", *options, "says.py"]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert "hello" not in shown.out
