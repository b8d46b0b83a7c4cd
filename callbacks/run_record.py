"""RunRecord: record the versions and the commit of a run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.callback import Callback
from trainer.checkpoint.disk import replace_notes

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

FILE = "versions.json"
PACKAGES = (
    *("exact-trainer", "torch", "numpy", "safetensors", "deepspeed", "transformers", "datasets", "peft", "accelerate"),
    *("torchmetrics", "torchvision", "torchao", "triton", "torch_xla"),
)


class RunRecord(Callback):
    """Write `versions.json` into the run directory: a list with an entry for each start of the run.

    An entry has the time, the first step, the command, the versions of Python, CUDA and packages, and the commit and
    branch of the working directory's git repository; "changed" says whether files differ from the commit.

    Args:
        packages: names of further packages whose versions to write.
    """

    def __init__(self, packages: list[str] | None = None) -> None:
        self.packages = list(packages or [])

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.is_global_zero or trainer.settings.fast_dev_run or trainer.run.clock.is_over:
            return
        path = trainer.run_dir / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = [*_entries(path), {"step": trainer.global_step, **entry([*PACKAGES, *self.packages])}]
        replace_notes(path, (json.dumps(entries, indent=2) + "\n").encode())


def entry(packages: list[str]) -> dict[str, Any]:
    """Return the time, the command, the versions and the commit."""
    import torch

    versions = {"python": platform.python_version(), "cuda": torch.version.cuda, "platform": platform.platform()}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"time": now, "command": sys.argv, "versions": versions, "git": git_state(Path.cwd())}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch, and True under "changed" if tracked files differ; None: no repository, or no git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return {
        "commit": commit,
        "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _entries(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []
