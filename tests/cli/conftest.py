"""Run the command inside the test's process, on a small project."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.examples import restored_imports
from tests.helpers.project import USERS_FILE, Command
from trainer.cli.main import main


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the folders that the command puts on the path, and the modules that it imports."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with restored_imports():
        yield


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return the current folder, with the user's file in it."""
    (tmp_path / "mymodel.py").write_text(USERS_FILE)
    return tmp_path


@pytest.fixture
def command(project: Path, _as_before: None, capsys: pytest.CaptureFixture[str]) -> Command:
    """See `Command`."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
