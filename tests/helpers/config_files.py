"""Check configuration files that `trainer config` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.helpers.project import Command

MODULE = "module: mymodel.py:Net\ndata: mymodel.py:Data\n"
HERE = "--trainer.accelerator=auto"
"""A configuration for TPUs cannot be used on a machine without."""


def trainer_section(file: Path | str) -> dict[str, Any]:
    section: dict[str, Any] = yaml.safe_load(Path(file).read_text())["trainer"]
    return section


def accepted(command: Command, file: str, *more: str) -> dict[str, Any]:
    """Return the configuration that `trainer fit` resolves from a file and a module."""
    Path("module.yaml").write_text(MODULE)
    code, out, err = command("fit", "--config", file, "--config", "module.yaml", "--print-config", *more)
    assert code == 0, err
    resolved: dict[str, Any] = yaml.safe_load(out)["trainer"]
    return resolved
