"""What users are told: every message that a test causes is in one snapshot, tests/messages.json.

A test asks with `raises_recorded(ConfigError)` instead of `pytest.raises(ConfigError, match="...")`. A sentence is
changed in the product alone; `pytest --rewrite-messages FILES` writes what is said now, and a reviewer reads the
difference. What differs from run to run, or from machine to machine, has a pattern in `VARYING`, or a match in its
test; so has what a process of a test says, which is not of any test itself.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.helpers.processes import DEVICE

E = TypeVar("E", bound=BaseException)

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "messages.json"

VARYING = [
    (re.escape(str(ROOT)), "<repository>"),
    (r"0x[0-9a-f]{6,}", "<address>"),
    (r"\.py:\d+", ".py:<line>"),
    (r"\.tmp\w{6}\b", ".tmp<name>"),
    (r"\+(cpu|cu\d+)\b", "+<build>"),
    (r"\[[\d ,:-]+\] \[WARNING\] \[real_accelerator[^\n]*\n", ""),  # DeepSpeed says it once in a process
]
_seen = dict[str, int]()
_heard: dict[str, str | None] | None = None
"""With --rewrite-messages: what was said, by name; and of each test that was collected None, or "" once it passed."""


@contextmanager
def raises_recorded(error: type[E]) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect this error, with the message that the snapshot has for it: the first of a test, its second, ..."""
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    number = _seen[test] = _seen.get(test, 0) + 1
    name, message = f"{test} {number}", as_everywhere(str(caught.value), test)
    if _heard is not None:
        _heard[name] = message
    elif speaks_as_here():
        assert message == snapshot().get(name), f"{name}: if this is meant, pytest --rewrite-messages"


def as_everywhere(message: str, test: str) -> str:
    """Return the message without what VARYING lists, and without the name of the test's folder."""
    folder = re.sub(r"\W", "_", test.partition("::")[2])[:30] + r"\d+"  # as pytest's tmp_path
    for pattern, text in [*VARYING, (rf"\b{folder}\b", "<folder>")]:
        message = re.sub(pattern, text, message)
    return message


@cache
def snapshot() -> dict[str, str]:
    return json.loads(SNAPSHOT.read_text())


@cache
def speaks_as_here() -> bool:
    """Whether this is the Python, torch and device of the snapshot: others say some things, and so we, otherwise."""
    pinned = f"torch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text()
    return pinned and sys.version_info[:2] == (3, 11) and DEVICE == "cpu"


@pytest.fixture(autouse=True, scope="session")
def _folders_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = re.escape(str(tmp_path_factory.getbasetemp()))
    VARYING[:0] = [(base + r"/[\w\[\]-]+", "<folder>"), (base + r"(?=\W)", "<folder of the session>")]


# -- writing the snapshot ----------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-messages", action="store_true", help="write into tests/messages.json what is said now")


def pytest_configure(config: pytest.Config) -> None:
    global _heard
    _heard = {} if config.getoption("--rewrite-messages") else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note which tests there are, before some are left out."""
    if _heard is not None:
        _heard.update({item.nodeid: None for item in items})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _heard is not None and report.when == "call" and report.passed:
        _heard[report.nodeid] = ""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of pytest-xdist has heard."""
    if _heard is not None:
        for name, text in node.workeroutput["messages"].items():
            _heard.setdefault(name, text)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace the messages of the tests that passed; forget those of tests that are no more in the files that ran."""
    if _heard is None:
        return
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["messages"] = _heard
        return
    kept = {name: text for name, text in snapshot().items() if (ROOT / _file(name)).exists()}
    if not any("::" in argument for argument in session.config.args):
        files = {_file(name) for name in _heard}
        kept = {name: text for name, text in kept.items() if _test(name) in _heard or _file(name) not in files}
    kept = {name: text for name, text in kept.items() if _heard.get(_test(name)) is None}
    said = {name: text for name, text in _heard.items() if text}
    SNAPSHOT.write_text(json.dumps(kept | said, indent=0, sort_keys=True, ensure_ascii=False) + "\n")


def _test(name: str) -> str:
    return name.rpartition(" ")[0]


def _file(name: str) -> str:
    return name.partition("::")[0]
