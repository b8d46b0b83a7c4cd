"""What the tests of `trainer config` share: a written file, and what `trainer fit` makes of it."""

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
    """What `trainer fit` makes of it, with a module beside it."""
    Path("module.yaml").write_text(MODULE)
    code, out, err = command("fit", "--config", file, "--config", "module.yaml", "--print-config", *more)
    assert code == 0, err
    resolved: dict[str, Any] = yaml.safe_load(out)["trainer"]
    return resolved
