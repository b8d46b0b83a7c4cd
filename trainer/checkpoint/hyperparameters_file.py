"""Read a file of hyperparameters, as loggers and Lightning write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError


def read_hyperparameters(path: str | Path) -> dict[str, Any]:
    """Return the hyperparameters of a YAML or JSON file.

    Raises:
        CheckpointError: there is no such file, or it is no mapping of names to data.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"hparams_file={str(path)!r} cannot be read ({' '.join(str(error).split())}).") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"hparams_file={str(path)!r} has no names with values: give a YAML or JSON mapping.")
    return values
