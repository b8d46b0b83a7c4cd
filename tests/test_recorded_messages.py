"""The snapshot of messages: its entries are of tests that exist, another sentence fails, and an option writes it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.processes import fork_python
from tests.messages import ROOT, as_everywhere, snapshot, speaks_as_here

ASKS = """
import pytest
from tests.messages import raises_recorded

@pytest.mark.parametrize("number", {numbers})
def test_numbers(number, tmp_path):
    for word in ("first", "second"):
        with raises_recorded(ValueError):
            raise ValueError(f"{{tmp_path}}: the {{word}} {noun} is {{number}}")
"""


def test_every_message_is_of_a_test_that_exists() -> None:
    entries = {re.match(r"(.+?\.py)::(\w+)", name).groups() for name in snapshot()}  # type: ignore[union-attr]
    files = {file: (ROOT / file).read_text() if (ROOT / file).exists() else "" for file, _ in entries}
    assert entries
    assert [f"{file}::{test}" for file, test in sorted(entries) if f"\ndef {test}(" not in files[file]] == []


def test_what_differs_from_run_to_run_is_left_out(tmp_path: Path) -> None:
    name = "tests/test_recorded_messages.py::test_what_differs_from_run_to_run_is_left_out"
    said = f"<f at 0x7f00aabbcc> of {ROOT}/a.py:12: not {tmp_path}/c, nor memory://{tmp_path.name}/c, on torch 2.1+cpu"
    assert as_everywhere(said, name) == (
        "<f at <address>> of <repository>/a.py:<line>: not <folder>/c, nor memory://<folder>/c, on torch 2.1+<build>"
    )


@pytest.mark.skipif(not speaks_as_here(), reason="the snapshot is of the pinned torch, Python 3.11 and the CPU")
def test_another_sentence_fails_until_it_is_written(tmp_path: Path) -> None:
    """In a project with the snapshot's plugin and one test."""

    def run(*options: str, **asks: object) -> str:
        (tmp_path / "tests" / "test_one.py").write_text(ASKS.format(**asks))
        running = fork_python("-m", "pytest", "-p", "no:cacheprovider", "tests/test_one.py", *options, cwd=tmp_path)
        return running.wait().stdout

    snapshot = tmp_path / "tests" / "messages.json"
    snapshot.parent.mkdir()
    former = ("tests/test_one.py::test_numbers[0] 1", "tests/test_one.py::test_numbers[1] 3", "tests/messages.py::b 1")
    snapshot.write_text(json.dumps(dict.fromkeys(former, "said before")))
    for copied in ("tests/messages.py", "constraints.txt"):
        shutil.copy(ROOT / copied, tmp_path / copied)
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.messages"]')
    (tmp_path / "pytest.ini").write_text("[pytest]")
    assert "2 passed" in run("--rewrite-messages", numbers=[1, 2], noun="number")
    written = json.loads(snapshot.read_text())
    assert written.pop(former[2])  # of a file that has not run
    assert written == {
        f"tests/test_one.py::test_numbers[{number}] {count}": f"<folder>: the {word} number is {number}"
        for number in (1, 2)
        for count, word in ((1, "first"), (2, "second"))
    }
    assert "1 failed, 2 passed" in run(numbers=[1, 2, 3], noun="number")
    assert "2 failed" in run(numbers=[1, 2], noun="count")
