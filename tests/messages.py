"""What users are told: every message that a test causes is in one snapshot, tests/messages.json.

A sentence is changed in the product alone; `pytest --rewrite-messages` writes what is said now, and a reviewer reads
the difference. A test asks with `raises_recorded(ConfigError)` instead of `pytest.raises(ConfigError, match="...")`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
import torch

E = TypeVar("E", bound=BaseException)

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "messages.json"
REWRITTEN = "TESTS_REWRITTEN_MESSAGES"
"""The environment variable with the file to which the processes of `pytest --rewrite-messages` add what they hear."""

VARYING = (
    (re.escape(tempfile.gettempdir()) + r"/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[\w\[\]-]+", "<folder>"),
    (re.escape(str(ROOT)), "<repository>"),
    (r"0x[0-9a-f]{6,}", "<address>"),
)
_seen = dict[str, int]()


@contextmanager
def raises_recorded(error: type[E]) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect this error, with the message that the snapshot has for it: the first of a test, its second, ..."""
    with pytest.raises(error) as caught:
        yield caught
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    number = _seen[test] = _seen.get(test, 0) + 1
    name, message = f"{test} {number}", str(caught.value)
    for pattern, text in VARYING:
        message = re.sub(pattern, text, message)
    if REWRITTEN in os.environ:
        with Path(os.environ[REWRITTEN]).open("a") as file:
            file.write(json.dumps([name, message]) + "\n")
    elif _speaks_as_here():
        assert message == _snapshot().get(name), f"{name}: rewrite the snapshot if this is meant"


@cache
def _snapshot() -> dict[str, str]:
    return json.loads(SNAPSHOT.read_text())


@cache
def _speaks_as_here() -> bool:
    """Whether this is the torch of constraints.txt: others say some things, and so we, in other words."""
    return f"torch=={torch.__version__.partition('+')[0]}\n" in (ROOT / "constraints.txt").read_text()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-messages", action="store_true", help="write into tests/messages.json what is said now")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--rewrite-messages") and not hasattr(config, "workerinput"):
        os.environ[REWRITTEN] = tempfile.mkstemp(suffix=".jsonl")[1]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Replace the messages of the tests that ran; forget those of tests that are no more in the files that ran."""
    if REWRITTEN in os.environ and not hasattr(session.config, "workerinput"):
        heard = dict(json.loads(line) for line in Path(os.environ.pop(REWRITTEN)).read_text().splitlines())
        files = {name.partition("::")[0] for name in heard}
        kept = {name: text for name, text in _snapshot().items() if name.partition("::")[0] not in files}
        if session.config.getoption("-k") or any("::" in argument for argument in session.config.args):
            kept = _snapshot()
        SNAPSHOT.write_text(json.dumps(kept | heard, indent=0, sort_keys=True, ensure_ascii=False) + "\n")
